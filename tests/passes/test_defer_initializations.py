"""Deferred initializations keep the results of a program, for any number of iterations."""

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.factory import factory
from tileweave import language as W
from tileweave.passes.entry.defer_initializations import defer_initializations
from tileweave.passes.ir.releases import upgrade_ir

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
F32 = "float32"
N, TILES = 16, 3


@T.prim_func
def program(
    A: T.Tensor((TILES * N,), F32),
    counts: T.Tensor((4,), "int32"),
    out: T.Tensor((3, 3 * N), F32),
):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((N,), F32)
        start = T.alloc_shared((N,), F32)
        outer = T.alloc_fragment((N,), F32)
        inner = T.alloc_fragment((N,), F32)
        first = T.alloc_fragment((N,), F32)
        seen = T.alloc_var("int32")
        T.copy(A[0], start)
        offset = counts[3]
        scale = offset * 2
        for turn in T.serial(3):
            T.fill(outer, scale)
            T.copy(start, first)
            seen = offset
            for _ in T.serial(counts[0]):
                T.copy(outer, inner)
                for again in T.serial(counts[1]):
                    if again + turn > counts[2]:
                        for k in T.Pipelined(TILES, num_stages=2):
                            T.copy(A[k * N], tile)
                            for i in T.Parallel(N):
                                inner[i] += tile[i] * first[i]
                            seen = seen + 1
                    else:
                        for i in T.Parallel(N):
                            inner[i] += outer[i] + 1
                for i in T.Parallel(N):
                    outer[i] += inner[i] + seen
            T.copy(outer, out[turn, 0:N])
            T.copy(first, out[turn, N : 2 * N])
            for i in T.Parallel(N):
                out[turn, 2 * N + i] = seen


def expected(A, counts):
    steps, repeats, least, offset = map(int, counts)
    rows = []
    for turn in range(3):
        outer, first, seen = np.full(N, 2 * offset, "float32"), A[:N], offset
        for _ in range(steps):
            inner = outer.copy()
            for again in range(repeats):
                if again + turn > least:
                    inner += (A.reshape(TILES, N) * first).sum(0)
                    seen += TILES
                else:
                    inner += outer + 1
            outer = outer + inner + seen
        rows.append(np.concatenate([outer, first, np.full(N, seen)]))
    return np.stack(rows)


@pytest.mark.parametrize("counts", [(2, 2, 0, 3), (0, 2, 0, 1), (2, 0, 0, 1), (1, 2, 9, 1)])
def test_it_computes_the_same(counts):
    A = np.arange(TILES * N, dtype="float32") % 5
    counts = np.array(counts, "int32")
    deferred = defer_initializations(upgrade_ir(program), TARGET)
    assert "done_1" in deferred.script()
    for one in (program, deferred):
        inputs = [{"A": A, "counts": counts, "out": np.zeros((3, 3 * N), "float32")}]
        (result,) = tw.simulate(one, 1, inputs, epochs=1)
        np.testing.assert_array_equal(result["out"], expected(A, counts))


@T.prim_func
def listed(
    A: W.Symmetric((256, 64), "float16"),
    rows: T.Tensor((4,), "int32"),
    count: T.Tensor((1,), "int32"),
    out: T.Tensor((256, 64), F32),
):
    with T.Kernel(2, threads=128) as block:
        tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), F32)
        tiles = T.alloc_var("int32")
        tiles = count[0]
        for turn in T.serial(T.ceildiv(tiles - block, 2)):
            row = T.alloc_var("int32")
            last = tiles - 1
            row = rows[last - turn * 2 - block]
            T.clear(total)
            for step in T.Pipelined(2, num_stages=2):
                T.copy(A[W.rank(), row + step, 0], tile)
                T.gemm(tile, tile, total, transpose_B=True)
            T.copy(total, out[row, 0])


def test_a_variable_of_a_loop_and_of_a_definition_inside_stays_before_the_loop():
    """Warp specialization moves it with the definition, and the loop would read 0."""
    A = np.arange(256 * 64, dtype="float16").reshape(256, 64) % 3
    inputs = {"A": A, "rows": np.array([128, 0, 64, 9], "int32"), "count": np.array([3], "int32")}
    inputs["out"] = np.zeros((256, 64), "float32")
    tw.validate(listed, 1, [inputs], "sm_90a")


def test_without_warp_specialization_nothing_changes():
    ampere = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
    assert defer_initializations(program, ampere).same_as(program)
    with tvm.transform.PassContext(config={"tl.disable_warp_specialized": True}):
        assert defer_initializations(program, TARGET).same_as(program)


