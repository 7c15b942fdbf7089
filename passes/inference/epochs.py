"""The number of the launch, in device memory, where a CUDA graph finds it too."""

from __future__ import annotations

from tvm import tirx

from ..walk import flatten
from . import builtin_calls
from .exchange import Exchange

EPOCH = "launches"


def count_epochs(exchange: Exchange) -> None:
    """Read the number at the start; the last block out advances it, and resets its own count.

    After:  ``epoch = T.tileweave.ld(launches[0]); ...;
    if thread == 0: if T.tileweave.atom_add(launches[1], 1) == blocks - 1: launches[0] = epoch + 1``
    """
    state = exchange.add_hidden(EPOCH, (2,), "uint32", symmetric=False)
    number, left = (tirx.BufferLoad(state, [tirx.IntImm("int32", i)]) for i in range(2))
    exchange.placement.head.insert(0, tirx.Bind(exchange.epoch, builtin_calls.load(number)))
    out = tirx.Var("finished", "uint32")
    blocks = tirx.Cast("uint32", exchange.grid)
    last = [
        builtin_calls.store(left, tirx.const(0, "uint32")),
        *exchange.at_end,
        builtin_calls.store(number, exchange.epoch + tirx.const(1, "uint32")),
    ]
    leave = [
        tirx.Bind(out, builtin_calls.atomic_add(left, 1)),
        tirx.IfThenElse(tirx.EQ(out, blocks - tirx.const(1, "uint32")), flatten(last), None),
    ]
    first: tirx.PrimExpr = tirx.IntImm("bool", 1)
    for thread in exchange.program.threads:
        first = tirx.And(first, tirx.EQ(thread.var, 0))
    exchange.placement.tail.append(tirx.IfThenElse(first, flatten(leave), None))
