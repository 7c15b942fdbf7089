"""A launch ends when all that others bring to this rank is there."""

from __future__ import annotations

from tvm import tirx

from . import builtin_calls
from .exchange import Exchange, by_rank


def place_exits(exchange: Exchange) -> None:
    """Let the last block wait for what no read waits for, so that the caller finds it complete.

    After:  ``if block == blocks - 1: T.tileweave.wait_reached(C_complete[me, 0], epoch * n)``
    """
    for counter in exchange.counters:
        if not counter.at_exit:
            continue
        rank, zero = exchange.symbols.rank, tirx.IntImm("int32", 0)
        arrivals = by_rank(rank, [int(n) for n in counter.arrivals[:, 0]])
        target = exchange.epochs_of(counter.traffic.tensor) * arrivals
        access = counter.traffic.in_kernel(counter.kind)[-1].access
        wait = builtin_calls.wait_reached(
            exchange.flag(counter, rank, rank, zero), target, tirx.IntImm("int32", -1), access
        )
        last = tirx.EQ(exchange.block, exchange.grid - 1)
        exchange.placement.put_last(tirx.IfThenElse(last, wait, None), access)
        exchange.note_of(
            "wait", access, counter, "the last block: the launch ends when all has arrived", wait,
            arrivals, granule="all",
        )  # fmt: skip
