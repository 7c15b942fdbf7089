"""Ragged tensors: segments of other ranks, without an announcement or with several."""

from functools import wraps

import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import F32, N, refused

ROWS = 4


@factory
def sending(
    send,
    X: T.Tensor((1, N), F32),
    at: T.Tensor((2,), "int32"),
    Y: T.Tensor((2, ROWS, N), F32),
    *,
    announce=None,
):
    """Return a program that announces each segment and reads it after ``send``."""
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        tile = T.alloc_shared((1, N), F32)
        me = W.rank()
        T.copy(X, tile)
        if announce is None:
            for peer in T.serial(2):
                W.announce(inbox[peer, me, 0, 0], at[peer])
        else:
            announce(inbox, at)
        send(inbox, tile, at)
        for s in T.serial(2):
            for i in T.serial(W.announced(inbox[me, s, 0, 0])):
                T.copy(inbox[me, s, i, 0], tile)
                T.copy(tile, Y[s, i, 0])


@T.macro
def to_all(inbox, tile, at):
    for peer in T.serial(2):
        for i in T.serial(at[peer]):
            T.copy(tile, inbox[peer, W.rank(), i, 0])


def refused_send(message):
    """Register a macro: a program that sends by it is refused."""
    return lambda send: refused(message)(wraps(send)(lambda: sending(T.macro(send))))


def refused_announce(message):
    """Register a macro: a program that announces by it is refused."""
    return lambda announce: refused(message)(
        wraps(announce)(lambda: sending(to_all, T.macro(announce)))
    )


@refused_send(
    "T.copy writes inbox[peer, 1 - W.rank(), 0, 0], which has source index 1 - W.rank(); expected "
    "W.rank(), because only the source writes a segment"
)
def segment_of_another_rank(inbox, tile, at):
    for peer in T.serial(2):
        for i in T.serial(at[peer]):
            T.copy(tile, inbox[peer, 1 - W.rank(), i, 0])  # HERE


@refused_send("which has source index at[0]; expected W.rank(), because only the source writes a")
def source_is_data(inbox, tile, at):
    for peer in T.serial(2):
        for i in T.serial(at[peer]):
            T.copy(tile, inbox[peer, at[0], i, 0])  # HERE


@refused_announce(
    "W.announce writes inbox_announced[peer, 1 - W.rank(), 0], which has source index"
)
def announced_for_another_rank(inbox, at):
    for peer in T.serial(2):
        W.announce(inbox[peer, 1 - W.rank(), 0, 0], at[peer])  # HERE


