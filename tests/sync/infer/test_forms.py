"""Equivalent forms of kernels: what is inferred is right in each, or they are refused."""

from typing import Any

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.corpus.programs import Case
from tests.factory import factory
from tests.releases import names_line
from tileweave import language as W
from tileweave.simulator import Executable

N, F32 = 16, "float32"
pytestmark = pytest.mark.filterwarnings("ignore::tileweave.SimulationWarning")


def inputs_of(ranks: int, rows: int = 8) -> list[dict[str, Any]]:
    rng = np.random.default_rng(ranks)
    return [{"X": rng.standard_normal((rows, N), np.float32)} for _ in range(ranks)]


def simulated(program, ranks: int, inputs: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    return tw.simulate(program, ranks, inputs, schedules=3, epochs=3, resident_blocks=64)


def refused(program) -> str:
    with pytest.raises(tw.LanguageError) as error:
        tw.explain(program, 2)
    assert names_line(str(error.value), "test_forms.py:")
    return str(error.value)


@T.prim_func
def register_in_parallel(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((N,), F32)
):
    with T.Kernel(9, threads=32) as b:
        row = T.alloc_var("int32")
        total = T.alloc_fragment((N,), F32)
        if b < 8:
            for j in T.Parallel(N):
                S[(W.rank() + 1) % W.world_size(), b, j] = X[b, j]
        else:
            T.clear(total)
            for j in T.Parallel(N):
                row = 0
                for _k in T.serial(4):
                    total[j] += S[W.rank(), row, j]
                    row = row + 2
            T.copy(total, Y)


@T.prim_func
def register_of_some_threads(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((N,), F32)
):
    with T.Kernel(9, threads=32) as b:
        thread = T.get_thread_binding()
        row = T.alloc_var("int32")
        total = T.alloc_local((1,), F32)
        if b < 8:
            for j in T.Parallel(N):
                S[(W.rank() + 1) % W.world_size(), b, j] = X[b, j]
        else:
            row = 0
            total[0] = 0
            if thread < N:
                for _k in T.serial(4):
                    total[0] += S[W.rank(), row, thread]
                    row = row + 2
                Y[thread] = total[0]


@pytest.mark.parametrize("program", [register_in_parallel, register_of_some_threads])
def test_registers_of_inner_loops(program):
    """Registers that change in a loop inside the statement of all threads."""
    inputs = inputs_of(2)
    for rank, actual in enumerate(simulated(program, 2, inputs)):
        np.testing.assert_allclose(actual["Y"], inputs[rank - 1]["X"][::2].sum(0), rtol=1e-5)


@T.macro
def sums_above_messages(X, S):
    """The upper half of each copy receives additions, the lower half a message."""
    right = (W.rank() + 1) % W.world_size()
    for i, j in T.Parallel(4, N):
        S[W.rank(), i, j] = 0
    for i, j in T.Parallel(4, N):
        T.atomic_add(S[right, i, j], X[i, j])
    for i, j in T.Parallel(4, N):
        S[right, 4 + i, j] = X[4 + i, j]


@T.prim_func
def sums_and_messages(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32)
):
    with T.Kernel(1, threads=32):
        sums_above_messages(X, S)
        for i, j in T.Parallel(4, N):
            Y[i, j] = S[W.rank(), i, j]
        for i, j in T.Parallel(4, N):
            Y[4 + i, j] = S[W.rank(), 4 + i, j]


@T.prim_func
def sums_of_some_ranks(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32)
):
    """Rank 0 receives additions of its left neighbor; the other ranks only clear their memory."""
    with T.Kernel(2, threads=32) as b:
        if b == 0:
            for i, j in T.Parallel(8, N):
                S[W.rank(), i, j] = 0
        else:
            if W.rank() == W.world_size() - 1:
                for i, j in T.Parallel(8, N):
                    T.atomic_add(S[0, i, j], X[i, j])
            for i, j in T.Parallel(8, N):
                Y[i, j] = S[W.rank(), i, j]


