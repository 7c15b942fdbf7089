"""Multimem operations on symmetric tensors compute what those on a multicast address do."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

N, RANKS = 32, 3
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LOADS = [
    ("bfloat16", 8, "add"),
    ("float16", 2, "add"),
    ("float16", 4, "max"),
    ("bfloat16", 2, "min"),
    ("float32", 4, "add"),
    ("float32", 1, "add"),
    ("int32", 1, "xor"),
    ("uint32", 1, "and"),
    ("uint64", 1, "or"),
    ("int64", 1, "min"),
]


def exchange(dtype, lanes, op, by_address):
    """Return a program that reduces X over the ranks to ``sums``, stores parts of them on all
    ranks, and adds parts of X on all ranks."""
    changes = op if dtype not in (*DTYPES, "float32") else "add"

    def at(S, everywhere, index):
        return everywhere[index] if by_address else S[:, index]

    @T.prim_func
    def program(
        S: W.Symmetric((N,), dtype),
        everywhere: T.Tensor((N,), dtype),
        X: T.Tensor((N,), dtype),
        sums: T.Tensor((N,), dtype),
    ):
        with T.Kernel(1, threads=N // lanes) as _:
            x = T.alloc_local((lanes,), dtype)
            t = T.get_thread_binding()
            first = t * lanes
            S[W.rank(), first : first + lanes] = X[first : first + lanes]
            W.sync_ranks()
            if lanes > 1:
                x[0:lanes] = W.multimem_ld_reduce(at(S, everywhere, first), lanes, op=op)
            else:
                x[0] = W.multimem_ld_reduce(at(S, everywhere, first), op=op)
            sums[first : first + lanes] = x[0:lanes]
            W.sync_ranks()
            if W.rank() == t % RANKS:
                if t % 2 == 0:
                    W.multimem_st(at(S, everywhere, first), x[0:lanes])
                else:
                    W.multimem_red(at(S, everywhere, first), x[0:lanes], op=changes)

    return program


@pytest.mark.parametrize(("dtype", "lanes", "op"), LOADS)
def test_copies_are_accessed_like_a_multicast_address(dtype, lanes, op):
    rng = np.random.default_rng(lanes)
    numbers = rng.normal(size=(RANKS, N)) * 100
    inputs = [{"X": x.astype(DTYPES.get(dtype, dtype))} for x in np.abs(numbers)]
    aliases = [{**given, "everywhere": "S"} for given in inputs]
    by_address = tw.simulate(exchange(dtype, lanes, op, True), RANKS, aliases, epochs=1)
    others = [{**given, "everywhere": np.zeros(N, given["X"].dtype)} for given in inputs]
    by_copies = tw.simulate(exchange(dtype, lanes, op, False), RANKS, others, epochs=1)
    for one, other in zip(by_address, by_copies, strict=True):
        np.testing.assert_array_equal(one["sums"], other["sums"])
        np.testing.assert_array_equal(one["S"], other["S"])
    assert (by_copies[0]["sums"] == by_copies[1]["sums"]).all()
    assert (by_copies[0]["sums"] != inputs[0]["X"]).any()


def dependent(operation, by_address):
    """Return a program in which an operand of ``operation`` is an element that it changes."""

    def at(S, everywhere, index):
        return everywhere[index] if by_address else S[:, index]

    @T.prim_func
    def program(
        S: W.Symmetric((N,), "float32"),
        everywhere: T.Tensor((N,), "float32"),
        X: T.Tensor((N,), "float32"),
    ):
        with T.Kernel(1, threads=1) as _:
            if W.rank() == 0:
                if operation == "store":
                    W.multimem_st(at(S, everywhere, T.Cast("int32", S[0, 0])), X[4])
                elif operation == "add":
                    W.multimem_red(at(S, everywhere, T.Cast("int32", S[0, 0])), X[4], op="add")
                else:
                    W.multimem_red(
                        at(S, everywhere, 0),
                        X[T.Cast("int32", S[0, 0]) * 4 : T.Cast("int32", S[0, 0]) * 4 + 4],
                        op="add",
                    )
            W.sync_ranks()

    return program


@pytest.mark.parametrize("operation", ["store", "add", "add a slice"])
def test_operands_are_evaluated_once_for_all_copies(operation):
    given = {"S": np.zeros(N, np.float32), "X": np.arange(1, N + 1, dtype=np.float32)}
    for by_address in (True, False):
        everywhere = "S" if by_address else np.zeros(N, np.float32)
        inputs = [{**given, "everywhere": everywhere}] * RANKS
        results = tw.simulate(dependent(operation, by_address), RANKS, inputs, epochs=1)
        expected = given["X"][:4] if operation == "add a slice" else [5, 0, 0, 0]
        for result in results:
            np.testing.assert_array_equal(result["S"][:4], expected)
            assert not result["S"][4:].any()


@factory
def barrier(
    sem,
    S: W.Symmetric((N,), "float32"),
    flags: W.Symmetric((1,), "uint32"),
    X: T.Tensor((N,), "float32"),
    sums: T.Tensor((N,), "float32"),
):
    """Return a program whose ranks meet at a flag that one operation changes on all ranks."""
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        S[W.rank(), t] = X[t]
        if sem == "fence":
            W.fence("sys")
        T.sync_threads()
        if t == 0:
            if sem == "release":
                W.multimem_red(flags[:, 0], 1, op="add", sem="release")
            else:
                W.multimem_red(flags[:, 0], 1, op="add")
        W.wait_ge(flags[W.rank(), 0], RANKS)
        sums[t] = W.multimem_ld_reduce(S[:, t], op="add")


def simulated_barrier(sem):
    inputs = [
        {"X": np.arange(N, dtype=np.float32) * (r + 1), "flags": np.zeros(1, np.uint32)}
        for r in range(RANKS)
    ]
    return inputs, tw.simulate(barrier(sem), RANKS, inputs, epochs=1, schedules=5)


def test_a_released_flag_on_all_ranks_publishes():
    inputs, results = simulated_barrier("release")
    for result in results:
        np.testing.assert_array_equal(result["sums"], sum(given["X"] for given in inputs))


def test_a_relaxed_flag_publishes_nothing():
    with pytest.raises(tw.TileWeaveError) as error:
        simulated_barrier("relaxed")
    assert error.value.kind == "race"


def test_an_error_names_the_line_of_the_operation():
    @T.prim_func
    def program(X: T.Tensor((N,), "float32"), sums: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N) as _:
            S = W.alloc_symmetric((N,), "float32")
            t = T.get_thread_binding()
            W.multimem_st(S[:, t], X[t])
            sums[t] = S[W.rank(), t]

    with pytest.raises(tw.LanguageError, match="is written 3 times in one launch") as error:
        tw.simulate(program, RANKS, [{"X": np.zeros(N, np.float32)}] * RANKS)
    assert "test_lower_multimem.py:" in str(error.value)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_additions_wait_until_all_copies_are_cleared(ranks):
    @T.prim_func
    def program(X: T.Tensor((4, N), "float32"), sums: T.Tensor((4, N), "float32")):
        with T.Kernel(4, threads=N) as row:
            S = W.alloc_symmetric((4, N), "float32")
            for i in T.Parallel(N):
                S[W.rank(), (row + 1) % 4, i] = 0.0
            for i in T.Parallel(N // 2):
                W.multimem_red(S[:, row, i * 2], X[row, i * 2 : i * 2 + 2], op="add")
            for i in T.Parallel(N):
                sums[row, i] = S[W.rank(), row, i]

    rng = np.random.default_rng(ranks)
    inputs = [{"X": rng.integers(-8, 8, (4, N)).astype(np.float32)} for _ in range(ranks)]
    for result in tw.simulate(program, ranks, inputs, schedules=3, epochs=3):
        np.testing.assert_array_equal(result["sums"], sum(given["X"] for given in inputs))
    assert "tw::system::atomic_addx2<tw::Type::f32" in tw.emit(program, world_size=ranks)
