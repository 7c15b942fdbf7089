"""Statements before a loop with producer warps keep their order and their threads."""

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tileweave import language as W
from tileweave.passes.entry.pin_preludes import pin_preludes

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
def test_a_program_computes_the_same_for_any_number_of_iterations(counts):
    A = np.arange(TILES * N, dtype="float32") % 5
    counts = np.array(counts, "int32")
    inputs = [{"A": A, "counts": counts, "out": np.zeros((3, 3 * N), "float32")}]
    (result,) = tw.simulate(program, 1, inputs, epochs=1)
    np.testing.assert_array_equal(result["out"], expected(A, counts))
    tw.validate(program, 1, inputs, "sm_90a")


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


@T.prim_func
def chosen(
    A: W.Symmetric((256, 256), "float16"),
    counts: T.Tensor((4,), "int32"),
    out: T.Tensor((256, 64), F32),
):
    with T.Kernel(4, threads=128) as block:
        table = T.alloc_shared((4,), "int32")
        first = T.alloc_local((4,), "int32")
        tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), F32)
        T.copy(counts, table)
        for i in T.serial(4):
            first[i] = table[3 - i] * 64
        if first[block] < 192:
            T.clear(total)
            for step in T.Pipelined(4, num_stages=2):
                T.copy(A[W.rank(), first[block], step * 64], tile)
                T.gemm(tile, tile, total, transpose_B=True)
            T.copy(total, out[first[block], 0])


def test_an_array_that_producers_and_consumers_read_is_computed_by_both():
    A = (np.arange(256 * 256).reshape(256, 256) % 3).astype("float16")
    inputs = {"A": A, "counts": np.arange(4, dtype="int32")}
    tw.validate(chosen, 1, [inputs | {"out": np.zeros((256, 64), "float32")}], "sm_90a")


def with_prelude(before, after, num_stages=2, in_loop=False):
    """Build a product with statements before and after its loop.

    Args:
        in_loop: whether the pipelined loop is in another loop.
    """

    @T.prim_func
    def program(
        A: T.Tensor((64, 256), "float16"),
        X: T.Tensor((512,), "int32"),
        Y: T.Tensor((512,), "int32"),
        C: T.Tensor((64, 64), F32),
        D: T.Tensor((64, 64), "float16"),
    ):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), F32)
            value = T.alloc_local((1,), "int32")
            W.fence("gpu")
            value[0] = X[8]
            T.clear(total)
            before(A, X, Y, D, tile, total, value, T.get_thread_binding())
            for _ in T.serial(2 if in_loop else 1):
                for k in T.Pipelined(4, num_stages=num_stages):
                    T.copy(A[0, k * 64], tile)
                    T.gemm(tile, tile, total, transpose_B=True)
            T.copy(total, C)
            after(X, Y, value, T.get_thread_binding())

    return program


@T.macro
def nothing(*_):
    pass


@T.macro
def load_value(A, X, Y, D, tile, total, value, thread):
    value[0] = X[thread]
    Y[128 + thread] = value[0]


@T.macro
def select_value(A, X, Y, D, tile, total, value, thread):
    if thread // 32 == 1:
        value[0] = 1
        Y[128 + thread] = value[0]


@T.macro
def derive_value(A, X, Y, D, tile, total, value, thread):
    other = T.alloc_local((1,), "int32")
    first = X[thread + 1]
    other[0] = first * 2
    value[0] = other[0] + first
    Y[128 + thread] = first + X[thread]


@T.macro
def store_value(X, Y, value, thread):
    Y[thread] = value[0]


@T.macro
def read_before_overwrite(A, X, Y, D, tile, total, value, thread):
    T.copy(A[0:64, 0:64], tile)
    T.copy(tile, total)
    T.copy(A[0:64, 64:128], tile)
    T.copy(tile, D)


@T.macro
def add_loaded_tile(A, X, Y, D, tile, total, value, thread):
    T.copy(A[0:64, 0:64], tile)
    for i, j in T.Parallel(64, 64):
        total[i, j] += tile[i, j]


@T.macro
def load_unused(A, X, Y, D, tile, total, value, thread):
    T.copy(A[0:64, 64:128], tile)


@T.macro
def write_elements(A, X, Y, D, tile, total, value, thread):
    Y[thread] = X[thread] + 1
    T.atomic_add(Y[300], 1)


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (load_value, store_value),
        (select_value, store_value),
        (derive_value, store_value),
        (read_before_overwrite, nothing),
        (add_loaded_tile, nothing),
        (load_unused, nothing),
        (write_elements, nothing),
    ],
    ids=lambda macro: getattr(macro, "__name__", "macro"),
)
def test_statements_before_a_loop_run_in_order_and_in_their_threads(before, after, in_loop):
    A = (np.arange(64 * 256).reshape(64, 256) % 5).astype("float16")
    inputs = {"A": A, "X": np.arange(512, dtype="int32"), "Y": np.zeros(512, "int32")}
    inputs |= {"C": np.zeros((64, 64), F32), "D": np.zeros((64, 64), "float16")}
    program = with_prelude(before, after, num_stages=1, in_loop=in_loop)
    tw.validate(program, 1, [inputs], "sm_90a")


def test_without_warp_specialization_nothing_changes():
    ampere = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
    assert pin_preludes(program, ampere).same_as(program)
    with tvm.transform.PassContext(config={"tl.disable_warp_specialized": True}):
        assert pin_preludes(program, TARGET).same_as(program)
