"""Several blocks of a rank."""

from typing import Any

import numpy as np
import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import (
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
    case,
    datum,
    with_fault,
)

BLOCKS = 3


def sum_of_parts(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": sum(datum(0, part, np.arange(N)) for part in range(BLOCKS))}


@factory
def last_arriver(
    parts: T.Tensor((BLOCKS, N), "int32"), arrived: State, out: Row, *, sem="acq_rel", scope="gpu"
):
    """The last block to arrive adds the parts of all blocks."""
    with T.Kernel(BLOCKS, threads=N) as block:
        ticket = T.alloc_shared((1,), "int32")
        for i in T.Parallel(N):
            parts[block, i] = datum(0, block, i)  # FAULT data
        if T.get_thread_binding() == 0:
            ticket[0] = W.atom_add(arrived[0], 1, sem=sem, scope=scope)  # FAULT count
        T.sync_threads()
        if ticket[0] % BLOCKS == BLOCKS - 1:
            for i in T.Parallel(N):
                out[i] = parts[0, i] + parts[1, i] + parts[2, i]  # FAULT data


alone = {"ranks": 1, "expected": sum_of_parts}
with_fault(
    last_arriver, "last_arriver_only_releases", "race", "parts", "data", **alone, sem="release"
)
with_fault(
    last_arriver, "last_arriver_only_acquires", "race", "parts", "data", **alone, sem="acquire"
)
with_fault(last_arriver, "last_arriver_relaxed", "race", "parts", "data", **alone, sem="relaxed")
with_fault(
    last_arriver, "last_arriver_at_block_scope", "race", "arrived", "count", **alone, scope="cta"
)


def both_parts_from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    left = (me - 1) % ranks
    return {"out": np.stack([datum(epoch, left, np.arange(N)) + 10000 * b for b in range(2)])}


@case("race", "mail", both_parts_from_left)
def wait_by_some_blocks(faulty, mail: TwoMails, flags: Flag, state: TwoStates, out: TwoRows):
    """Block 1 reads what only block 0 has waited for."""
    waiting = 1 if faulty else 2
    with T.Kernel(2, threads=N) as block:
        me, peer, epoch = begin(state, block)
        for i in T.Parallel(N):
            mail[peer, block, i] = datum(epoch, me, i) + 10000 * block  # FAULT
        W.signal(flags[peer, 0])
        if block < waiting:
            W.wait_reached(flags[me, 0], epoch * 2 + 2)
        for i in T.Parallel(N):
            out[block, i] = mail[me, block, i]  # FAULT
        W.barrier_blocks()
        advance(state, epoch, block)


@factory
def barrier_between(
    mail: TwoMails, state: TwoStates, out: TwoRows, *, kind="barrier_blocks", only_block_0=False
):
    """Each block writes its part at the peer, the barrier, each reads its own."""
    with T.Kernel(2, threads=N) as block:
        me, peer, epoch = begin(state, block)
        for i in T.Parallel(N):
            mail[peer, block, i] = datum(epoch, me, i) + 10000 * block  # FAULT data
        if only_block_0:
            if block == 0:
                W.sync_ranks()
        else:
            getattr(W, kind)()
        for i in T.Parallel(N):
            out[block, i] = mail[me, block, i]  # FAULT data
        W.barrier_blocks()
        advance(state, epoch, block)


with_fault(
    barrier_between,
    "barrier_of_the_grid_across_ranks",
    "race",
    "mail",
    "data",
    expected=both_parts_from_left,
    kind="sync_grid",
)
with_fault(
    barrier_between,
    "barrier_of_ranks_by_one_block",
    "race",
    "mail",
    "data",
    expected=both_parts_from_left,
    only_block_0=True,
)


@case("deadlock", "flags", both_parts_from_left)
def waiting_blocks_fill_the_gpu(
    faulty,
    mail: W.Symmetric((2, 2, N), "int32"),
    flags: Flag,
    state: T.Tensor((6,), "int32"),
    out: TwoRows,
):
    """Four blocks are resident; they wait for blocks that are later in launch order."""
    first_sender = 4 if faulty else 0
    first_reader = 0 if faulty else 2
    with T.Kernel(6, threads=N) as block:
        me, peer, epoch = begin(state, block)
        half = epoch % 2
        part = block % 2
        if block >= first_sender and block < first_sender + 2:
            for i in T.Parallel(N):
                mail[peer, half, part, i] = datum(epoch, me, i) + 10000 * part
            W.signal(flags[peer, 0])
        else:
            W.wait_reached(flags[me, 0], epoch * 2 + 2)  # FAULT
            if block < first_reader + 2:
                for i in T.Parallel(N):
                    out[part, i] = mail[me, half, part, i]
        T.sync_threads()
        advance(state, epoch, block)


@case("race", "mail")
def tail_not_counted(faulty, mail: Mail, flags: Flag, state: TwoStates, out: Row):
    """The reader waits for full tiles only; the clipped last tile may arrive later."""
    counted = N // TILE * TILE if faulty else N
    with T.Kernel(2, threads=N) as block:
        me, peer, epoch = begin(state, block)
        for i in T.Parallel(TILE):
            if block * TILE + i < N:
                mail[peer, block * TILE + i] = datum(epoch, me, block * TILE + i)  # FAULT
        W.signal(flags[peer, 0], T.min(TILE, N - block * TILE))
        if block == 0:
            W.wait_reached(flags[me, 0], epoch * N + counted)
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT
        W.barrier_blocks()
        advance(state, epoch, block)
