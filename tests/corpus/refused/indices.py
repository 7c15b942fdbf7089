"""Indices, conditions and extents that are unknown, out of bounds or not a box."""

import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import F32, N, Row, Shared, refused


@refused(
    "T.copy writes S[where, bx, 0], which depends on to[bx], which is known only at run time; "
    "expected indices and conditions made of the rank, block indices and loops, explicit signals "
    "and waits, or W.unordered"
)
def destination_from_memory(
    to: T.Tensor((4,), "int32"), S: W.Symmetric((4, N), F32), Y: T.Tensor((4, N), F32)
):
    with T.Kernel(4, threads=32) as block:
        tile = T.alloc_shared((1, N), F32)
        where = to[block]
        T.copy(Y[block, 0], tile)
        T.copy(tile, S[where, block, 0])  # HERE
        T.copy(S[W.rank(), block, 0], tile)


@refused(
    "T.copy writes S[1 - W.rank(), 0], which depends on go[0], which is known only at run time"
)
def condition_from_memory(go: T.Tensor((1,), "int32"), S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        if go[0] > 0:
            T.copy(Y, S[1 - W.rank(), 0])  # HERE
        T.copy(S[W.rank(), 0], Y)


@refused("a load reads S[at[i], i], which depends on at[i], which is known only at run time")
def rank_from_memory_for_each_thread(at: T.Tensor((N,), "int32"), S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        T.copy(Y, S[W.rank(), 0])
        for i in T.Parallel(N):  # HERE
            Y[i] = S[at[i], i]


@refused("which depends on rank[0], which is known only at run time")
def rank_from_a_register(at: T.Tensor((N,), "int32"), S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        rank = T.alloc_local((1,), "int32")
        i = T.get_thread_binding()
        T.copy(Y, S[W.rank(), 0])
        rank[0] = at[i % N]
        Y[i % N] = S[rank[0], 0]  # HERE


@refused("T.copy reads S[1 - W.rank(), 0], which depends on n, which is known only at run time")
def blocks_of_the_launch_from_the_caller(n: T.int32, S: Shared, Y: Row):
    with T.Kernel(n, threads=32):
        T.copy(S[1 - W.rank(), 0], Y)  # HERE


@refused(
    "T.copy reads S[me, place, 0]: S[0, 1, 0:8] receives 16 elements in a launch, S[0, 0, 0:8] 8; "
    "expected an equal number in each granule of 1 x 8 elements that it reads"
)
def indices_with_different_counts(at: T.Tensor((1,), "int32"), S: W.Symmetric((2, N), F32), Y: Row):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((2, N), F32)
        me, place = W.rank(), at[0]
        for row in T.serial(2):
            T.copy(tile[row : row + 1, :], S[me, row, 0])
        T.atomic_add(S[1 - me, 0, 0], tile[0:1, :])
        T.atomic_add(S[1 - me, 1, 0], tile[0:1, :])
        T.atomic_add(S[me, 1, 0], tile[0:1, :])
        T.copy(S[me, place, 0], Y)  # HERE


@factory
def tiles(S: W.Symmetric((16, N), F32), Y: T.Tensor((16, N), F32)):
    with T.Kernel(4, threads=32) as block:
        tile = T.alloc_shared((4, N), F32)
        T.copy(Y[block * 4, 0], tile)
        T.copy(tile, S[1 - W.rank(), block * 4, 0])  # HERE
        T.copy(S[W.rank(), block * 4, 0], tile)
        T.copy(tile, Y[block * 4, 0])


refused(
    "T.copy writes S[1 - W.rank(), bx * 4, 0]: tileweave.granule=(6, 8) of S cuts what it "
    "accesses on axis 0; expected a multiple of 4 there",
    granule={"S": (6, 8)},
)(tiles)


@refused("T.copy writes S[W.rank() + 1, 0], which has rank index 2; expected 0 to 1")
def after_the_last_rank(S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        T.copy(Y, S[W.rank() + 1, 0])  # HERE
        T.copy(S[W.rank(), 0], Y)


@refused(
    "which depends on m, which is known only at run time; expected indices and conditions made "
    "of the rank, block indices and loops, or T.dynamic('n'), T.dynamic('m') as extents of tensors "
    "instead of scalar parameters, explicit signals"
)
def scalars_that_may_be_sizes(
    n: T.int32, k: T.int32, m: T.int32, S: W.Symmetric((4, N), F32), Y: T.Tensor((4, N), F32)
):
    with T.Kernel(m, threads=32):
        tile = T.alloc_shared((1, N), F32)
        last = n - 1
        for i in T.serial(last):
            T.copy(tile, S[1 - W.rank(), i, 0])  # HERE
        T.copy(S[W.rank(), 0, 0], tile)
        Y[0, 0] = T.cast(k, F32)


@refused("which depends on n, which is known only at run time")
def loop_bound_from_the_caller(n: T.int32, S: W.Symmetric((4, N), F32), Y: T.Tensor((4, N), F32)):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((1, N), F32)
        for i in T.serial(n):
            T.copy(tile, S[1 - W.rank(), i, 0])  # HERE
        T.copy(S[W.rank(), 0, 0], tile)


@refused("S[1 - W.rank(), i * 2], which touches elements that do not fill a box; expected")
def every_second_element(S: W.Symmetric((2 * N,), F32), Y: Row):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):  # HERE
            S[1 - W.rank(), i * 2] = Y[i]
        for i in T.Parallel(N):
            Y[i] = S[W.rank(), i * 2]


@refused("W.put_block writes S[1 - W.rank(), 0, 4], which extends past the end of a row; expected")
def over_the_end_of_a_row(X: Row, S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(1, threads=32):
        W.put_block(X[0], S[1 - W.rank(), 0, 4], N)  # HERE
        T.copy(S[W.rank(), 0, 0], Y)


@refused(
    "T.copy writes S[1 - W.rank(), 0, 0], which depends on rows, which is known only at run time"
)
def an_extent_from_the_caller():
    rows = T.dynamic("rows")

    @T.prim_func
    def program(S: W.Symmetric((rows, N), F32), Y: T.Tensor((1, N), F32)):
        with T.Kernel(1, threads=32):
            T.copy(Y, S[1 - W.rank(), 0, 0])  # HERE
            T.copy(S[W.rank(), 0, 0], Y)

    return program


@refused(
    "a store writes S[r, me, i], which accesses the copies of ranks 0 to 1 in one operation; "
    "expected one rank in each (a T.serial loop over the ranks around it, instead of T.Parallel or "
    "a slice of the rank axis)"
)
def all_ranks_in_one_loop(X: Row, S: W.Symmetric((2, N), F32), Y: Row):
    with T.Kernel(1, threads=32):
        me = W.rank()
        for r, i in T.Parallel(2, N):  # HERE
            S[r, me, i] = X[i]
        T.copy(S[me, 1 - me, 0], Y)


@refused(
    "T.Pipelined: order and stage count the statements of the loop, to which the compiler adds "
    "signals or waits; expected num_stages alone"
)
def a_schedule_without_the_waits():
    @T.prim_func
    def program(X: T.Tensor((2, N), F32), S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((1, N), F32)
            for k in T.serial(2):
                T.copy(X[k : k + 1, :], S[1 - W.rank(), k, 0])
            for k in T.Pipelined(2, order=[0, 1], stage=[0, 1]):  # HERE
                T.copy(S[W.rank(), k, 0], tile)
                T.copy(tile, Y[k, 0])

    return program
