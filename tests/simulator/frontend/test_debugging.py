"""``T.print`` shows whole rows; ``nan=True`` names the statement that makes a NaN or an infinity
of other values; ``tw.Debugger`` shows tiles."""

import io
import re
from bdb import BdbQuit
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import RECORDS_DEVICE_LINES, RECORDS_LINES, needs_lines

N = 64
LEVELS = pytest.mark.parametrize("level", ["tile", "device"])


def run(program, level, nan=True, **inputs):
    arch = "sm_80" if level == "sm_80" else "sm_90a"
    level = "device" if level == "sm_80" else level
    return tw.simulate(program, 1, [inputs], epochs=1, level=level, arch=arch, nan=nan)[0]


def line_of(mark, level="tile"):
    """Return the place of the line of this file with a mark; "" if the level has no lines."""
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(mark))
    has_lines = RECORDS_LINES if level == "tile" else RECORDS_DEVICE_LINES
    return f"{Path(__file__).name}:{number}" if has_lines else ""


@T.prim_func
def prints(A: T.Tensor((4, 6), "int32"), B: T.Tensor((4, 6), "int32")):
    with T.Kernel(2, threads=32) as b:
        tile, own = T.alloc_shared((2, 6), "int32"), T.alloc_local((2,), "int32")
        T.copy(A[2 * b, 0], tile)
        own[0] = T.get_thread_binding() // 31
        own[1] = 7
        if b == 1:
            T.print(tile, msg="tile")
            T.print(tile[1, 2])
            T.print(own)
        T.copy(tile, B[2 * b, 0])


@LEVELS
def test_rows_are_printed_whole(level, capsys):
    run(prints, level, A=np.arange(24, dtype=np.int32).reshape(4, 6))
    lines = capsys.readouterr().out.splitlines()
    places = {line.split(": ", 1)[1] for line in lines}
    texts = [line.split(": ")[0] for line in lines]
    assert texts[:3] == [
        "tile, tile[0, 0:6], [12, 13, 14, 15, 16, 17]",
        "tile, tile[1, 0:6], [18, 19, 20, 21, 22, 23]",
        "expr<tile[1, 2]>, 20",
    ]
    rows = [f"buffer<own, int32>, thread {t}, own[0:2], [{t // 31}, 7]" for t in range(32)]
    assert texts[3:] == rows
    assert len(places) == (3 if RECORDS_LINES else 1)
    assert all(p.startswith("rank 0, block 1 (1)") for p in places)


def softmax(fill, divides=True):
    @T.prim_func
    def rows(X: T.Tensor((4, N), "float32"), Y: T.Tensor((4, N), "float32")):
        with T.Kernel(4, threads=32) as b:
            x = T.alloc_fragment((1, N), "float32")
            largest, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(X[b, 0], x)
            for i, j in T.Parallel(1, N):
                x[i, j] = T.if_then_else(x[i, j] > 0, x[i, j], fill)
            T.reduce_max(x, largest, dim=1)
            for i, j in T.Parallel(1, N):
                x[i, j] = T.exp(x[i, j] - largest[i])  # minus
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(1, N):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, Y[b, 0])

    return rows


@LEVELS
def test_the_statement_that_makes_a_nan_is_named(level):
    X = np.ones((4, N), np.float32)
    X[:, 3] = -1
    masked = softmax(-T.infinity("float32"))
    assert run(masked, level, X=X)["Y"][0, :4].tolist() == [np.float32(1 / 63)] * 3 + [0]
    X[2] = -1
    with pytest.raises(tw.SimulationError, match=r"nan in x\[.*-inf.*, block 2 \(2\)") as fault:
        run(masked, level, X=X)
    assert fault.value.kind == "nan"
    assert line_of("# minus", level) in fault.value.report
    assert np.isnan(run(masked, level, nan=False, X=X)["Y"][2]).all()
    X[1, 5] = np.nan  # a NaN of the input is made by no statement
    run(softmax(1.0), level, X=X)


@T.prim_func
def product(
    A: T.Tensor((N, N), "float16"), B: T.Tensor((N, N), "float16"), C: T.Tensor((N, N), "float16")
):
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((N, N), "float16"), T.alloc_shared((N, N), "float16")
        c = T.alloc_fragment((N, N), "float32")
        T.copy(A, a)
        T.copy(B, b)
        T.gemm(a, b, c, clear_accum=True)
        T.copy(c, C)  # narrow