@T.prim_func
def sum_before_message(X: T.Tensor((8, N), F32), Y: T.Tensor((8, N), F32)):
    """A sum and a message use the same memory, in different versions."""
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((8, N), F32)
        right = (W.rank() + 1) % W.world_size()
        tile = T.alloc_fragment((8, N), F32)
        for i, j in T.Parallel(8, N):
            S[W.rank(), i, j] = 0
        for i, j in T.Parallel(8, N):
            T.atomic_add(S[right, i, j], X[i, j])
        T.copy(S[W.rank(), 0, 0], tile)
        T.copy(tile, S[right, 0, 0])
        T.copy(S[W.rank(), 0, 0], tile)
        T.copy(tile, Y)


def to_the_right(inputs, steps=1):
    return [inputs[rank - steps]["X"] for rank in range(len(inputs))]


def to_the_first(inputs):
    return [inputs[-1]["X"], *(np.zeros_like(one["X"]) for one in inputs[1:])]


@pytest.mark.parametrize(
    ("program", "right"),
    [
        (sums_and_messages, to_the_right),
        (sums_of_some_ranks, to_the_first),
        (sum_before_message, lambda inputs: to_the_right(inputs, 2)),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_reads_of_elements_without_additions(program, right, ranks):
    inputs = inputs_of(ranks)
    for actual, y in zip(simulated(program, ranks, inputs), right(inputs), strict=True):
        np.testing.assert_array_equal(actual["Y"], y)


@T.prim_func
def left_to_the_caller(X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32)):
    with T.Kernel(1, threads=32):
        sums_above_messages(X, S)


@T.prim_func
def sums_of_other_blocks(X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32)):
    """Each block adds to memory that the other block has cleared."""
    with T.Kernel(2, threads=32) as b:
        for i, j in T.Parallel(4, N):
            S[W.rank(), b * 4 + i, j] = 0
        for i, j in T.Parallel(4, N):
            row = (1 - b) * 4 + i
            T.atomic_add(S[W.rank(), row, j], X[row, j])


@pytest.mark.parametrize(
    ("program", "steps", "ranks"),
    [(left_to_the_caller, 1, 2), (left_to_the_caller, 1, 3), (sums_of_other_blocks, 0, 2)],
)
def test_only_the_caller_reads(program, steps, ranks):
    """Only the caller reads the tensor."""
    inputs = inputs_of(ranks)
    called = Case(lambda _: program, lambda *_: [], lambda _: []).called(ranks)
    actual = tw.simulate(Executable(called, ranks), ranks, inputs, schedules=10, epochs=3)
    for mine, right in zip(actual, to_the_right(inputs, steps), strict=True):
        np.testing.assert_array_equal(mine["S_after"], right)


@T.prim_func
def passed_on(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), R: W.Symmetric((8, N), F32),
    Y: T.Tensor((8, N), F32),
):  # fmt: skip
    with T.Kernel(1, threads=32):
        sums_above_messages(X, S)
        for half in T.serial(2):
            for i, j in T.Parallel(4, N):
                Y[4 * half + i, j] = R[W.rank(), 4 * half + i, j]


def test_copies_that_take_sums_and_messages():
    """Copies of a plan wait for both."""

    @tw.plan
    def plan(
        p: tw.PlanBuilder, X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32),
        R: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32),
    ):  # fmt: skip
        p.launch(passed_on, X, S, R, Y)
        for rows in (slice(0, 4), slice(4, 8)):
            p.copy(R[(p.rank + 1) % p.world_size, rows], S[p.rank, rows], stream="copies")

    inputs = inputs_of(3)
    actual = tw.simulate(Executable(plan, 3), 3, inputs, schedules=10, epochs=3)
    for mine, right in zip(actual, to_the_right(inputs, 2), strict=True):
        np.testing.assert_array_equal(mine["Y"], right)


@T.macro
def left_by_loop_break(X, S, b):
    for row in T.serial(8):
        if row > W.rank():
            T.loop_break()
        for j in T.Parallel(N):
            S[0, row, j] = X[row, j]


@T.macro
def left_by_break(X, S, b):
    for row in T.serial(8):
        if row > W.rank():
            break
        for j in T.Parallel(N):
            S[0, row, j] = X[row, j]


@T.macro
def left_by_continue(X, S, b):
    for row in T.serial(8):
        if row > W.rank():
            continue
        for j in T.Parallel(N):
            S[0, row, j] = X[row, j]


