"""Final wait of a launch: it ends when all data for this rank has arrived."""

from __future__ import annotations

from tvm import tirx

from ..regions.granules import Counter
from . import builtin_calls
from .context import SyncContext, by_rank


def place_drain(context: SyncContext) -> None:
    """Make the last block wait for data that no read is certain to wait for, so that the caller
    finds the tensor complete.

    After:  ``if block == blocks - 1: T.tileweave.wait_reached(C_complete[me, 0], epoch * n)``
    """
    for counter in context.counters:
        if counter.at_exit:
            _wait(context, counter, tirx.IntImm("int32", 0))
        elif counter.also_at_exit:
            _wait(context, counter, tirx.Var("granule", "int32"))


def _wait(context: SyncContext, counter: Counter, granule: tirx.PrimExpr) -> None:
    """Wait for one granule, or for each granule if ``granule`` is a variable."""
    rank, peer = context.symbols.rank_call, tirx.IntImm("int32", -1)
    arrivals = by_rank(rank, [int(n) for n in counter.arrivals[:, 0]])
    target = context.epochs_of(counter.accesses.tensor) * arrivals
    access = counter.accesses.in_kernel(counter.kind if counter.at_exit else "read")[-1].access
    flag = context.flag(counter, rank, rank, granule)
    stmt = builtin_calls.wait_reached(flag, target, peer, access)
    if isinstance(granule, tirx.Var):
        if counter.own:
            others = tirx.NE(tirx.floordiv(granule, counter.own), rank)
            stmt = tirx.IfThenElse(others, stmt, None)
        stmt = tirx.For(granule, 0, counter.granules.total, tirx.ForKind.SERIAL, stmt)
    last = tirx.EQ(context.block, context.grid - 1)
    context.placement.put_last(tirx.IfThenElse(last, stmt, None), access)
    context.record_counter_op(
        "wait", access, counter, "the last block: the launch ends when all has arrived", stmt,
        arrivals, granule="all",
    )  # fmt: skip
