"""Ranks, blocks and elements that two sides count differently."""

from typing import Any

import numpy as np
import tilelang.language as T

from tileweave import language as W

from ..faults.case import (
    TILE,
    Flag,
    Mail,
    N,
    Row,
    State,
    TwoMails,
    TwoRows,
    TwoStates,
    advance,
    begin,
    datum,
    from_left,
    nothing,
)
from ..faults.counters import barrier_of_one_rank
from ..faults.memory import tail_not_written
from .case import specimen


@specimen(
    "ByteDance-Seed/Triton-distributed#79",
    "AG + GEMM assumes 8 ranks by default and hangs on two GPUs.",
    "refused",
    "deadlock",
    "which no rank signals",
)
def triton_distributed_79(
    faulty,
    rows: W.Symmetric((8, N), "int32"),
    flags: W.Symmetric((8,), "int32"),
    state: State,
    out: Row,
):
    ranks = 8 if faulty else 2
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        for peer in T.serial(W.world_size()):
            for i in T.Parallel(N):
                rows[peer, me, i] = datum(epoch, me, i)
            W.signal(flags[peer, me])
        for source in T.serial(ranks):
            W.wait_reached(flags[me, source], epoch + 1)  # FAULT
        for i in T.Parallel(N):
            out[i] = rows[me, left, i]
        W.sync_ranks()
        advance(state, epoch)


def two_rows_from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": np.tile(from_left(epoch, me, ranks)["out"], (2, 1))}


@specimen(
    "flashinfer-ai/flashinfer#3408",
    "Peers launch a fused all-reduce with different numbers of blocks and wait block by block.",
    "refused",
    "deadlock",
    "which no rank signals",
    two_rows_from_left,
)
def flashinfer_3408(
    faulty, rows: TwoMails, flags: W.Symmetric((2,), "int32"), state: TwoStates, out: TwoRows
):
    fewer = 1 if faulty else 0
    with T.Kernel(2, threads=N) as block:
        me, peer, epoch = begin(state, block)
        if block < 2 - fewer * me:
            for i in T.Parallel(N):
                rows[peer, block, i] = datum(epoch, me, i)
            W.signal(flags[peer, block])
            W.wait_reached(flags[me, block], epoch + 1)  # FAULT
            for i in T.Parallel(N):
                out[block, i] = rows[me, block, i]
        W.barrier_blocks()
        advance(state, epoch, block)


