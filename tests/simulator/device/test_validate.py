"""Translation validation: faults and other values of device functions are found and located."""

import importlib
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tilelang.language as T
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

import tileweave as tw
from tests.factory import factory
from tests.releases import (
    RECORDS_DEVICE_LINES,
    names_line,
    needs_bulk_copies,
    needs_lines,
    needs_nested_pipelines,
    needs_partial_barriers,
)
from tileweave import language as W
from tileweave.builtins.errors import TileWeaveError
from tileweave.cli.main import main
from tileweave.passes import pipeline
from tileweave.runtime.plans.parameters import parameters_of
from tileweave.simulator import SimulationError
from tileweave.simulator.device.program import DeviceProgram
from tileweave.simulator.memory.values import numpy_dtype

from . import miscompiled
from .programs import dropped, expected, gemm_reduce_scatter, inputs, with_argument

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SIMULATE = importlib.import_module("tileweave.simulator.simulate")
IS_REQUIRED = "tileweave.passes.entry.number_builtins.is_required_of_each_thread"
"""Without it, all builtins carry the thread index, so TileLang considers their results divergent.
"""
UNVERIFIED = {"tileweave.verify": "off"}


@pytest.fixture
def edit(monkeypatch):
    """Return a function that applies an edit to all device functions."""

    def apply(change) -> None:
        monkeypatch.setattr(SIMULATE, "DeviceProgram", partial(DeviceProgram, change=change))

    return apply


def reported(program, *arguments, **options) -> SimulationError:
    with pytest.raises(SimulationError) as error:
        tw.validate(program, 2, *arguments, **options)
    return error.value


def switch_off(monkeypatch, missing: str) -> None:
    """Remove a pass from the pipeline."""
    kept = tuple(p for p in pipeline.PIPELINE if p.name != missing)
    assert len(kept) < len(pipeline.PIPELINE)
    monkeypatch.setattr(pipeline, "PIPELINE", kept)


def line_of(text: str) -> int:
    """Return the line of a statement of ``programs.py``."""
    lines = Path(__file__).with_name("programs.py").read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if text in line)


