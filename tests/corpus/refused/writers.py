"""Elements without a writer or with several, and waits that no launch order fulfills."""

import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import F32, N, Row, Shared, refused


@refused(
    "T.copy reads S[1 - W.rank(), 0]: S[0, 0:8] is read, but no rank writes it in this launch; "
    "expected a write of it in the same program, or W.unordered"
)
def not_written(S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        T.copy(S[1 - W.rank(), 0], Y)  # HERE


@refused("T.copy reads S[me, 0]: S[0, 4:8] is read, but no rank writes it in this launch")
def half_is_written(S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        me = W.rank()
        for i in T.Parallel(N // 2):
            S[1 - me, i] = Y[i]
        T.copy(S[me, 0], Y)  # HERE


@refused("S[0, 0:8] is written 2 times in one launch, by rank 1; expected once")
def two_blocks_write(X: Row, S: Shared, Y: Row):
    with T.Kernel(2, threads=32):
        other = 1 - W.rank()
        T.copy(X, S[other, 0])  # HERE
        T.copy(S[W.rank(), 0], Y)


@refused("S[0, 0:8] is written 2 times in one launch, by rank 0 and 1; expected once")
def two_ranks_write(X: Row, S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        if W.rank() == 0:
            T.copy(X, S[0, 0])  # HERE
        else:
            T.copy(X, S[0, 0])  # HERE
        if W.rank() == 0:
            T.copy(S[0, 0], Y)


@refused(
    "T.copy reads S[W.rank(), owner, 0]: S[0, 0, 0:8] may be read, but no rank writes it in this "
    "launch; expected a write of it in the same program, or W.unordered"
)
def one_index_not_written(at: T.Tensor((1,), "int32"), S: W.Symmetric((2, N), F32), Y: Row):
    with T.Kernel(1, threads=32):
        owner = at[0]
        T.copy(Y, S[1 - W.rank(), W.rank(), 0])
        T.copy(S[W.rank(), owner, 0], Y)  # HERE


@refused("T.atomic_add adds to S[0, i]: S[0, 0:8] is added to, but no rank clears it first")
def element_added_but_not_cleared(S: W.Symmetric((8,), F32), Y: T.Tensor((8,), F32)):
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(8):  # HERE
            T.atomic_add(S[0, i], 1.0)
        T.copy(S[0, 0:8], Y)


@refused("T.atomic_add adds to S[0, 0]: S[0, 0:8] is added to, but no rank clears it first")
def added_but_not_cleared(S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((N,), F32)
        T.copy(Y, tile)
        T.atomic_add(S[0, 0], tile)  # HERE


@factory
def readers_first(
    X: T.Tensor((N, N), F32), S: W.Symmetric((N, N), F32), Y: T.Tensor((N, N), F32), *, pieces=1
):
    with T.Kernel(2 * N, threads=32) as block:
        tile = T.alloc_shared((1, N), F32)
        if block < N:
            T.copy(S[W.rank(), block, 0], tile)  # HERE
            T.copy(tile, Y[block, 0])
        else:
            T.copy(X[block - N, 0], tile)
            for at in T.serial(0, N, N // pieces):
                T.copy(tile[0:1, at : at + N // pieces], S[1 - W.rank(), block - N, at])


refused(
    "T.copy reads S[W.rank(), bx, 0]: block 0 of rank 0 waits for block 8 of rank 1, and with 8 "
    "resident blocks a rank (tileweave.resident_blocks) the launch deadlocks; expected blocks to "
    "wait for earlier blocks, or fewer waiting blocks",
    resident_blocks=8,
)(readers_first)


@refused(
    "T.copy writes S[(W.rank() + 1) % 3, 0]: tileweave.reuse=double_buffer is not sufficient: "
    "rank 0 writes it for rank 1 and does not wait for anything from that rank in the same "
    "launch; expected auto, barrier or credit",
    ranks=3,
    reuse="double_buffer",
)
def two_buffers_in_a_ring(Y: Row):
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((N,), F32)
        T.copy(Y, S[(W.rank() + 1) % 3, 0])  # HERE
        T.copy(S[W.rank(), 0], Y)


@refused(
    "T.copy writes S[1 - W.rank(), 0], and a second kernel of the program begins; expected one "
    "T.Kernel in a program that accesses symmetric tensors"
)
def two_kernels(S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        T.copy(Y, S[1 - W.rank(), 0])  # HERE
    with T.Kernel(1, threads=32):  # HERE
        T.copy(S[W.rank(), 0], Y)


@refused(
    "T.copy reads S[me, 0]: a circular wait: block 0 of rank 0 waits for block 0 of rank 1, which "
    "waits for block 0 of rank 0; expected each block to write what others wait for before it "
    "reads what they write"
)
def reads_before_it_writes(X: Row, S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        me = W.rank()
        T.copy(S[me, 0], Y)  # HERE
        T.copy(X, S[1 - me, 0])  # HERE


@refused(
    "T.copy reads S[me, 1, 0]: a circular wait: block 0 of rank 0 waits for block 1 of rank 1, "
    "which waits for block 0 of rank 0"
)
def two_blocks_wait_for_each_other(X: Row, S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(2, threads=32) as block:
        me = W.rank()
        if block == 0:
            T.copy(S[me, 1, 0], Y[1, 0:N])  # HERE
            T.copy(X, S[1 - me, 0, 0])  # HERE
        else:
            T.copy(S[me, 0, 0], Y[0, 0:N])  # HERE
            T.copy(X, S[1 - me, 1, 0])  # HERE


@refused(
    "T.copy reads S[me, k, 0]: S[0, 0, 0:8] receives 8 added elements in a launch, S[0, 1, 0:8] is "
    "only written; expected additions to both, another tensor for what is only written"
)
def adds_to_some_of_what_is_read(X: Row, S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(1, threads=32):
        me = W.rank()
        tile = T.alloc_shared((N,), F32)
        T.copy(X, tile)
        for k in T.serial(2):
            T.copy(tile, S[me, k, 0])
        T.atomic_add(S[1 - me, 0, 0], tile)
        for k in T.serial(2):
            T.copy(S[me, k, 0], Y[k, 0:N])  # HERE


@refused(
    "T.atomic_max writes S[1 - me, 0], and S[0, 0:8] is written 2 times in one launch; expected "
    "T.atomic_add, the only combination of several writes whose order is inferred"
)
def maximum_of_a_tile(X: Row, S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        me = W.rank()
        tile = T.alloc_shared((N,), F32)
        T.copy(X, tile)
        T.copy(tile, S[me, 0])  # HERE
        T.atomic_max(S[1 - me, 0], tile)  # HERE
        T.copy(S[me, 0], Y)


@refused(
    "T.atomic_min writes S[1 - W.rank(), i], and S[0, 0:8] is written 2 times in one launch; "
    "expected T.atomic_add, the only combination of several writes whose order is inferred"
)
def minimum_of_elements(X: Row, S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        T.copy(X, S[W.rank(), 0])
        for i in T.Parallel(N):  # HERE
            T.atomic_min(S[1 - W.rank(), i], X[i])
        T.copy(S[W.rank(), 0], Y)


@refused(
    "S[W.rank()]: a circular wait: block 0 of rank 0 waits for block 0 of rank 1, which waits for "
    "block 0 of rank 0; expected the write in a statement before that of the read"
)
def one_number_by_one_thread(S: W.Symmetric((), F32), Y: T.Tensor((1,), F32)):
    """A tensor of one number a rank is no exception: what one thread does is ordered as a whole."""
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:  # HERE
            S[1 - W.rank()] = Y[0]
            Y[0] = S[W.rank()]
