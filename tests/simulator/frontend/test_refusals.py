"""Warnings of programs that the simulator accepts, and the compiler refuses."""

import textwrap
import warnings

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W
from tileweave.cli.main import main

A = np.ones((4, 64, 64), np.float16)


def tiles(reuses: bool):
    """Load a tile in each stage of a loop; maybe use it after the loop, too."""

    @T.prim_func
    def program(A: T.Tensor((4, 64, 64), "float16"), S: W.Symmetric((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((64, 64), "float16")
            y = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k, :, :], x)
                T.gemm(x, x, total)
            if reuses:
                T.copy(total, x)
                T.copy(x, S[W.rank(), :, :])
            else:
                T.copy(total, y)
                T.copy(y, S[W.rank(), :, :])

    return program


def simulate(program, **options):
    return tw.simulate(program, 2, [{"A": A}] * 2, epochs=1, **options)


def test_a_tile_of_several_versions_after_its_loop():
    message = "the compiler refuses program for sm_90a: T.copy: uses x, of which T.Pipelined has a"
    with pytest.warns(tw.SimulationWarning, match=message):
        outputs = simulate(tiles(reuses=True))
    assert (outputs[0]["S"] == 256).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_its_twin(arch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(tiles(reuses=False), arch=arch)


@factory
def bounded(is_shared, ends: T.Tensor((1,), "int32"), B: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        tx, end = T.get_thread_binding(), T.alloc_shared((1,), "int32")
        W.fence("gpu")
        T.copy(ends, end)
        B[tx] = 0
        if is_shared:
            for _ in T.serial(T.min(end[0], 4)):
                B[tx] += 1
        else:
            for _ in T.serial(ends[0]):
                B[tx] += 1


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_bound_of_a_loop_in_shared_memory(is_shared):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (out,) = tw.simulate(bounded(is_shared), 1, [{"ends": np.array([3], np.int32)}])
    assert (out["B"] == 3).all()
    message = (
        "bounded: the compiler refuses bounded for sm_90a: T.serial: the number of iterations "
        "depends on end[0] in shared memory"
    )
    assert [str(w.message).startswith(message) for w in caught] == [True] * is_shared


def test_the_command_lowers_each_kernel(tmp_path, capsys):
    """TileLang fails for a bound of a loop in shared memory."""
    path = tmp_path / "bound.py"
    path.write_text(
        textwrap.dedent(
            """
            import tilelang.language as T

            @T.prim_func
            def bound(ends: T.Tensor((1,), "int32"), B: T.Tensor((64,), "int32")):
                with T.Kernel(1, threads=64):
                    t = T.get_thread_binding()
                    count = T.alloc_shared((1,), "int32")
                    count[0] = ends[0]
                    B[t] = 0
                    for i in T.serial(count[0]):
                        B[t] += 1

            @T.prim_func
            def twin(ends: T.Tensor((1,), "int32"), B: T.Tensor((64,), "int32")):
                with T.Kernel(1, threads=64):
                    t = T.get_thread_binding()
                    B[t] = 0
                    for i in T.serial(ends[0]):
                        B[t] += 1
            """
        )
    )
    assert main(["simulate", str(path), "--ranks", "1", "--schedules", "1"]) == 0
    out = capsys.readouterr().out
    assert "warning: bound: the compiler refuses bound for sm_90a: " in out
    assert "warning: twin" not in out