@factory
def add_ones(X: T.Tensor((128,), "int32"), Y: T.Tensor((128,), "int32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            Y[i] = X[i] + 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("threads", [128, pytest.param(256, marks=pytest.mark.long)])
def test_outputs(arch, threads):
    outputs = tw.validate(gemm_reduce_scatter(threads), 2, inputs(threads), arch)
    result = np.concatenate([o["C"] for o in outputs]).astype(np.float32)
    assert np.array_equal(result, expected(threads))


def test_program_that_does_nothing():
    """TileLang drops the kernel, because no rank reaches its statements."""

    @T.prim_func
    def program(X: T.Tensor((4,), "int32"), S: W.Symmetric((4,), "int32")):
        with T.Kernel(1, threads=32):
            if W.rank() > 0:
                T.copy(X, S[W.rank(), 0])

    x = np.arange(4, dtype=np.int32)
    (tensors,) = tw.validate(program, 1, [{"X": x, "S": x + 1}])
    np.testing.assert_array_equal(tensors["S"], x + 1)


def test_arguments():
    with pytest.raises(TileWeaveError, match=r"simulate: arch=.sm_75.; expected .sm_80. or"):
        tw.validate(add_ones(), 2, arch="sm_75")
    with pytest.raises(TileWeaveError, match="validate: schedules=0"):
        tw.validate(add_ones(), 2, schedules=0)


@needs_lines
def test_other_values(edit):
    """The device function adds 2, not 1, from element 5 on."""

    def two(kernel):
        def more(node):
            if not isinstance(node.a, tirx.BufferLoad) or node.a.buffer.name != "X":
                return None
            return node + tirx.if_then_else(node.a.indices[0] >= 5, 1, 0)

        return kernel.with_body(ir_transform(kernel.body, None, more, ["tirx.Add"]))

    edit(two)
    error = reported(add_ones())
    assert error.kind == "translation"
    assert re.match(
        r"Y of rank 0 has other values at the device level: 123 of 128 elements, the first at "
        r"Y\[5\]\ntile level: (\d+); last write: .* --> .*test_validate.py:\d+\n"
        r"device level: (\d+); last write: .* --> .*test_validate.py:\d+\n",
        error.report,
    )


def test_other_elements(edit):
    """The device function does not store to an element that has the right value."""

    def fewer(kernel):
        def cut(node):
            if node.buffer.name != "Y":
                return None
            return tirx.IfThenElse(node.indices[0] != 7, node, None)

        return kernel.with_body(ir_transform(kernel.body, None, cut, ["tirx.BufferStore"]))

    edit(fewer)
    given = [{"X": np.zeros(128, np.int32), "Y": np.ones(128, np.int32)} for _ in range(2)]
    error = reported(add_ones(), given)
    assert error.kind == "translation"
    assert re.search(r"writes other elements of Y in launch \d at the device level: 1 of 128 "
                     r"elements, the first at Y\[7\]\n", error.report)  # fmt: skip
    assert "device level: not written" in error.report


def test_cleared_in_each_step(edit):
    """Each product replaces the sum of those before it."""

    def cleared(kernel):
        def clear(node):
            if node.op.name != "tl.ptx_wgmma_ss":
                return None
            return with_argument(12, tirx.const(False))(node)

        return kernel.with_body(ir_transform(kernel.body, None, clear, ["tirx.Call"]))

    edit(cleared)
    error = reported(gemm_reduce_scatter(128), inputs(128))
    assert error.kind == "translation"
    line = line_of("T.copy(C_tile, C[tile * rows, 0])")
    assert error.report.startswith("C of rank 0 has other values")
    assert error.report.count(f"programs.py:{line}") == 2 or not RECORDS_DEVICE_LINES


def test_fault_of_one_level(edit):
    edit(dropped("tileweave.signal"))
    error = reported(gemm_reduce_scatter(128), inputs(128))
    assert error.kind == "deadlock" and error.report.endswith("only at the device level")


@pytest.mark.parametrize(
    ("make", "missing", "kind", "options"),
    [
        pytest.param(
            "pipelined_in_a_loop",
            "defer_initializations",
            "translation",
            {},
            marks=needs_nested_pipelines,
        ),
        ("counts_backward", "keep_indices", "translation", {}),
        ("row_of_a_tile", "keep_indices", "translation", {}),
        pytest.param("adds_in_two_axes", "elect_once", "race", {}, marks=needs_bulk_copies),
        ("past_a_loop", "sync_shared_memory", "race", {}),
        pytest.param(
            "changes_for_fewer_threads",
            "sync_shared_memory",
            "race",
            {},
            marks=needs_partial_barriers,
        ),
        ("reads_before_warps", "sync_shared_memory", "reuse", {"tileweave.reuse": "credit"}),
        pytest.param(
            "reads_in_conditions",
            "sync_shared_memory",
            "reuse",
            {"tileweave.reuse": "credit"},
            marks=needs_nested_pipelines,
        ),
        pytest.param(
            "reads_in_producers",
            "sync_shared_memory",
            "reuse",
            {"tileweave.reuse": "credit"},
            marks=needs_bulk_copies,
        ),
        ("writes_before_warps", "restrict_threads", "race", {}),
        pytest.param(
            "reuses_tile_in_waves", "sync_shared_memory", "race", {}, marks=needs_nested_pipelines
        ),
        ("adds_at_the_peer", "make_coherent", "race", UNVERIFIED),
        ("loads_what_threads_stored", "insert_proxy_fences", "race", UNVERIFIED),
    ],
)
def test_without_a_pass(monkeypatch, make, missing, kind, options):
    """TileLang miscompiles the program, and the pass corrects it."""
    program = getattr(miscompiled, make)()
    arguments = {"schedules": 2, "pass_configs": options, "epochs": 2 if kind == "reuse" else 1}
    tw.validate(program, 2, **arguments)
    switch_off(monkeypatch, missing)
    error = reported(program, **arguments)
    assert error.kind == kind and names_line(error.report, "miscompiled.py:")


@needs_bulk_copies
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fragments_without_restrict_threads(monkeypatch, dtype):
    program, rng = miscompiled.sends_before_warps(dtype), np.random.default_rng(0)
    given = [{"X": rng.integers(-4, 5, (32, 32)).astype(numpy_dtype(dtype))} for _ in range(2)]
    outputs = tw.validate(program, 2, given)
    for rank in range(2):
        assert np.array_equal(outputs[rank]["Y"], given[rank]["X"] + sum(g["X"] for g in given))
    switch_off(monkeypatch, "restrict_threads")
    with pytest.raises(TileWeaveError, match="TileLang accesses other elements of total"):
        tw.validate(program, 2, given)


@pytest.mark.parametrize("valid", [32, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 64))])
@pytest.mark.parametrize(
    ("make", "missing"),
    [
        ("tile_in_a_uniform_branch", ""),
        pytest.param("waits_before_warps", "sync_shared_memory", marks=needs_nested_pipelines),
    ],
)
def test_branches_on_rank_uniform(monkeypatch, make, missing, valid):
    program, rng = getattr(miscompiled, make)(), np.random.default_rng(valid)
    matrices = rng.integers(-4, 5, (2, 64, 64)).astype(np.float16)
    given = {"num": np.array([valid], np.int32), "X": matrices[0], "B": matrices[1]}
    names = {p.name for p in parameters_of(program)}
    given = {name: value for name, value in given.items() if name in names}
    tw.validate(program, 2, [given] * 2)
    if valid and missing:
        switch_off(monkeypatch, missing)
        assert reported(program, [given] * 2).kind == "race"
    elif valid:
        monkeypatch.setattr(IS_REQUIRED, lambda call: True)
        with pytest.raises(TileWeaveError, match="shared memory: a read of tile after a write"):
            tw.validate(program, 2, [given] * 2)


