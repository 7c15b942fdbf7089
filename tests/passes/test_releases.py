"""Passes for older releases of TileLang: each undoes what the release does differently."""

import re
import warnings

import pytest
import tilelang.language as T
from tilelang import tvm
from tvm.target import Target

from tileweave import language as W
from tileweave.builtins.errors import LanguageError
from tileweave.codegen import limits, refusals
from tileweave.passes import run_group
from tileweave.passes.ir import releases
from tileweave.passes.target import avoid_tma

SM_80, SM_90 = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_90a"))


@T.prim_func
def program(S: W.Symmetric((16, 64), "float32"), X: T.Tensor((16, 64), "float32")):
    with T.Kernel(2, threads=64) as bx:
        tile = T.alloc_shared((8, 64), "float32")
        part = T.alloc_shared((8, 32), "float32")
        T.copy(X[bx * 8, 0], tile)
        T.copy(tile, S[W.rank(), bx * 8, 0])
        T.copy(S[W.rank(), bx * 8, 0], part)
        if T.get_thread_binding() == 0:
            X[0, 0] = 1.0


def grouped(func):
    (func,) = run_group(tvm.IRModule({"p": func}), 2, 1 << 20, ["group"]).functions.values()
    return func


@pytest.fixture
def installed(monkeypatch):
    def install(*release: int) -> None:
        monkeypatch.setattr(avoid_tma, "installed_tilelang", lambda: release)
        monkeypatch.setattr(limits, "installed_tilelang", lambda: release)

    return install


@pytest.mark.skipif(releases._LOOPS, reason="this TileLang has loops itself")
def test_thread_loops_and_indices(monkeypatch):
    new = releases.upgrade_ir(program)
    monkeypatch.setattr(releases, "_LOOPS", True)
    old = releases.downgrade_ir(new)
    text = old.script()
    assert "launch_thread" not in text and 'T.thread_binding(64, thread="threadIdx.x")' in text
    assert 'T.thread_binding(1, thread="threadIdx.z")' in text
    tvm.ir.assert_structural_equal(releases.upgrade_ir(old), new)
    tvm.ir.assert_structural_equal(releases.upgrade_ir(new), new)


def test_all_releases_show_one_form():
    text = releases.upgrade_ir(program).script()
    assert "T.launch_thread_idx(0)" in text and "threadIdx" not in text
    assert "T.region(" in text


def copies(func) -> list[str]:
    return [line.strip() for line in func.script().splitlines() if "T.copy(" in line]


def test_contiguous_parts_of_strided_tensors_need_no_tma(installed):
    installed(0, 1, 12)
    load, store, partial = copies(avoid_tma.avoid_tma(grouped(program), SM_90, False))
    assert "disable_tma" in store
    assert "disable_tma" not in load and "disable_tma" not in partial


@pytest.mark.parametrize(("release", "target"), [((0, 1, 13), SM_90), ((0, 1, 12), SM_80)])
def test_other_releases_and_targets_do_not_change(installed, release, target):
    installed(*release)
    func = grouped(program)
    assert avoid_tma.avoid_tma(func, target, False).same_as(func)


@T.prim_func
def explicit(S: W.Symmetric((16, 64), "float32"), X: T.Tensor((16, 64), "float32")):
    with T.Kernel(2, threads=64) as bx:
        tile = T.alloc_shared((8, 64), "float32")
        T.copy(X[bx * 8, 0], tile)
        T.tma_copy(tile, S[W.rank(), bx * 8, 0])


def test_an_explicit_tma_copy_is_refused(installed):
    installed(0, 1, 12)
    with pytest.raises(LanguageError, match=r"expected T\.copy, or tilelang==0\.1\.13"):
        avoid_tma.avoid_tma(grouped(explicit), SM_90, False)


@T.prim_func
def nested(X: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=64):
        tile = T.alloc_shared((64, 16), "float32")
        for _ in T.serial(2):
            for k in T.Pipelined(4, num_stages=2):
                T.copy(X[0, k * 16], tile)


def inside(func, target=SM_90, error: Exception | None = None) -> bool:
    """Return whether warp specialization is disabled inside ``limits``."""
    with limits.work_around_limits(tvm.IRModule({"name": func}), target):
        if error is not None:
            raise error
        config = tvm.transform.PassContext.current().config
        return bool(config.get("tl.disable_warp_specialized", False))


def test_a_nested_pipeline_is_not_specialized(installed):
    installed(0, 1, 12)
    with pytest.warns(UserWarning, match=r"^name: TileLang .* without specialization, .*0\.1\.13"):
        assert inside(nested)


@pytest.mark.parametrize(
    ("release", "func", "target"),
    [((0, 1, 13), nested, SM_90), ((0, 1, 12), program, SM_90), ((0, 1, 12), nested, SM_80)],
)
def test_other_kernels_are_specialized(installed, release, func, target):
    installed(*release)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not inside(func, target)


@T.prim_func
def sliced(X: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=64):
        for i, j in T.Parallel(64, 16):
            X[i, j * 4 : j * 4 + 4] = T.Broadcast(T.float32(1), 4)


@pytest.mark.parametrize(
    ("release", "func", "disabled"),
    [((0, 1, 13), sliced, True), ((0, 1, 14), sliced, False), ((0, 1, 13), program, False)],
)
def test_slices_in_parallel_loops_are_not_checked(installed, release, func, disabled):
    installed(*release)
    with limits.work_around_limits(tvm.IRModule({"name": func}), SM_90):
        config = tvm.transform.PassContext.current().config
        assert bool(config.get("tl.disable_data_race_check", False)) == disabled


@pytest.mark.parametrize(
    ("release", "hint"), [((0, 1, 14), r", or tilelang==0\.1\.15"), ((0, 1, 15), "")]
)
def test_a_failure_of_an_old_release_names_the_newest(monkeypatch, release, hint):
    error = tvm.error.InternalError("Check failed: (a) is false: first. second")

    def fail(mod):
        raise error

    monkeypatch.setattr(refusals, "installed_tilelang", lambda: release)
    expected = (
        rf"^name: TileLang [0-9.]+ fails: first; expected another form of this statement{hint}$"
    )
    refused = refusals.explain_failure(error, tvm.IRModule({"name": program}), fail, SM_90)
    assert re.match(expected, str(refused))


@T.prim_func
def of_vectors(P: T.Tensor((4,), "float16x2")):
    with T.Kernel(1, threads=32):
        P[1] = W.atom_exch(P[0], P[2])


def test_tensors_of_vectors_are_refused(installed):
    installed(0, 1, 12)
    expected = r"^atom_exch: P has type float16x2, .* tilelang==0\.1\.13$"
    with pytest.raises(LanguageError, match=expected):
        inside(of_vectors)
    installed(0, 1, 13)
    assert not inside(of_vectors)