@T.macro
def left_by_data(X, S, b):
    for row in T.serial(8):
        if X[row, 0] > 0:
            T.loop_break()
        for j in T.Parallel(N):
            S[0, row, j] = X[row, j]


@T.macro
def left_by_threads(X, S, b):
    if T.get_thread_binding() < N:
        for row in T.serial(8):
            if row > W.rank():
                T.loop_break()
            S[0, row, T.get_thread_binding()] = X[row, T.get_thread_binding()]


@T.macro
def left_by_return(X, S, b):
    if b == 1:
        T.thread_return()
    T.copy(X, S[0, 0, 0])


@factory
def given_by(
    write,
    X: T.Tensor((8, N), F32),
    S: W.Symmetric((8, N), F32),
    Y: T.Tensor((8, N), F32),
    *,
    blocks=1,
):
    """Rank 0 reads the data that ``write`` writes."""
    with T.Kernel(blocks, threads=32) as b:
        write(X, S, b)
        if W.rank() == 0:
            for i, j in T.Parallel(8, N):
                Y[i, j] = S[0, i, j]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (left_by_loop_break, "T.loop_break"),
        (left_by_break, "break"),
        (left_by_continue, "continue"),
        (left_by_data, "T.loop_break"),
        (left_by_threads, "T.loop_break"),
        (left_by_return, "T.thread_return"),
    ],
)
def test_jumps_over_accesses(write, name):
    message = refused(given_by(write, blocks=2))
    assert (
        f", and {name} may skip it, or the signal or wait that orders it; expected a condition"
        in message
    )


@T.prim_func
def break_beside(X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32)):
    """Break out of a loop without accesses, inside a loop with accesses."""
    with T.Kernel(1, threads=32):
        last = T.alloc_var("int32")
        for half in T.serial(2):
            for k in T.serial(5):
                last = k
                if k == 3:
                    T.loop_break()
            for i, j in T.Parallel(4, N):
                row = half * 4 + i
                S[(W.rank() + 1) % W.world_size(), row, j] = X[row, j] + last
        for i, j in T.Parallel(8, N):
            Y[i, j] = S[W.rank(), i, j]


def test_jumps_beside_accesses():
    inputs = inputs_of(2)
    for actual, right in zip(simulated(break_beside, 2, inputs), to_the_right(inputs), strict=True):
        np.testing.assert_array_equal(actual["Y"], right + np.float32(3))


@factory
def before_the_start(
    first,
    read_first,
    X: T.Tensor((32, N), F32),
    S: W.Symmetric((32, N), F32),
    Y: T.Tensor((32, N), F32),
    *,
    height=8,
):
    """Blocks pass tiles on; those of block 0 start at rows ``first`` and ``read_first``."""
    with T.Kernel(5, threads=32) as b:
        tile = T.alloc_shared((8, N), F32)
        rows = T.alloc_shared((height, N), F32)
        if b * 8 + first < 32:
            T.copy(X[b * 8 + first, 0], tile)
            T.copy(tile, S[(W.rank() + 1) % W.world_size(), b * 8 + first, 0])
        if b < 4:
            T.copy(S[W.rank(), b * 8 + read_first, 0], rows)
            for i, j in T.Parallel(8, N):
                Y[b * 8 + i, j] = rows[i, j]


@pytest.mark.parametrize(
    ("first", "read_first", "text"),
    [(-8, 0, "T.copy writes"), (-4, 0, "T.copy writes"), (0, -8, "T.copy reads")],
)
def test_tiles_that_begin_out_of_bounds(first, read_first, text):
    message = refused(before_the_start(first, read_first))
    assert message.startswith(text)
    assert "which begins before the first element of an axis; expected indices from 0" in message


def test_halos_before_the_start():
    """One counter covers the whole axis: the start of a read does not matter."""
    inputs = inputs_of(2, rows=32)
    actual = simulated(before_the_start(0, -1, height=10), 2, inputs)
    for mine, right in zip(actual, to_the_right(inputs), strict=True):
        np.testing.assert_array_equal(mine["Y"], np.pad(right, ((1, 0), (0, 0)))[:32])