@factory
def of_threads(is_copied, A: T.Tensor((256, 64), "float16"), out: T.Tensor((2, 128), F32)):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "float16")
        own = T.alloc_local((2,), F32)
        thread = T.get_thread_binding()
        for i in T.serial(2):
            own[i] = A[thread, i]
        for turn in T.serial(2):
            for step in T.Pipelined(2, num_stages=1):
                if is_copied:
                    T.copy(A[(turn * 2 + step) * 64, 0], tile)
                    own[0] += tile[thread % 64, step]
                else:
                    own[step] += own[1 - step]
        for i in T.serial(2):
            out[i, thread] = own[i]


def test_an_initialization_may_use_the_index_of_the_thread():
    A = np.arange(256 * 64, dtype="float16").reshape(256, 64) % 7
    tw.validate(of_threads(True), 1, [{"A": A}], "sm_90a")


@T.prim_func
def set_by_variable(A: T.Tensor((256, 64), "float16"), out: T.Tensor((64, 64), F32)):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), F32)
        value = T.alloc_var(F32)
        value = 5.0
        T.fill(total, value)
        for turn in T.serial(2):
            value = value + 1.0
            for step in T.Pipelined(2, num_stages=2):
                T.copy(A[(turn * 2 + step) * 64, 0], tile)
                T.gemm(tile, tile, total, transpose_B=True)
        for i, j in T.Parallel(64, 64):
            out[i, j] = total[i, j] * value


def test_a_variable_that_changes_before_the_loop_sets_no_fragment():
    problem = "T.fill: reads value before T.Pipelined, .* after assignment to value"
    with pytest.raises(tw.TileWeaveError, match=problem):
        defer_initializations(upgrade_ir(set_by_variable), TARGET)


@T.prim_func
def of_branches(A: W.Symmetric((256, 64), "float16"), out: T.Tensor((2, 64, 64), F32)):
    with T.Kernel(2, threads=128) as block:
        tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), F32)
        T.fill(total, 3)
        for turn in T.serial(2):
            if turn == block:
                for i, j in T.Parallel(64, 64):
                    total[i, j] += A[W.rank(), i, j]
            else:
                for step in T.Pipelined(2, num_stages=2):
                    T.copy(A[W.rank(), (turn * 2 + step) * 64, 0], tile)
                    T.gemm(tile, tile, total, transpose_B=True)
        T.copy(total, out[block, 0, 0])


def test_another_branch_of_the_loop_may_use_the_fragment():
    A = np.arange(256 * 64, dtype="float16").reshape(256, 64) % 3
    (actual,) = tw.validate(of_branches, 1, [{"A": A}], "sm_90a")
    tiles = A.astype(F32).reshape(4, 64, 64)
    squares = tiles @ tiles.transpose(0, 2, 1)
    expected = 3 + tiles[0] + np.stack([squares[2] + squares[3], squares[0] + squares[1]])
    np.testing.assert_array_equal(actual["out"], expected)


def test_a_loop_without_loads_by_the_tma_is_not_specialized():
    program = of_threads(False)
    assert defer_initializations(program, TARGET).same_as(program)


def summed(**schedule):
    is_sent = not schedule

    @T.prim_func
    def program(x: T.Tensor((256, 64), "float16"), out: T.Tensor((128, 128), F32)):
        with T.Kernel(1, threads=128):
            box = W.alloc_symmetric((256, 64), "float16")
            sent = T.alloc_shared((128, 64), "float16")
            tile = T.alloc_shared((128, 64), "float16")
            total = T.alloc_fragment((128, 128), F32)
            T.clear(total)
            for half in T.serial(2):
                T.copy(x[half * 128, 0], sent)
                T.copy(sent, box[1 - W.rank(), half * 128, 0])
            for _ in T.serial(2):
                for k in T.Pipelined(2, num_stages=2, **schedule):
                    if is_sent:
                        T.copy(box[W.rank(), k * 128, 0], tile)
                    else:
                        T.copy(x[k * 128, 0], tile)
                    T.gemm(tile, tile, total, transpose_B=True)
            T.copy(total, out)

    return program


@pytest.mark.parametrize("schedule", [{}, {"order": [0, 1], "stage": [0, 1]}])
def test_a_schedule_changes_nothing(schedule):
    """TileLang specializes such a loop, too. The compiler schedules a loop with waits."""
    x = np.arange(256 * 64, dtype="float16").reshape(256, 64) % 3
    _, result = tw.validate(summed(**schedule), 2, [{"x": x}, {"x": x}], "sm_90a")
    halves = x.astype(F32).reshape(2, 128, 64)
    np.testing.assert_array_equal(result["out"], 2 * (halves @ halves.transpose(0, 2, 1)).sum(0))
