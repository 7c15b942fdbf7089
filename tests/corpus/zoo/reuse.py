"""Memory that is overwritten while it is still read, and data of an earlier launch."""

from typing import Any

import tilelang.language as T

from tileweave import language as W

from ..faults.case import Flag, Mail, N, Row, State, TwoMails, advance, begin, datum, from_left
from .case import specimen


@specimen(
    "ROCm/aiter#3514",
    "A one-stage all-reduce returns while peers may still read its input, which is then reused.",
    "refused",
    "reuse",
    "may still be reading in the launch before",
)
def aiter_3514(faulty, mine: Mail, start: Flag, state: State, out: Row):
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        for i in T.Parallel(N):
            mine[me, i] = datum(epoch, me, i)  # FAULT
        W.signal(start[(me + 1) % W.world_size(), 0])
        W.wait_reached(start[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mine[left, i]  # FAULT
        if not faulty:
            W.sync_ranks()
        T.sync_threads()
        advance(state, epoch)


@specimen(
    "lightseekorg/tokenspeed#1356",
    "A one-shot all-reduce stages every call in one slot, before it knows that peers have read it.",
    "refused",
    "reuse",
    "may still be reading in the launch before",
)
def tokenspeed_1356(faulty, staged: TwoMails, ready: Flag, state: State, out: Row):
    slots = 1 if faulty else 2
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        slot = epoch % slots
        for i in T.Parallel(N):
            staged[me, slot, i] = datum(epoch, me, i)  # FAULT
        W.signal(ready[(me + 1) % W.world_size(), 0])
        W.wait_reached(ready[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = staged[left, slot, i]  # FAULT
        T.sync_threads()
        advance(state, epoch)


@specimen(
    "ROCm/aiter#3928",
    "The awaited flag value is an argument that graph capture freezes: later replays do not wait.",
    "tile",
    "race",
    "inbox",
)
def aiter_3928(faulty, inbox: Mail, flags: Flag, state: State, out: Row):
    counted = 0 if faulty else 1
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        for i in T.Parallel(N):
            inbox[peer, i] = datum(epoch, me, i)  # FAULT
        W.signal(flags[peer, 0], epoch * counted + 1, op="set")
        W.wait_eq(flags[me, 0], epoch * counted + 1)
        for i in T.Parallel(N):
            out[i] = inbox[me, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@specimen(
    "ROCm/iris#465",
    "The lock value of an all-reduce is the constant 1: a lock of the last call looks ready.",
    "tile",
    "race",
    "tile",
)
def iris_465(faulty, tile: Mail, locks: Flag, state: State, out: Row):
    counted = 0 if faulty else 1
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        ready = T.alloc_var("int32")
        ready = epoch * counted + 1
        for i in T.Parallel(N):
            tile[me, i] = datum(epoch, me, i)  # FAULT
        T.sync_threads()
        if T.get_thread_binding() == 0:
            W.st(locks[me, 0], ready, scope="sys", sem="release")
        while W.ld(locks[left, 0], scope="sys", sem="acquire") != ready:
            pass
        for i in T.Parallel(N):
            out[i] = tile[left, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


def second_from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return from_left(1, me, ranks)


@specimen(
    "uccl-project/mKernel#18",
    "AG + GEMM reuses the tile of its output while the TMA store of the last output reads it.",
    "tile",
    "reuse race",
    "tile",
    second_from_left,
)
def mkernel_18(faulty, inbox: TwoMails, out: Row):
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        tile = T.alloc_shared((N,), "int32")
        for task in T.serial(2):
            for i in T.Parallel(N):
                tile[i] = datum(task, me, i)  # FAULT
            W.bulk_store(inbox[peer, task, 0], tile, N)
            W.bulk_commit()
            if not faulty:
                W.bulk_wait(0, read=True)
        W.sync_ranks()
        for i in T.Parallel(N):
            out[i] = inbox[me, 1, i]
        W.sync_ranks()


@specimen(
    "pytorch/pytorch#196546",
    "A rank zeroes its signal pad after peers may signal into it: a lost signal hangs the waiter.",
    "tile",
    "race deadlock reuse",
    "pad",
)
def pytorch_196546(faulty, inbox: Mail, pad: Flag, state: State, out: Row):
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        if T.get_thread_binding() == 0:
            pad[me, 0] = 0  # FAULT
        if not faulty:
            W.sync_ranks()
        for i in T.Parallel(N):
            inbox[peer, i] = datum(epoch, me, i)
        W.signal(pad[peer, 0])  # FAULT
        W.wait_reached(pad[me, 0], 1)
        for i in T.Parallel(N):
            out[i] = inbox[me, i]
        W.sync_ranks()
        advance(state, epoch)