@refused(
    "inbox_announced[0, 1] is read, but no rank announces it in this launch; expected "
    "W.announce for it, also of 0"
)
def read_without_an_announcement():
    @T.macro
    def announce(inbox, at):
        W.announce(inbox[1, W.rank(), 0, 0], at[0])
        if W.rank() == 0:
            W.announce(inbox[0, W.rank(), 0, 0], at[0])

    @T.prim_func
    def program(at: T.Tensor((2,), "int32"), Y: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            inbox = W.alloc_ragged((), rows=ROWS, row=N)
            announce(inbox, at)
            for s in T.serial(2):
                Y[s] = W.announced(inbox[W.rank(), s, 0, 0])  # HERE

    return program


@refused(
    "T.copy writes inbox[peer, W.rank(), 0, 0]: rows of segment inbox[0, 1] may be written, but no "
    "rank announces it in this launch; expected W.announce for it, also of 0"
)
def written_without_an_announcement(
    X: T.Tensor((1, N), F32), at: T.Tensor((2,), "int32"), Y: T.Tensor((1, N), F32)
):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        tile = T.alloc_shared((1, N), F32)
        T.copy(X, tile)
        W.announce(inbox[W.rank(), W.rank(), 0, 0], at[0])
        for peer in T.serial(2):
            for i in T.serial(at[peer]):
                T.copy(tile, inbox[peer, W.rank(), i, 0])  # HERE
        T.copy(inbox[W.rank(), W.rank(), 0, 0], tile)
        T.copy(tile, Y[0, 0])


@refused_announce(
    "inbox_announced[0, 0] is announced 2 times in one launch, by rank 0; expected once"
)
def announced_twice(inbox, at):
    for peer in T.serial(2):
        W.announce(inbox[peer, W.rank(), 0, 0], at[peer])  # HERE
        W.announce(inbox[peer, W.rank(), 0, 0], at[peer])  # HERE


@refused(
    "T.copy reads inbox_announced[me, s, 0]: a circular wait: block 0 of rank 0 waits for itself; "
    "expected each block to write what others wait for before it reads what they write"
)
def announced_late(at: T.Tensor((2,), "int32"), Y: T.Tensor((2, 1, N), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        tile = T.alloc_shared((1, N), F32)
        me = W.rank()
        for s in T.serial(2):
            T.copy(inbox[me, s, 0, 0], tile)  # HERE
            T.copy(tile, Y[s, 0, 0])
        for peer in T.serial(2):
            W.announce(inbox[peer, me, 0, 0], 1)  # HERE
            T.copy(tile, inbox[peer, me, 0, 0])


@refused_announce("which depends on at[0], which is known only at run time; expected indices")
def announced_at_a_place_that_is_data(inbox, at):
    W.announce(inbox[at[0], W.rank(), 0, 0], 1)  # HERE


@refused_send("inbox[peer, W.rank(), at[0], 0], a ragged tensor; expected writes, each row once")
def added_to(inbox, tile, at):
    for peer in T.serial(2):
        T.atomic_add(inbox[peer, W.rank(), at[0], 0], tile)  # HERE


@refused_send(
    "a store writes inbox[0, W.rank(), at[j], j], and the number of elements that it stores "
    "depends on at[j], which is known only at run time; expected one row for all threads, columns"
)
def a_row_for_each_thread(inbox, tile, at):
    for j in T.Parallel(2):  # HERE
        inbox[0, W.rank(), at[j], j] = tile[0, j]


@refused("which accesses several segments at once; expected one segment at a time")
def several_segments(at: T.Tensor((2,), "int32"), Y: T.Tensor((2, N), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        for peer in T.serial(2):
            W.announce(inbox[peer, W.rank(), 0, 0], at[peer])
        for s, j in T.Parallel(2, N):  # HERE
            Y[s, j] = inbox[W.rank(), s, 0, j]


@refused_send("alloc_ragged: inbox, and W.signal synchronizes explicitly; expected a program whose")
def explicit_signal(inbox, tile, at):
    to_all(inbox, tile, at)
    flags = W.alloc_symmetric((1,), "uint32")
    W.signal(flags[1 - W.rank(), 0])  # HERE


@refused("alloc_ragged: inbox, and tileweave.verify=off; expected a program whose", verify="off")
def not_inferred():
    return sending(to_all)


@refused(
    "tileweave.granule=(1, 4) of inbox, a ragged tensor; expected (1, rows, 8)",
    granule={"inbox": [1, 4]},
)
def granule_without_rows():
    return sending(to_all)


@refused("tileweave.granule=(1, 2, 4) of inbox, a ragged", granule={"inbox": [1, 2, 4]})
def granule_that_cuts_a_row():
    return sending(to_all)


@refused(
    "tileweave.granule=(1, 3, 8) of inbox cuts the rows that it accesses; expected a multiple "
    "of 2 rows",
    granule={"inbox": [1, 3, 8]},
)
def granule_that_cuts_a_read(at: T.Tensor((2,), "int32"), Y: T.Tensor((2, 2, N), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        tile = T.alloc_shared((1, N), F32)
        two = T.alloc_shared((2, N), F32)
        T.clear(tile)
        for peer in T.serial(2):
            W.announce(inbox[peer, W.rank(), 0, 0], at[peer])
        to_all(inbox, tile, at)
        for s in T.serial(2):
            T.copy(inbox[W.rank(), s, 2, 0], two)  # HERE
            T.copy(two, Y[s, 0, 0])


@refused_send(
    "T.copy writes inbox[0, W.rank(), 0, at[0]], and the number of elements that it stores "
    "depends on at[0], which is known only at run time; expected one row for all threads, columns "
    "that are inside of the row for all data"
)
def columns_that_are_data(inbox, tile, at):
    T.copy(tile[0, 0:4], inbox[0, W.rank(), 0, at[0]])  # HERE


@refused_send("depends on at[0], which is known only at run time; expected one row for all threads")
def number_of_columns_that_is_data(inbox, tile, at):
    for j in T.Parallel(N):  # HERE
        if j < at[0]:
            inbox[0, W.rank(), 0, j] = tile[0, j]


@refused_send(
    "which stores 2 rows, and data decides whether all of them are below row 4, the capacity; "
    "expected a first row that is a multiple of 2"
)
def rows_past_the_end(inbox, tile, at):
    for i, j in T.Parallel(2, N):  # HERE
        inbox[0, W.rank(), at[0] + i, j] = tile[0, j]


@refused_send("which stores 3 to 5 elements in a segment; expected an equal number each time")
def uneven_parts_of_a_row(inbox, tile, at):
    for part in T.serial(2):
        for j in T.Parallel(5):  # HERE
            if part * 5 + j < N:
                inbox[0, W.rank(), at[0], part * 5 + j] = tile[0, part * 5 + j]


@refused_send(
    "a store writes inbox[peer, W.rank(), i, j], under T.tl_shuffle_elect(32), which differs "
    "between threads; expected conditions and loops that are the same for the whole block"
)
def by_elected_threads(inbox, tile, at):
    for peer in T.serial(2):
        for i in T.serial(at[peer]):
            if T.shuffle_elect(32):
                for j in T.serial(N):
                    inbox[peer, W.rank(), i, j] = tile[0, j]  # HERE


@refused_send("which differs between threads; expected conditions and loops that are the same")
def rows_by_thread(inbox, tile, at):
    for peer in T.serial(2):
        for i in T.serial(T.get_thread_binding()):
            for j in T.serial(N):
                inbox[peer, W.rank(), i, j] = tile[0, j]  # HERE


@refused(
    "inbox[0, 0, 2:4, 0:8] is read, but no rank writes it in this launch; expected a write of it"
)
def tile_that_no_rank_writes(at: T.Tensor((2,), "int32"), Y: T.Tensor((2, 2, N), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        tile = T.alloc_shared((1, N), F32)
        two = T.alloc_shared((2, N), F32)
        T.clear(tile)
        for peer in T.serial(2):
            W.announce(inbox[peer, W.rank(), 0, 0], 1)
            T.copy(tile, inbox[peer, W.rank(), 0, 0])
        for s in T.serial(2):
            T.copy(inbox[W.rank(), s, 2, 0], two)  # HERE
            T.copy(two, Y[s, 0, 0])


@refused(
    "T.copy writes inbox[1 - W.rank(), W.rank(), 0, 0]: rows of segment inbox[0, 1] may be "
    "written, but no rank announces it in this launch; expected W.announce for it, also of 0"
)
def written_without_an_announcement_or_a_read(X: T.Tensor((1, N), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        tile = T.alloc_shared((1, N), F32)
        T.copy(X, tile)
        T.copy(tile, inbox[1 - W.rank(), W.rank(), 0, 0])  # HERE