@pytest.mark.parametrize("level", ["tile", "device", "sm_80"])
def test_products_and_conversions_are_checked(level):
    A, B = np.ones((N, N), np.float16), np.ones((N, N), np.float16)
    A[3, 5] = np.inf
    assert np.isinf(run(product, level, A=A, B=B)["C"][3]).all()
    B[5, 7] = 0
    with pytest.raises(tw.SimulationError, match=r"nan in c.*made of .*inf"):
        run(product, level, A=A, B=B)
    A[3, 5], B[5, 7] = 60000, 2
    with pytest.raises(tw.SimulationError, match=r"inf in C.*") as fault:
        run(product, level, A=A, B=B)
    assert line_of("# narrow", level) in fault.value.report


@T.prim_func
def tail(X: T.Tensor((N + 1,), "bfloat16"), Y: T.Tensor((N + 1,), "bfloat16")):
    with T.Kernel(T.ceildiv(N + 1, N), threads=N) as b:
        for i in T.Parallel(N):
            Y[b * N + i] = 1 / X[b * N + i]  # inverse


@LEVELS
def test_elements_out_of_bounds_are_not_checked(level):
    X = np.ones(N + 1, ml_dtypes.bfloat16)
    run(tail, level, X=X)
    X[9] = 0
    with pytest.raises(tw.SimulationError, match=r"inf in Y\[9\].*made of X 0") as fault:
        run(tail, level, X=X)
    assert line_of("# inverse") in fault.value.report


