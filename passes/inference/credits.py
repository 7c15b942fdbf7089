"""Tell the writers that a launch has started, or finished."""

from __future__ import annotations

from tvm import tirx

from . import builtin_calls
from .exchange import Exchange
from .waits import by_rank


def place_credits(exchange: Exchange) -> None:
    """The first block of a launch tells that it has started, the last one out that it finished.

    After:  ``if block == 0: for peer in ...: T.tileweave.signal(started[peer, me], 1)``
    """
    for name, (flags, pairs) in exchange.credit_flags.items():
        told = [sum(1 << p for p, q in pairs if q == r) for r in range(exchange.world_size)]
        tell = exchange.for_each_rank(lambda peer, f=flags, t=told: _tell(exchange, f, t, peer))
        if name == "finished":
            exchange.at_end.append(tell)
            reason = "the last block out tells the writers that this launch has finished"
        else:
            reason = "the first block tells the writers that this launch has started"
            first = tirx.EQ(exchange.block, 0)
            exchange.placement.head.append(tirx.IfThenElse(first, tell, None))
        exchange.note("signal", None, name, reason, tell, each="1", flag=flags.name)


def _tell(exchange: Exchange, flags: tirx.Buffer, told: list[int], peer) -> tirx.Stmt:
    me = exchange.symbols.rank
    one = tirx.const(1, "uint32")
    signal = builtin_calls.signal(tirx.BufferLoad(flags, [peer, me]), one)
    everyone = (1 << exchange.world_size) - 1
    if all(bits | 1 << rank == everyone for rank, bits in enumerate(told)):
        return signal
    bits = by_rank(me, told)
    waits = tirx.bitwise_and(tirx.shift_right(bits, tirx.Cast("uint32", peer)), one)
    return tirx.IfThenElse(tirx.NE(waits, tirx.const(0, "uint32")), signal, None)
