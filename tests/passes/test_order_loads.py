"""Pipelined loops that load from a tensor to which the program stores."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.lines import named_lines
from tests.releases import RECORDS_LINES
from tileweave import language as W

X, Y, Z = (T.Tensor((6, 128), "int32") for _ in range(3))
V, U = (T.Tensor((1024,), "int32") for _ in range(2))
ARCHITECTURES = pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
VALUES = np.random.default_rng(0).integers(0, 4, (6, 128)).astype(np.int32)
ROW, PARTS = 128, 8


@T.macro
def nothing(x, y, tile, total, tx, n):
    pass


@T.macro
def load(x, y, tile, total, tx, n):
    T.copy(y[4, 0], tile)
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]


@T.macro
def load_by_index(x, y, tile, total, tx, n):
    T.copy(x[y[4, 0] + 3, 0], tile)
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]


@T.macro
def set_row(x, y, tile, total, tx, n):
    T.sync_threads()
    y[4, tx] = n + 1
    T.sync_threads()


@T.macro
def copy_row(x, y, tile, total, tx, n):
    T.copy(total, y[4, 0])


@T.macro
def set_row_once(x, y, tile, total, tx, n):
    y[4, tx] = n + 1
    T.sync_threads()


@T.macro
def set_row_and_registers(x, y, tile, total, tx, n):
    for i in T.Parallel(ROW):
        total[i] = n
        y[4, i] = total[i]
    T.sync_threads()


@T.macro
def load_then_set(x, y, tile, total, tx, n):
    T.copy(y[4, 0], tile)
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]
    T.sync_threads()
    y[4, tx] = n + 1
    T.sync_threads()


@T.macro
def set_then_load(x, y, tile, total, tx, n):
    T.sync_threads()
    y[4, tx] = n + 1
    T.sync_threads()
    T.copy(y[4, 0], tile)
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]


@T.macro
def reverse_row(x, y, tile, total, tx, n):
    tile[tx] = y[4, tx]
    T.sync_threads()
    y[4, tx] = tile[127 - tx] + 1


@T.macro
def index_then_set(x, y, tile, total, tx, n):
    T.copy(x[y[4, 0] + 3, 0], tile)
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]
    T.sync_threads()
    y[4, tx] = (n + 1) % 2
    T.sync_threads()


@T.macro
def set_before_use(x, y, tile, total, tx, n):
    T.copy(y[n, 0], tile)
    y[n, tx] = 0
    T.sync_threads()
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]


@factory
def nested(before, inside, after, x: X, y: Y, z: Z, *, num_stages=2):
    with T.Kernel(1, threads=128):
        tile, other = T.alloc_shared((ROW,), "int32"), T.alloc_shared((ROW,), "int32")
        total = T.alloc_fragment((ROW,), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        y[4, tx] = 0
        T.sync_threads()
        for k in T.serial(2):
            T.clear(total)
            before(x, y, other, total, tx, k)
            for j in T.Pipelined(3, num_stages=num_stages):
                T.copy(x[j, 0], tile)
                for i in T.Parallel(ROW):
                    total[i] = total[i] + tile[i]
                inside(x, y, other, total, tx, j)
            T.copy(total, z[k, 0])
            after(x, y, other, total, tx, k)


def run(program, arch):
    return tw.validate(program, 1, inputs=[{"x": VALUES}], arch=arch, schedules=2)[0]["z"][:2]


@ARCHITECTURES
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stores_of_an_earlier_outer_iteration_are_loaded(num_stages, arch):
    program = nested(nothing, load, set_row, num_stages=num_stages)
    sums = VALUES[:3].sum(0)
    assert np.array_equal(run(program, arch), [sums, sums + 3])
    program = nested(nothing, load, copy_row, num_stages=num_stages)
    assert np.array_equal(run(program, arch), [sums, 4 * sums])


@ARCHITECTURES
def test_stores_before_the_loop_are_loaded(arch):
    """Without the barriers, threads also overwrite what the loop of an earlier iteration loads."""
    sums = VALUES[:3].sum(0)
    program = nested(set_row_once, load, nothing)
    assert np.array_equal(run(program, arch), [sums + 3, sums + 6])
    program = nested(set_row, load_by_index, nothing)
    assert np.array_equal(run(program, arch), [sums + 3 * VALUES[4], sums + 3 * VALUES[5]])


def test_barrier_and_fence_are_inserted_once():
    cuda = str(tw.emit(nested(set_row_once, load, nothing), arch="sm_90a"))
    before_split = cuda[cuda.index("for (int") : cuda.index(".wait(")]
    assert before_split.count("__syncthreads()") == 2
    assert before_split.count("fence_proxy_async()") == 1


@pytest.mark.parametrize("num_stages", [1, 2])
@ARCHITECTURES
@pytest.mark.parametrize("inside", [load_then_set, set_then_load, reverse_row, index_then_set])
def test_stores_that_loads_overtake_are_refused(inside, arch, num_stages):
    program = nested(nothing, inside, nothing, num_stages=num_stages)
    with pytest.raises(
        tw.TileWeaveError,
        match=r"assignment to y: stores to y, which T.Pipelined loads iterations ahead; expected "
        r"another tensor, or T.serial",
    ):
        tw.emit(program, arch=arch)


@ARCHITECTURES
def test_store_before_the_wait_for_a_load_is_refused(arch):
    with pytest.raises(
        tw.TileWeaveError,
        match=r"stores to y, whose load by T.Pipelined may not have ended; expected a statement "
        r"between both that reads the loaded tile, another tensor, or T.serial",
    ):
        tw.emit(nested(nothing, set_before_use, nothing), arch=arch)


def test_store_after_an_index_of_the_producer_is_refused():
    program = nested(nothing, load_by_index, set_row)
    with pytest.raises(
        tw.TileWeaveError,
        match=r"stores to y, which producer warps may still read for an index, a condition or an "
        r"extent of T.Pipelined; expected another tensor, or T.serial",
    ) as error:
        tw.emit(program, arch="sm_90a")
    assert not RECORDS_LINES or len(named_lines(str(error.value), run)) == 2
    sums = VALUES[:3].sum(0)
    expected = [sums + 3 * VALUES[3], sums + 3 * VALUES[4]]
    assert np.array_equal(run(program, "sm_80"), expected)


def test_store_that_moves_to_the_consumers_is_refused():
    program = nested(set_row_and_registers, load, nothing)
    with pytest.raises(
        tw.TileWeaveError,
        match="because it also writes registers; expected the store in a statement of its own",
    ):
        tw.emit(program, arch="sm_90a")
    run(program, "sm_80")


@T.macro
def load_if_set(x, y, tile, total, tx, n):
    if y[4, 0] > 1:
        T.copy(x[4, 0], tile)
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]


@T.macro
def load_and_clear(x, y, tile, total, tx, n):
    for i in T.Parallel(ROW):
        tile[i] = y[4, i]
        y[4, i] = n
    for i in T.Parallel(ROW):
        total[i] = total[i] + tile[i]


def test_statement_of_the_producer_that_loads_and_stores_is_refused():
    """The producers copy by cp.async, and store before the copy has ended."""
    program = nested(nothing, load_and_clear, nothing)
    with pytest.raises(tw.TileWeaveError, match=r"stores to y, which T\.Pipelined loads iter"):
        tw.emit(program, arch="sm_90a")
    run(program, "sm_80")


@ARCHITECTURES
def test_consumers_read_the_condition_of_a_load(arch):
    """They load the tile, too, so the store after the loop is ordered."""
    tw.emit(nested(nothing, load_if_set, set_row), arch=arch)


@factory
def in_place(
    first,
    second,
    x: V,
    y: U,
    *,
    extent=PARTS,
    repeats=1,
    num_stages=2,
    use_tma=True,
    by_thread=False,
):
    """Part ``second(k)`` becomes twice part ``first(k)``, for all ``k``."""
    with T.Kernel(1, threads=128):
        tile, frag = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        W.fence("gpu")
        for i in T.Parallel(PARTS * ROW):
            y[i] = x[i]
        T.sync_threads()
        for _ in T.serial(repeats):
            for k in T.Pipelined(extent, num_stages=num_stages):
                T.copy(y[first(k) * ROW], tile, disable_tma=not use_tma)
                if by_thread:
                    tx = T.get_thread_binding()
                    y[second(k) * ROW + tx] = tile[tx] * 2
                else:
                    for i in T.Parallel(ROW):
                        frag[i] = tile[i] * 2
                    T.copy(frag, y[second(k) * ROW])
                T.sync_threads()


def parts_after(program_first, second, extent=PARTS, repeats=1):
    y = INPUT.reshape(PARTS, ROW).copy()
    for _ in range(repeats):
        for k in range(extent):
            y[second(k)] = 2 * y[program_first(k)]
    return y.ravel()


INPUT = np.random.default_rng(1).integers(0, 50, PARTS * ROW).astype(np.int32)


def same(k):
    return k


def next_part(k):
    return k + 1


def from_the_end(k):
    return PARTS - 1 - k


def second_half(k):
    return k + 4


def one_of_four(k):
    return k % 4


@ARCHITECTURES
@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        (same, same, {}),
        (same, same, {"num_stages": 1}),
        (same, same, {"by_thread": True}),
        (same, same, {"repeats": 3, "num_stages": 3}),
        (same, same, {"repeats": 3, "extent": 2}),
        (from_the_end, from_the_end, {}),
        (next_part, same, {"extent": 7}),
        (same, second_half, {"extent": 4}),
        (one_of_four, one_of_four, {"use_tma": False}),
    ],
)
def test_iterations_that_update_their_own_part_are_legal(first, second, options, arch):
    program = in_place(first, second, **options)
    outputs = tw.validate(program, 1, inputs=[{"x": INPUT}], arch=arch, schedules=2)
    options = {name: options[name] for name in options.keys() & {"extent", "repeats"}}
    assert np.array_equal(outputs[0]["y"], parts_after(first, second, **options))


@ARCHITECTURES
def test_store_to_the_next_part_is_refused(arch):
    with pytest.raises(tw.TileWeaveError, match=r"T.copy: stores to y, which T.Pipelined loads"):
        tw.emit(in_place(same, next_part, extent=7), arch=arch)


def test_load_by_the_tma_after_a_distant_store_is_refused():
    program = in_place(one_of_four, one_of_four)
    with pytest.raises(
        tw.TileWeaveError,
        match=r"stores to y, which the TMA loads in a later iteration without a fence; expected "
        r"disable_tma=True for this load, another tensor, or T.serial",
    ):
        tw.emit(program, arch="sm_90a")
    outputs = tw.validate(program, 1, inputs=[{"x": INPUT}], arch="sm_80", schedules=2)
    assert np.array_equal(outputs[0]["y"], parts_after(one_of_four, one_of_four))


S = W.Symmetric((PARTS + 1, ROW), "int32")
Q = T.Tensor((PARTS + 1, ROW), "int32")


@T.macro
def double_rows(s, tile, frag, store):
    """Row ``k + 1`` becomes twice row ``k``."""
    for k in T.Pipelined(PARTS, num_stages=2):
        T.copy(s[W.rank(), k, 0], tile)
        for i in T.Parallel(ROW):
            frag[i] = tile[i] * 2
        store(s, frag, k)
        T.sync_threads()


@T.macro
def copy_to_own_row(s, frag, k):
    me = W.rank()
    T.copy(frag, s[me, k + 1, 0])


@T.macro
def set_own_row(s, frag, k):
    for i in T.Parallel(ROW):
        s[W.rank(), k + 1, i] = frag[i]


@factory
def own_copy(store, s: S):
    """The program synchronizes ranks explicitly, so no wait is inserted."""
    with T.Kernel(1, threads=128):
        tile, frag = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        double_rows(s, tile, frag, store)
        W.fence("sys")


@ARCHITECTURES
@pytest.mark.parametrize("store", [copy_to_own_row, set_own_row])
def test_store_to_the_own_copy_of_an_explicit_program_is_refused(store, arch):
    with pytest.raises(tw.TileWeaveError, match=r"stores to s, which T.Pipelined loads iterations"):
        tw.emit(own_copy(store), arch=arch, world_size=2)


@factory
def stored_before(by_builtin, x: X, z: Z, s: S):
    """The builtin stores two rows, and the loop loads the second one."""
    with T.Kernel(1, threads=128):
        tile, total = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        for k in T.serial(2):
            T.clear(total)
            if by_builtin:
                W.put_block(x[k, 0], s[W.rank(), 0, 0], 2 * ROW)
            else:
                for i in T.Parallel(ROW):
                    s[W.rank(), 1, i] = x[k + 1, i]
            T.sync_threads()
            for _ in T.Pipelined(3, num_stages=2):
                T.copy(s[W.rank(), 1, 0], tile)
                for i in T.Parallel(ROW):
                    total[i] = total[i] + tile[i]
            T.copy(total, z[k, 0])
            W.fence("sys")


@ARCHITECTURES
@pytest.mark.parametrize("by_builtin", [False, True])
def test_stores_to_the_own_copy_before_the_loop_are_loaded(by_builtin, arch):
    program = stored_before(by_builtin)
    outputs = tw.validate(program, 2, [{"x": VALUES}] * 2, arch=arch, schedules=2)
    assert all(np.array_equal(output["z"][:2], 3 * VALUES[1:3]) for output in outputs)


@factory
def rank_in_index(y: Q):
    with T.Kernel(1, threads=128):
        tile, frag = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        for k in T.Pipelined(PARTS - 1, num_stages=2):
            T.copy(y[k, 0], tile)
            for i in T.Parallel(ROW):
                frag[i] = tile[i] * 2
            T.copy(frag, y[k + W.rank() + 1, 0])


@ARCHITECTURES
def test_store_whose_index_has_the_rank_is_refused(arch):
    with pytest.raises(tw.TileWeaveError, match=r"T.copy: stores to y, which T.Pipelined loads"):
        tw.emit(rank_in_index(), arch=arch, world_size=2)
