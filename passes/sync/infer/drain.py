"""A launch ends when all that others bring to this rank is there."""

from __future__ import annotations

from tvm import tirx

from ..regions.granules import Counter
from . import builtin_calls
from .context import SyncContext, by_rank


def place_exits(exchange: SyncContext) -> None:
    """Let the last block wait for what no read surely waits for, so that the caller finds it
    complete.

    After:  ``if block == blocks - 1: T.tileweave.wait_reached(C_complete[me, 0], epoch * n)``
    """
    for counter in exchange.counters:
        if counter.at_exit:
            _wait(exchange, counter, tirx.IntImm("int32", 0))
        elif counter.also_at_exit:
            _wait(exchange, counter, tirx.Var("granule", "int32"))


def _wait(exchange: SyncContext, counter: Counter, granule: tirx.PrimExpr) -> None:
    """For one granule, or for each, if it is a variable."""
    rank, peer = exchange.symbols.rank, tirx.IntImm("int32", -1)
    arrivals = by_rank(rank, [int(n) for n in counter.arrivals[:, 0]])
    target = exchange.epochs_of(counter.traffic.tensor) * arrivals
    access = counter.traffic.in_kernel(counter.kind if counter.at_exit else "read")[-1].access
    flag = exchange.flag(counter, rank, rank, granule)
    stmt = builtin_calls.wait_reached(flag, target, peer, access)
    if isinstance(granule, tirx.Var):
        if counter.own:
            others = tirx.NE(tirx.floordiv(granule, counter.own), rank)
            stmt = tirx.IfThenElse(others, stmt, None)
        stmt = tirx.For(granule, 0, counter.granules.total, tirx.ForKind.SERIAL, stmt)
    last = tirx.EQ(exchange.block, exchange.grid - 1)
    exchange.placement.put_last(tirx.IfThenElse(last, stmt, None), access)
    exchange.note_of(
        "wait", access, counter, "the last block: the launch ends when all has arrived", stmt,
        arrivals, granule="all",
    )  # fmt: skip