@T.prim_func
def last_row(X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(8, threads=32) as b:
        for j in T.Parallel(N):
            S[(W.rank() + 1) % W.world_size(), b, j] = X[b, j]
        if b == 0:
            for j in T.Parallel(N):
                Y[0, j] = S[W.rank(), -1, j]
            for j in T.Parallel(N):
                Y[-1, j] = X[-2, j]


def test_indices_from_the_end():
    inputs = inputs_of(2)
    for rank, actual in enumerate(simulated(last_row, 2, inputs)):
        right = inputs[rank - 1]["X"][-1], inputs[rank]["X"][-2]
        np.testing.assert_array_equal(actual["Y"], np.stack(right))


@T.macro
def by_first_warps(X, S, peer, b):
    with T.ws(0):
        for i, j in T.Parallel(4, N):
            S[peer, b * 4 + i, j] = X[b * 4 + i, j]


@T.macro
def by_one_warp(X, S, peer, b):
    if T.get_thread_binding() // 32 == 0:
        W.put_warp(X[b * 4, 0], S[peer, b * 4, 0], 4 * N)


@T.macro
def a_row_a_warp(X, S, peer, b):
    warp = T.get_thread_binding() // 32
    if warp < 4:
        W.put_warp(X[b * 4 + warp, 0], S[peer, b * 4 + warp, 0], N)


@T.macro
def by_some_threads(X, S, peer, b):
    if T.get_thread_binding() < 32:
        for i, j in T.Parallel(4, N):
            S[peer, b * 4 + i, j] = X[b * 4 + i, j]


@T.prim_func
def read_by_several(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32)
):
    """Threads 2 n and 2 n + 1 read the same element."""
    with T.Kernel(1, threads=256):
        for i, j in T.Parallel(8, N):
            S[(W.rank() + 1) % W.world_size(), i, j] = X[i, j]
        thread = T.get_thread_binding()
        if thread < 8 * N:
            Y[thread // N, thread % N] = S[W.rank(), thread // 2 // N, thread // 2 % N]


def test_reads_by_several_threads():
    inputs = inputs_of(2)
    for rank, actual in enumerate(simulated(read_by_several, 2, inputs)):
        right = np.repeat(inputs[rank - 1]["X"].ravel()[: 4 * N], 2)
        np.testing.assert_array_equal(actual["Y"].ravel(), right)


@factory
def of_threads(
    write, X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32)
):
    with T.Kernel(2, threads=256) as b:
        write(X, S, (W.rank() + 1) % W.world_size(), b)
        with T.ws(1):
            for i, j in T.Parallel(4, N):
                Y[b * 4 + i, j] = S[W.rank(), b * 4 + i, j]


@pytest.mark.parametrize("write", [by_first_warps, by_one_warp, by_some_threads, a_row_a_warp])
def test_elements_that_several_threads_access(write):
    """The accesses form a box, however many threads access each element."""
    inputs, program = inputs_of(2), of_threads(write)
    (told,) = [
        o for o in tw.explain(program, 2).ops if o.kind == "signal" and o.flag == "S_arrived"
    ]
    assert (told.granule, told.amount) == ("4 x 16", "1 x 64 elements")
    if write is not a_row_a_warp:  # the simulator knows no operands that differ between threads
        for actual, right in zip(simulated(program, 2, inputs), to_the_right(inputs), strict=True):
            np.testing.assert_array_equal(actual["Y"], right)


