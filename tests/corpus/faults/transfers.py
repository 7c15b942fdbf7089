"""One shift to the right neighbor by TMA stores, ``W.put_block`` and ``W.get_block``."""

from typing import Any

import tilelang.language as T

from tileweave import language as W

from .case import Flag, Mail, N, Row, State, advance, begin, case, datum, from_left


@case("race", "mail", label="store|read")
def bulk_store_only_read(faulty, mail: Mail, flags: Flag, state: State, out: Row):
    """`.read` frees the shared memory; a relaxed signal does not wait for the data to arrive."""
    sem = "relaxed" if faulty else "release"
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        tile = T.alloc_shared((N,), "int32")
        for i in T.Parallel(N):
            tile[i] = datum(epoch, me, i)
        W.bulk_store(mail[peer, 0], tile, N)  # FAULT store
        W.bulk_commit()
        W.bulk_wait(0, read=True)
        W.signal(flags[peer, 0], sem=sem)  # FAULT signal
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, i]  # FAULT read
        W.sync_ranks()
        advance(state, epoch)


@case("race", "mail")
def tile_store_and_relaxed_flag(faulty, mail: Mail, flags: Flag, state: State, out: Row):
    """A tile copy to a peer is a TMA store: only a release publishes it."""
    sem = "relaxed" if faulty else "release"
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        tile = T.alloc_shared((N,), "int32")
        for i in T.Parallel(N):
            tile[i] = datum(epoch, me, i)
        T.copy(tile, mail[peer, 0])  # FAULT
        T.sync_threads()
        if T.get_thread_binding() == 0:
            W.st(flags[peer, 0], epoch + 1, scope="sys", sem=sem)
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@case("race", "mail")
def put_block_and_relaxed_flag(faulty, mine: Row, mail: Mail, flags: Flag, state: State, out: Row):
    """`put_block` does not publish: the signal after it must."""
    sem = "relaxed" if faulty else "release"
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        for i in T.Parallel(N):
            mine[i] = datum(epoch, me, i)
        T.sync_threads()
        W.put_block(mine[0], mail[0, 0], N, peer)  # FAULT
        W.signal(flags[peer, 0], sem=sem)
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@case("race", "mine")
def put_block_before_the_block_barrier(
    faulty, mine: Row, mail: Mail, flags: Flag, state: State, out: Row
):
    """Threads write what other threads put, without a block barrier in between."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        for i in T.Parallel(N):
            mine[i] = datum(epoch, me, i)  # FAULT
        if not faulty:
            T.sync_threads()
        W.put_block(mine[0], mail[0, 0], N, peer)  # FAULT
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, i]
        W.sync_ranks()
        advance(state, epoch)


def reversed_from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": from_left(epoch, me, ranks)["out"][::-1]}


@case("race", "fetched", reversed_from_left)
def get_block_before_the_block_barrier(
    faulty, mine: Mail, flags: Flag, state: State, fetched: Row, out: Row
):
    """Threads read what other threads fetched, without a block barrier in between."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        for i in T.Parallel(N):
            mine[me, i] = datum(epoch, me, i)
        W.signal(flags[(me + 1) % W.world_size(), 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        W.get_block(mine[0, 0], fetched[0], N, left)  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            out[i] = fetched[N - 1 - i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@case("race", "mine")
def get_block_before_the_signal(faulty, mine: Mail, flags: Flag, state: State, out: Row):
    """The data of a peer is fetched before the peer signals that it is written."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        for i in T.Parallel(N):
            mine[me, i] = datum(epoch, me, i)  # FAULT
        W.signal(flags[(me + 1) % W.world_size(), 0])
        if not faulty:
            W.wait_reached(flags[me, 0], epoch + 1)
        W.get_block(mine[0, 0], out[0], N, left)  # FAULT
        if faulty:
            W.wait_reached(flags[me, 0], epoch + 1)
        W.sync_ranks()
        advance(state, epoch)
