"""Signal to the writers that a launch has started or finished."""

from __future__ import annotations

from tvm import tirx

from . import builtin_calls
from .context import SyncContext


def place_credits(context: SyncContext) -> None:
    """Make the first block of a launch signal that it has started, and the last block that ends
    signal that it has finished. In a plan with copies, the entry barrier signals the start.

    After:  ``if block == 0: for peer in ...: T.tileweave.signal(started[peer, me], 1)``
    """
    me, one = context.symbols.rank_call, tirx.const(1, "uint32")
    for name, (flags, pairs) in context.credit_flags.items():
        if name == "started" and context.has_copies:
            continue
        writers = [sum(1 << p for p, q in pairs if q == r) for r in range(context.world_size)]

        def signal(peer: tirx.PrimExpr, flags: tirx.Buffer = flags) -> tirx.Stmt:
            return builtin_calls.signal(tirx.BufferLoad(flags, [peer, me]), one)

        ranks = [(r, r) for r in range(context.world_size)]
        signals = context.for_each_rank(signal, writers, me, ranks)
        if name == "finished":
            context.at_end.append(signals)
            reason = "the last block signals to the writers that this launch has finished"
        else:
            reason = "the first block signals to the writers that this launch has started"
            first = tirx.EQ(context.block, 0)
            context.placement.head.append(tirx.IfThenElse(first, signals, None))
        context.record("signal", None, name, reason, signals, amount="1", flag=flags.name)
