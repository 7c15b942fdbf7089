"""Packed rows: reads and padding of other ranks, and padding that comes too late."""

import tilelang.language as T

from tileweave import language as W

from .case import F32, N, refused

ROWS = 4


def receiving(receive, pad=None):
    """Return a program that writes a row to each rank, pads the others and calls ``receive``."""

    @T.prim_func
    def program(X: T.Tensor((1, N), F32), at: T.Tensor((2,), "int32"), Y: T.Tensor((1, N), F32)):
        with T.Kernel(1, threads=32):
            inbox = W.alloc_packed(rows=ROWS, row=N)
            tile = T.alloc_shared((1, N), F32)
            me = W.rank()
            T.copy(X, tile)
            for peer in T.serial(2):
                T.copy(tile, inbox[peer, at[peer], 0])
            if pad is None:
                W.pad(inbox[me, 2, 0], 2)
            else:
                pad(inbox, at)
            receive(inbox, tile)
            T.copy(tile, Y)

    return program


@T.macro
def own_row(inbox, tile):
    T.copy(inbox[W.rank(), 0, 0], tile)


@refused(
    "T.copy reads inbox[1 - W.rank(), 0, 0], which has rank index 1 - W.rank(); expected W.rank(), "
    "because only the owner reads and pads packed rows"
)
def read_by_another_rank():
    @T.macro
    def receive(inbox, tile):
        T.copy(inbox[1 - W.rank(), 0, 0], tile)  # HERE

    return receiving(receive)


@refused("which has rank index at[0]; expected W.rank(), because only the owner reads and pads")
def read_of_a_rank_that_is_data():
    @T.prim_func
    def program(X: T.Tensor((1, N), F32), at: T.Tensor((2,), "int32"), Y: T.Tensor((1, N), F32)):
        with T.Kernel(1, threads=32):
            inbox = W.alloc_packed(rows=1, row=N)
            tile = T.alloc_shared((1, N), F32)
            T.copy(X, tile)
            T.copy(tile, inbox[at[0], 0, 0])
            T.copy(inbox[at[0], 0, 0], tile)  # HERE
            T.copy(tile, Y)

    return program


@refused("W.pad writes inbox[1 - W.rank(), 0, 0], which has rank index 1 - W.rank(); expected")
def padded_by_another_rank():
    @T.macro
    def pad(inbox, at):
        W.pad(inbox[1 - W.rank(), 2, 0], 2)  # HERE

    return receiving(own_row, pad)


@refused(
    "W.pad writes inbox[W.rank(), 2, 0], under T.tl_shuffle_elect(32), which differs between "
    "threads; expected conditions and loops that are the same for the whole block"
)
def padded_by_elected_threads():
    @T.macro
    def pad(inbox, at):
        if T.shuffle_elect(32):
            W.pad(inbox[W.rank(), 2, 0], 2)  # HERE

    return receiving(own_row, pad)


@refused("T.copy writes inbox[at[0], 0, 0], packed rows that no block reads; expected a read")
def read_by_no_rank():
    @T.prim_func
    def program(X: T.Tensor((1, N), F32), at: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            inbox = W.alloc_packed(rows=1, row=N)
            tile = T.alloc_shared((1, N), F32)
            T.copy(X, tile)
            T.copy(tile, inbox[at[0], 0, 0])  # HERE

    return program


@refused(
    "T.copy reads inbox[me, 0, 0]: a circular wait: block 0 of rank 0 waits for itself; expected "
    "each block to write what others wait for before it reads what they write"
)
def padded_late():
    @T.prim_func
    def program(X: T.Tensor((1, N), F32), Y: T.Tensor((1, N), F32)):
        with T.Kernel(1, threads=32):
            inbox = W.alloc_packed(rows=ROWS, row=N)
            tile = T.alloc_shared((1, N), F32)
            me = W.rank()
            T.copy(X, tile)
            T.copy(tile, inbox[1 - me, 0, 0])
            T.copy(inbox[me, 0, 0], tile)  # HERE
            W.pad(inbox[me, 1, 0], 3)  # HERE
            T.copy(tile, Y)

    return program


@refused("inbox[peer, at[peer], 0], a ragged tensor; expected writes, each row once")
def added_to():
    @T.prim_func
    def program(X: T.Tensor((1, N), F32), at: T.Tensor((2,), "int32"), Y: T.Tensor((1, N), F32)):
        with T.Kernel(1, threads=32):
            inbox = W.alloc_packed(rows=ROWS, row=N)
            tile = T.alloc_shared((1, N), F32)
            T.copy(X, tile)
            for peer in T.serial(2):
                T.atomic_add(inbox[peer, at[peer], 0], tile)  # HERE
            T.copy(inbox[W.rank(), 0, 0], tile)
            T.copy(tile, Y)

    return program


@refused("tileweave.granule=(2, 4) of inbox, a ragged tensor; expected (rows, 8)",
         granule={"inbox": [2, 4]})  # fmt: skip
def granule_that_divides_a_packed_row():
    return receiving(own_row)


@refused("alloc_packed: inbox, and tileweave.verify=off; expected a program whose", verify="off")
def packed_rows_not_inferred():
    return receiving(own_row)


@refused(
    "tileweave.check_rows: inbox, a tensor of W.alloc_packed; expected tensors of W.alloc_ragged",
    check_rows=True,
)
def packed_rows_checked():
    return receiving(own_row)
