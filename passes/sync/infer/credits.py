"""Tell the writers that a launch has started, or finished."""

from __future__ import annotations

from tvm import tirx

from . import builtin_calls
from .context import SyncContext


def place_credits(exchange: SyncContext) -> None:
    """The first block of a launch tells that it has started, the last one out that it finished. In
    a plan with copies the kernel before them tells that it has started.

    After:  ``if block == 0: for peer in ...: T.tileweave.signal(started[peer, me], 1)``
    """
    me, one = exchange.symbols.rank, tirx.const(1, "uint32")
    for name, (flags, pairs) in exchange.credit_flags.items():
        if name == "started" and exchange.is_called:
            continue
        told = [sum(1 << p for p, q in pairs if q == r) for r in range(exchange.world_size)]

        def signal(peer: tirx.PrimExpr, flags: tirx.Buffer = flags) -> tirx.Stmt:
            return builtin_calls.signal(tirx.BufferLoad(flags, [peer, me]), one)

        itself = [(r, r) for r in range(exchange.world_size)]
        tell = exchange.for_each_rank(signal, told, me, itself)
        if name == "finished":
            exchange.at_end.append(tell)
            reason = "the last block out tells the writers that this launch has finished"
        else:
            reason = "the first block tells the writers that this launch has started"
            first = tirx.EQ(exchange.block, 0)
            exchange.placement.head.append(tirx.IfThenElse(first, tell, None))
        exchange.note("signal", None, name, reason, tell, each="1", flag=flags.name)