@pytest.mark.parametrize(
    "load",
    [lambda limit, copy: W.ld(limit), lambda limit, copy: copy],
    ids=["ld", "symmetric"],
)
def test_branches_on_loads(monkeypatch, load):
    program = miscompiled.tile_in_a_branch_on(load)
    given = {"limit": np.ones(1, np.int32), "X": np.ones((64, 64), np.float32)}
    tw.validate(program, 2, [given] * 2)
    monkeypatch.setattr(IS_REQUIRED, lambda call: True)
    with pytest.raises(TileWeaveError, match="shared memory: a read of tile after a write"):
        tw.validate(program, 2, [given] * 2)


@pytest.mark.parametrize("place", ["bound", "first", "condition"])
def test_reads_in_bounds(monkeypatch, place):
    program, options = miscompiled.reads_in_bounds(place), {"tileweave.reuse": "credit"}
    tw.validate(program, 2, pass_configs=options, epochs=2)
    switch_off(monkeypatch, "sync_shared_memory")
    assert reported(program, pass_configs=options, epochs=2).kind == "reuse"


@needs_nested_pipelines
def test_without_exclude_producer_threads(monkeypatch):
    """The compiler itself refuses the program."""
    program = miscompiled.counts_in_a_loop()
    tw.validate(program, 2, pass_configs=UNVERIFIED, epochs=1)
    switch_off(monkeypatch, "exclude_producer_threads")
    with pytest.raises(TileWeaveError, match="threads that are not the program's execute it"):
        tw.validate(program, 2, pass_configs=UNVERIFIED, epochs=1)