@T.macro
def with_a_hole(X, S, peer, b):
    """Threads 0 and 1 write row 0, thread 2 row 2."""
    thread = T.get_thread_binding()
    if thread < 3:
        S[peer, b * 4 + thread // 2 * 2, 0] = X[b * 4, 0]


def test_holes():
    message = refused(of_threads(with_a_hole))
    assert message.startswith("a store writes")
    assert "touches elements that do not fill a box" in message


@T.prim_func
def view(X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32)):
    with T.Kernel(1, threads=32):
        flat = T.reshape(S, (S.shape[0], 8 * N))
        T.copy(X, S[(W.rank() + 1) % W.world_size(), 0:8, 0:N])
        for i in T.Parallel(8 * N):
            Y[i // N, i % N] = flat[W.rank(), i]


def test_views():
    assert "expected accesses to S itself, because symmetric tensors have no views" in refused(view)


@T.prim_func
def lanes(X: T.Tensor((64, 4), "uint32"), Y: T.Tensor((64, 4), "uint32")):
    with T.Kernel(1, threads=64):
        thread = T.get_thread_binding()
        got = T.alloc_local((4,), "uint32")
        if thread < 2:
            got[0:2] = W.ld(X[thread, 0], 2, scope="sys", sem="relaxed")
            Y[thread, 0] = got[0]
            Y[thread, 1] = got[1]


def test_as_many_lanes_as_threads():
    """A vector in registers has one lane for each thread."""
    given = np.arange(256, dtype=np.uint32).reshape(64, 4)
    (actual,) = tw.simulate(lanes, 1, [{"X": given, "Y": np.zeros_like(given)}])
    np.testing.assert_array_equal(actual["Y"][:2, :2], given[:2, :2])


def summed(add, lanes, dtype):
    @T.prim_func
    def program(
        X: T.Tensor((8, N), dtype), S: W.Symmetric((8, N), dtype), Y: T.Tensor((8, N), dtype)
    ):
        with T.Kernel(2, threads=32) as b:
            for i, j in T.Parallel(4, N):
                S[W.rank(), b * 4 + i, j] = 0
            for i, j in T.Parallel(4, N // lanes):
                add(
                    S[(W.rank() + 1) % W.world_size(), b * 4 + i, j * lanes],
                    X[b * 4 + i, j * lanes],
                )
            for i, j in T.Parallel(4, N):
                Y[b * 4 + i, j] = S[W.rank(), b * 4 + i, j]

    return program


@pytest.mark.parametrize(
    ("add", "lanes", "dtype"), [(T.atomic_addx2, 2, "float16"), (T.atomic_addx4, 4, F32)]
)
def test_additions_of_several_elements(add, lanes, dtype):
    inputs = [{"X": one["X"].astype(dtype)} for one in inputs_of(2)]
    program = summed(add, lanes, dtype)
    for actual, right in zip(simulated(program, 2, inputs), to_the_right(inputs), strict=True):
        np.testing.assert_array_equal(actual["Y"], right)
    assert f"tw::system::atomic_addx{lanes}<" in tw.emit(program, world_size=2)


@T.prim_func
def from_the_left(X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((8, N), F32)):
    """Rank 0 has no left neighbor."""
    with T.Kernel(2, threads=32) as b:
        for i, j in T.Parallel(4, N):
            S[W.rank(), b * 4 + i, j] = X[b * 4 + i, j]
        for i, j in T.Parallel(4, N):
            Y[b * 4 + i, j] = T.if_then_else(W.rank() > 0, S[W.rank() - 1, b * 4 + i, j], -1.0)


@T.prim_func
def neighbors(X: T.Tensor((8, N), F32), S: W.Symmetric((10, N), F32), Y: T.Tensor((8, N), F32)):
    """No rank writes row 8."""
    with T.Kernel(2, threads=32) as b:
        for i, j in T.Parallel(4, N):
            S[(W.rank() + 1) % W.world_size(), b * 4 + i, j] = X[b * 4 + i, j]
        for i, j in T.Parallel(4, N):
            row = b * 4 + i
            Y[row, j] = T.if_then_else(row > 0, S[W.rank(), row - 1, j], 0.0) + T.if_then_else(
                row < 7, S[W.rank(), row + 1, j], 0.0
            )


@pytest.mark.parametrize("ranks", [2, 3])
def test_loads_in_one_arm_of_a_choice(ranks):
    inputs = inputs_of(ranks)
    actual = simulated(from_the_left, ranks, inputs)
    np.testing.assert_array_equal(actual[0]["Y"], -1)
    for mine, left in zip(actual[1:], inputs, strict=False):
        np.testing.assert_array_equal(mine["Y"], left["X"])
    actual = simulated(neighbors, ranks, inputs)
    for mine, right in zip(actual, to_the_right(inputs), strict=True):
        padded = np.pad(right, ((1, 1), (0, 0)))
        np.testing.assert_array_equal(mine["Y"], padded[:-2] + padded[2:])