def matmul(n, m, tile=32, adds=False):
    @T.prim_func
    def product(
        A: T.Tensor((n, tile), "float32"), B: T.Tensor((tile, m), "float32"),
        C: T.Tensor((n, m), "float32"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(m, tile), T.ceildiv(n, tile), threads=128) as (bx, by):
            a, b = T.alloc_shared((tile, tile), "float32"), T.alloc_shared((tile, tile), "float32")
            c = T.alloc_fragment((tile, tile), "float32")
            T.copy(A[by * tile, 0], a)
            T.copy(B[0, bx * tile], b)
            T.gemm(a, b, c, clear_accum=True)
            if adds:
                T.atomic_add(C[by * tile, bx * tile], c)
            else:
                T.copy(c, C[by * tile, bx * tile])

    return product


@LEVELS
def test_some_blocks_run_with_the_first_the_last_and_the_tails(level):
    n, m, tile = 7 * 32 + 4, 9 * 32 + 8, 32
    A, B = (np.random.default_rng(0).standard_normal(s, np.float32) for s in ((n, 32), (32, m)))
    with pytest.warns(tw.SimulationWarning, match=rf"12 blocks compute \d+ of {n * m} elements"):
        C = tw.simulate(matmul(n, m), 1, [{"A": A, "B": B}], level=level, blocks=12)[0]["C"]
    computed = ~C.mask[::tile, ::tile]
    assert computed.sum() == 12 and computed[[0, 0, -1, -1], [0, -1, 0, -1]].all()
    assert (C.mask == np.kron(~computed, np.ones((tile, tile), bool))[:n, :m]).all()
    np.testing.assert_allclose(C.compressed(), (A @ B)[~C.mask], rtol=1e-2, atol=1e-2)


@T.prim_func
def in_place(Y: T.Tensor((N,), "float32")):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(N // 2):
            Y[b * (N // 2) + i] += 1


def test_blocks_that_communicate_are_refused():
    inputs = [{"A": np.ones((64, 32), np.float32), "B": np.ones((32, 64), np.float32)}]
    inputs[0]["C"] = np.zeros((64, 64), np.float32)
    for blocks, message in ((2, "blocks=2 of product, with atomicadd; expected"), (0, "blocks=0;")):
        with pytest.raises(tw.TileWeaveError, match=message):
            tw.simulate(matmul(64, 64, adds=True), 1, inputs, blocks=blocks)
    with pytest.raises(tw.TileWeaveError, match="in_place, with Y, which it reads and writes;"):
        tw.simulate(in_place, 1, [{"Y": np.ones(N, np.float32)}], blocks=1)
    with pytest.raises(tw.TileWeaveError, match="with more than one rank"):
        tw.simulate(matmul(64, 64), 2, inputs * 2, blocks=2)


@T.prim_func
def steps(A: T.Tensor((2, N), "float32"), B: T.Tensor((2, N), "float32")):
    with T.Kernel(2, threads=32) as b:
        tile, total = T.alloc_shared((N,), "float32"), T.alloc_var("int32")
        total = b
        T.copy(A[b, 0], tile)
        for k in T.serial(3):
            total += k
            if k > 5:
                total = 0  # unreached
            for i in T.Parallel(N):
                tile[i] = tile[i] + 1  # point
        T.copy(tile, B[b, 0])  # store


def debugged(monkeypatch, commands="", **options):
    monkeypatch.setattr("sys.stdin", io.StringIO(commands))
    debugger = tw.Debugger(**options)
    A = np.arange(2 * N, dtype=np.float32).reshape(2, N)
    tw.simulate(steps, 1, [{"A": A}], epochs=1, debugger=debugger)
    return debugger


@needs_lines
def test_a_breakpoint_opens_pdb_with_tiles_as_arrays(monkeypatch, capsys):
    point = line_of("# point").rpartition(":")[2]
    commands = "p tile[:2], total, i.shape, k\nn\nc\n"
    debugged(monkeypatch, commands + "c\n", breakpoint=f"{point}, bx == 1 and k > 0")
    out = capsys.readouterr().out
    assert out.count("rank 0, block 1 (1) in launch 0\n> ") == 3
    assert "-> tile[i] = tile[i] + 1  # point" in out
    assert f"(array([{N + 1}., {N + 2}.], dtype=float32), array(2, dtype=int32), ({N},), 1)" in out
    commands = "q\n"
    with pytest.raises(BdbQuit):
        debugged(monkeypatch, commands, breakpoint=line_of("# store"))
    assert capsys.readouterr().out.count("-> T.copy(tile, B[b, 0])") == 1


@needs_lines
def test_a_watched_tile_is_printed_after_each_change(monkeypatch, capsys):
    debugger = debugged(monkeypatch, watch=["total, block == 1", "k", "tile, k > 0"])
    lines = capsys.readouterr().out.replace("\n ", "").splitlines()
    of_tile = [line.partition(":")[2] for line in lines if line.startswith("tile")]
    assert len(of_tile) == 4, "two changes of each block, each by the statement in the T.Parallel"
    assert all(line.endswith(line_of("# point")) for line in of_tile)
    lines = [line for line in lines if not line.startswith("tile")]
    of_total = [line.split(":")[0] for line in lines if line.startswith("total")]
    assert of_total == ["total = 1", "total = 2", "total = 4"]
    assert [line.split(":")[0] for line in lines if line.startswith("k")] == [
        f"k = {k}" for k in range(3)
    ]
    assert all(("block 1 (1)" in line) == line.startswith("total") for line in lines)
    (unreached,) = debugger.unreached()
    assert unreached.split("\n --> ")[1:] == [f"{__file__}:{line_of('# unreached').split(':')[1]}"]


@needs_lines
def test_a_watch_or_a_breakpoint_that_shows_nothing_says_why(monkeypatch):
    store, unreached = (line_of(m).rpartition(":")[2] for m in ("# store", "# unreached"))

    def reason(**options):
        return debugged(monkeypatch, **options).unreached()[0]

    assert reason(watch=["none"]) == (
        "watch none: no tile or variable none; "
        "expected block, bx, i, k, launch, rank, tile, total, tx, ty, tz"
    )
    assert reason(watch=["bx, kk > 1"]).startswith("watch bx, kk > 1: no tile or variable kk; exp")
    assert reason(watch=["k, k > 9"]) == "watch k, k > 9: no change where k > 9"
    assert reason(breakpoint=f"{store}, kk > 1").startswith(
        f"break {store}, kk > 1: no tile or variable kk; expected "
    )
    assert re.fullmatch(
        rf"break 1: no statement at this line; expected test_debugging.py:\d+, .*, {store}",
        reason(breakpoint="1"),
    )
    assert reason(breakpoint=unreached) == (
        f"break {unreached}: not reached where rank == 0 and block == 0"
    )


def test_what_the_debugger_cannot_do_is_refused():
    with pytest.raises(
        tw.TileWeaveError, match="'k, k >'; expected a name or a line, and a Python"
    ):
        tw.Debugger(watch=["k, k >"])
    with pytest.raises(tw.TileWeaveError, match="a debugger with level='device'; expected level="):
        tw.simulate(steps, 1, level="device", debugger=tw.Debugger())