def test_tile_read_before_a_signal():
    """Warp specialization moves the read of ``own`` after the signals, which cannot release it."""

    @T.prim_func
    def program(
        X: T.Tensor((32, 64), "float32"), sent: T.Tensor((3, 32, 64), "float32"),
        Y: T.Tensor((32, 64), "float32"), Z: T.Tensor((32, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            parts = W.alloc_symmetric((3, 32, 64), "float32")
            own, part, tile = (T.alloc_shared((32, 64), "float32") for _ in range(3))
            read, total = (T.alloc_fragment((32, 64), "float32") for _ in range(2))
            T.copy(X, own)
            T.copy(own, read)
            for k in T.serial(3):
                T.copy(sent[k, 0, 0], part)
                T.copy(part, parts[1 - W.rank(), k, 0, 0])
            T.clear(total)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(parts[W.rank(), k, 0, 0], tile)
                for i, j in T.Parallel(32, 64):
                    total[i, j] += tile[i, j]
            T.copy(read, Y)
            T.copy(total, Z)

    rng = np.random.default_rng(0)
    values = rng.integers(-4, 5, (2, 4, 32, 64)).astype(np.float32)
    outputs = tw.validate(program, 2, [{"X": v[0], "sent": v[1:]} for v in values], epochs=2)
    for rank in range(2):
        assert np.array_equal(outputs[rank]["Y"], values[rank, 0])
        assert np.array_equal(outputs[rank]["Z"], values[1 - rank, 1:].sum(0))


def test_loops_that_all_threads_share():
    """Words are stored by threads that the program does not have, too."""
    program = miscompiled.words_beside_a_pipeline()
    tw.validate(program, 2, pass_configs={"tileweave.protocol": {"S": "ll"}})


def test_without_avoid_tma(monkeypatch):
    """TileLang loses the line of a pipelined load."""
    program = miscompiled.small_stages()
    tw.validate(program, 2)
    switch_off(monkeypatch, "avoid_tma")
    error = reported(program)
    assert error.kind == "alignment"
    assert error.report.startswith("TMA load at byte 64 of tile; expected a multiple of 128\n")


def test_command(capsys):
    file = EXAMPLES / "tutorial" / "02_all_gather.py"
    assert main(["validate", str(file)]) == 0
    assert capsys.readouterr().out == (
        "all_gather: the device functions of sm_90a agree with the program: "
        "1 schedules of 4 ranks, no fault\n"
    )


@pytest.mark.parametrize(
    "place",
    [lambda i, j: i // 3, lambda i, j: T.min(j, j ^ j) + i % 2, lambda i, j: 255 - j],
    ids=["one", "computed", "backward"],
)
def test_vectors_at_any_places(place):
    """Elements of shared memory, which do not follow each other, are stored as a vector."""

    @T.prim_func
    def program(X: T.Tensor((256,), "int32"), Y: T.Tensor((8, 256), "int32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((256,), "int32")
            W.fence("gpu")
            T.copy(X, tile)
            for i, j in T.Parallel(8, 256):
                Y[i, j] = tile[place(i, j)]

    x = np.random.default_rng(0).integers(0, 1000, 256).astype(np.int32)
    (result,) = tw.validate(program, 1, [{"X": x}])
    for i in range(8):
        expected = [x[int(place(tirx.const(i), tirx.const(j)))] for j in range(256)]
        np.testing.assert_array_equal(result["Y"][i], expected)


def test_registers_of_no_element(monkeypatch):
    """A copy or reduction of a fragment that receives a half of another one uses registers that
    nothing writes; it is refused, also by the comparison of the lowered copy."""
    for use in ("copy", "reduce"):
        program = miscompiled.half_of_a_fragment(use)
        with pytest.raises(tw.TileWeaveError, match="left of shape"):
            tw.validate(program, 1)
    switch_off(monkeypatch, "verify_layouts")
    with pytest.raises(TileWeaveError, match="TileLang accesses other elements of left"):
        tw.validate(miscompiled.half_of_a_fragment("copy"), 1)
    with pytest.raises(SimulationError) as error:
        tw.validate(miscompiled.half_of_a_fragment("reduce"), 1)
    assert error.value.kind == "poison"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("use", ["branch", "loop"])
def test_pipelined_loads_that_data_leaves_unused(use, arch):
    """A block waits for its loads before the next launch may overwrite what they read."""

    @T.prim_func
    def program(
        X: T.Tensor((4, 16), "float32"), used: T.Tensor((4,), "int32"),
        Y: T.Tensor((4, 16), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            S = W.alloc_symmetric((4, 16), "float32")
            tile = T.alloc_shared((1, 16), "float32")
            T.copy(X, S[(W.rank() + 1) % 3, 0, 0])
            for k in T.Pipelined(4, num_stages=2):
                T.copy(S[W.rank(), k, 0], tile)
                if use == "branch":
                    if used[k] != 0:
                        T.copy(tile, Y[k, 0])
                else:
                    for _ in T.serial(used[k]):
                        T.copy(tile, Y[k, 0])

    given = [
        {
            "X": np.full((4, 16), 1 + rank, np.float32),
            "used": np.array([1, 0, 0, 0], np.int32),
            "Y": np.zeros((4, 16), np.float32),
        }
        for rank in range(3)
    ]
    for rank, output in enumerate(tw.validate(program, 3, given, arch, epochs=3, schedules=3)):
        assert (output["Y"][0] == 1 + (rank + 2) % 3).all() and not output["Y"][1:].any()