@specimen(
    "flashinfer-ai/flashinfer#3053",
    "The spin on Lamport words never ends when piecewise graphs are replayed.",
    "tile",
    "deadlock",
    "words",
)
def flashinfer_3053(faulty):
    """The issue shows the endless spin. Here one rank replays the buffer index of the capture."""
    frozen = 1 if faulty else 0

    @T.prim_func
    def program(
        words: W.Symmetric((2, N), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            tx = T.get_thread_binding()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            half = epoch % 2
            W.st(words[peer, half - half * frozen * me, tx], datum(epoch, me, tx) + 1, scope="sys")
            W.wait_ne(words[me, half, tx], 0, scope="sys")  # FAULT
            out[tx] = W.ld(words[me, half, tx], scope="sys") - 1
            W.sync_ranks()
            W.st(words[me, half, tx], 0, scope="sys")
            if tx == 0:
                state[0] = epoch + 1

    return program


@specimen(
    "lightseekorg/tokenspeed#351",
    "One-shot and two-shot calls count arrivals in one counter: a call finds those of another.",
    "refused",
    "race",
    "does not wait for what the writer signals after its write",
)
def tokenspeed_351_counter(
    faulty, parts: Mail, sums: Mail, arrived: W.Symmetric((2,), "int32"), state: State, out: Row
):
    """Even calls are one-shot, odd ones two-shot. Each protocol counts only its own calls."""
    shared = 0 if faulty else 1
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        shot = epoch % 2
        counter, calls = shot * shared, epoch // 2
        for i in T.Parallel(N):
            parts[peer, i] = datum(epoch, me, i)
        W.signal(arrived[peer, counter])  # FAULT
        W.wait_reached(arrived[me, counter], calls * (1 + shot) + 1)
        for i in T.Parallel(N):
            out[i] = parts[me, i]  # FAULT
        if shot == 1:
            for i in T.Parallel(N):
                sums[peer, i] = out[i]
            W.signal(arrived[peer, counter])
            W.wait_reached(arrived[me, counter], 2 * calls + 2)
            for i in T.Parallel(N):
                out[i] = sums[me, i]
        W.sync_ranks()
        advance(state, epoch)


def own_columns(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": np.arange(N)}


@specimen(
    "ROCm/iris#21",
    "Tiles of communication do not cover the columns that do not fill a tile of the GEMM.",
    "refused",
    "",
    "is read, but no rank writes it in this launch",
    own_columns,
)
def iris_21(faulty, mine: Row, out: Row):
    """All synchronization is inferred."""
    tiles = N // TILE if faulty else -(-N // TILE)
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        columns = W.alloc_symmetric((N,), "int32")
        tile = T.alloc_shared((TILE,), "int32")
        for i in T.Parallel(N):
            mine[i] = i
        T.sync_threads()
        for t in T.serial(tiles):
            T.copy(mine[t * TILE], tile)
            T.copy(tile, columns[(me + 1) % W.world_size(), t * TILE])
        for i in T.Parallel(N):  # FAULT
            out[i] = columns[me, i]


@specimen(
    "ROCm/iris#463",
    "Smaller blocks make more tiles than the array of locks has elements.",
    "refused",
    "bounds",
    "index 2 of axis 1 is outside of locks",
    nothing,
)
def iris_463(faulty, locks: W.Symmetric((2,), "int32"), state: State):
    tiles = 3 if faulty else 2
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        for tile in T.serial(tiles):
            W.signal(locks[(me + 1) % W.world_size(), tile])  # FAULT
        for tile in T.serial(tiles):
            W.wait_reached(locks[me, tile], epoch + 1)
        W.sync_ranks()
        advance(state, epoch)


def both_parts_from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    left = from_left(epoch, me, ranks)["out"]
    return {"out": np.stack([left, left + 10000])}


@specimen(
    "tile-ai/tilescale#35",
    "The last block to arrive counts with a release only, and publishes what other blocks wrote.",
    "refused",
    "race",
    "no signal follows it",
    both_parts_from_left,
)
def tilescale_35_counter(
    faulty, parts: TwoMails, flags: Flag, arrived: State, state: TwoStates, out: TwoRows
):
    sem = "release" if faulty else "acq_rel"
    with T.Kernel(2, threads=N) as block:
        me, peer, epoch = begin(state, block)
        for i in T.Parallel(N):
            parts[peer, block, i] = datum(epoch, me, i) + 10000 * block  # FAULT
        T.sync_threads()
        if T.get_thread_binding() == 0:
            if W.atom_add(arrived[0], 1, scope="gpu", sem=sem) == 2 * epoch + 1:
                W.st(flags[peer, 0], epoch + 1, scope="sys", sem="release")
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[block, i] = parts[me, block, i]  # FAULT
        W.barrier_blocks()
        advance(state, epoch, block)


specimen(
    "ROCm/iris#464",
    "Only some ranks reach a collective call, as the others have a workspace already.",
    "tile",
    "deadlock",
    "sync_ranks",
    nothing,
    name="iris_464",
)(barrier_of_one_rank)

# The issue names no cause. Here rows that do not fill a tile are not gathered.
specimen(
    "bytedance/flux#17",
    "AG + GEMM computes wrong results for some numbers of rows.",
    "tile",
    "poison",
    "mail|out",
    name="flux_17",
    start={"mail": None},
)(tail_not_written)
