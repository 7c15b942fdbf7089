"""Memory that is overwritten while it is still read, and data of an earlier launch."""

from typing import Any

import tilelang.language as T

from tileweave import language as W

from ..faults.case import N, datum, from_left
from .case import specimen


@specimen(
    "ROCm/aiter#3514",
    "A one-stage all-reduce returns while peers may still read its input, which is then reused.",
    "refused",
    "reuse",
    "may still be reading in the launch before",
)
def aiter_3514(
    faulty,
    mine: W.Symmetric((N,), "int32"),
    start: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        left = (me + W.world_size() - 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        for i in T.Parallel(N):
            mine[me, i] = datum(epoch, me, i)  # FAULT
        W.signal(start[(me + 1) % W.world_size(), 0])
        W.wait_reached(start[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mine[left, i]  # FAULT
        if not faulty:
            W.sync_ranks()
        T.sync_threads()
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


@specimen(
    "lightseekorg/tokenspeed#1356",
    "A one-shot all-reduce stages every call in one slot, before it knows that peers have read it.",
    "refused",
    "reuse",
    "may still be reading in the launch before",
)
def tokenspeed_1356(
    faulty,
    staged: W.Symmetric((2, N), "int32"),
    ready: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    slots = 1 if faulty else 2
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        left = (me + W.world_size() - 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        slot = epoch % slots
        for i in T.Parallel(N):
            staged[me, slot, i] = datum(epoch, me, i)  # FAULT
        W.signal(ready[(me + 1) % W.world_size(), 0])
        W.wait_reached(ready[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = staged[left, slot, i]  # FAULT
        T.sync_threads()
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


@specimen(
    "ROCm/aiter#3928",
    "The awaited flag value is an argument that graph capture freezes: later replays do not wait.",
    "tile",
    "race",
    "inbox",
)
def aiter_3928(
    faulty,
    inbox: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    advance = 0 if faulty else 1
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        for i in T.Parallel(N):
            inbox[peer, i] = datum(epoch, me, i)  # FAULT
        W.signal(flags[peer, 0], epoch * advance + 1, op="set")
        W.wait_eq(flags[me, 0], epoch * advance + 1)
        for i in T.Parallel(N):
            out[i] = inbox[me, i]  # FAULT
        W.sync_ranks()
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


@specimen(
    "ROCm/iris#465",
    "The lock value of an all-reduce is the constant 1: a lock of the last call looks ready.",
    "tile",
    "race",
    "tile",
)
def iris_465(
    faulty,
    tile: W.Symmetric((N,), "int32"),
    locks: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    advance = 0 if faulty else 1
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        left = (me + W.world_size() - 1) % W.world_size()
        ready = T.alloc_var("int32")
        epoch = T.alloc_var("int32")
        epoch = state[0]
        ready = epoch * advance + 1
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
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


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
def mkernel_18(faulty, inbox: W.Symmetric((2, N), "int32"), out: T.Tensor((N,), "int32")):
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
def pytorch_196546(
    faulty,
    inbox: W.Symmetric((N,), "int32"),
    pad: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
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
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1
