"""TMA: proxy fences, and writes that are in flight after ``.read``. Only device functions show it.

The compiler inserts these fences and waits, so the faults are in edited device functions.
"""

import tilelang.language as T
from tvm import tirx

from tests.simulator.device.programs import dropped, edited, with_argument
from tileweave import language as W

from ..faults.case import Flag, Mail, N, Row, State, TwoMails, advance, begin, datum
from .case import specimen


def _read_wait(kernel):
    """Wait for TMA stores with ``.read`` only, and drop the full wait before a signal."""
    read = edited("tl.tma_store_wait", with_argument(1, tirx.const(True)))
    return dropped("tileweave.complete_bulk_stores")(read(kernel))


def _without_proxy_fences(kernel):
    """Drop the fences that TileWeave and TileLang insert between a wait and a TMA load."""
    return dropped("tl.fence_proxy_async")(dropped("tileweave.fence_proxy_async")(kernel))


@specimen(
    "HazyResearch/ThunderKittens#194",
    "GEMM + all-reduce signals after a wait with .read: the stored tile may be in flight.",
    "device",
    "race",
    "TMA store of parts",
    change=_read_wait,
)
def thunderkittens_194(faulty, parts: Mail, flags: Flag, state: State, out: Row):
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        tile = T.alloc_shared((N,), "int32")
        for i in T.Parallel(N):
            tile[i] = datum(epoch, me, i)
        T.copy(tile, parts[peer, 0])  # FAULT
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = parts[me, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@specimen(
    "MoonshotAI/FlashKDA#24",
    "Threads write shared memory that TMA stores, with a block barrier but no proxy fence.",
    "device",
    "race",
    "no fence.proxy.async is between",
    change=dropped("tl.fence_proxy_async"),
)
def flashkda_24(faulty):
    @T.prim_func
    def program(
        inbox: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            tile = T.alloc_shared((N,), "int32")
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                tile[i] = datum(epoch, me, i)  # FAULT
            if not faulty:
                W.fence_proxy_async()
            T.sync_threads()
            if T.get_thread_binding() == 0:
                W.bulk_store(inbox[peer, 0], tile, N)  # FAULT
                W.bulk_commit()
                W.bulk_wait(0)
            W.signal(flags[peer, 0])
            W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = inbox[me, i]
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@specimen(
    "deepseek-ai/DeepEP#632",
    "Combine polls a flag and loads the data by TMA, without a proxy fence in between.",
    "device",
    "race",
    "no fence.proxy.async is between",
    change=_without_proxy_fences,
)
def deepep_632(faulty, inbox: Mail, flags: Flag, state: State, out: Row):
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        tile = T.alloc_shared((N,), "int32")
        full = T.alloc_barrier(N)
        for i in T.Parallel(N):
            inbox[peer, i] = datum(epoch, me, i)  # FAULT
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        W.bulk_load(tile, inbox[me, 0], N, full[0])  # FAULT
        T.mbarrier_arrive(full[0])
        T.mbarrier_wait_parity(full[0], 0)
        for i in T.Parallel(N):
            out[i] = tile[i]
        W.sync_ranks()
        advance(state, epoch)


@specimen(
    "deepseek-ai/DeepEP#642",
    "A TMA load overwrites shared memory that threads have just read, without a proxy fence.",
    "missed",
    "",
    "",
)
def deepep_642(faulty, inbox: TwoMails, flags: Flag, state: State, out: Row):
    """The block barrier orders the reads first, and no level asks for a fence after reads."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        tile = T.alloc_shared((N,), "int32")
        full = T.alloc_barrier(N)
        for part in T.serial(2):
            for i in T.Parallel(N):
                inbox[peer, part, i] = datum(epoch, me, i)
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        for part in T.serial(2):
            W.bulk_load(tile, inbox[me, part, 0], N, full[0])
            T.mbarrier_arrive(full[0])
            T.mbarrier_wait_parity(full[0], part)
            for i in T.Parallel(N):
                out[i] = tile[i]
            if not faulty:
                W.fence_proxy_async()
            T.sync_threads()
        W.sync_ranks()
        advance(state, epoch)
