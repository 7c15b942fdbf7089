"""The number of the launch, in device memory, where a CUDA graph finds it too."""

from __future__ import annotations

from tvm import tirx

from ..walk import flatten
from . import builtin_calls
from .exchange import Exchange

EPOCH = "launches"


def count_epochs(exchange: Exchange) -> None:
    """Launches are counted from 1. The last block out notes that one more has finished, and resets
    the count of blocks. A third word is for plans: the number of their call.

    After:  ``epoch = T.tileweave.ld(launches[0]) + 1; ...;
    if thread == 0: if T.tileweave.atom_add(launches[1], 1) == blocks - 1: launches[0] = epoch``
    """
    state = exchange.add_hidden(EPOCH, (3,), "uint32", symmetric=False)
    number, left = (tirx.BufferLoad(state, [tirx.IntImm("int32", i)]) for i in range(2))
    one = tirx.const(1, "uint32")
    epoch = tirx.Bind(exchange.epoch, builtin_calls.load(number) + one)
    exchange.placement.head.insert(0, epoch)
    out = tirx.Var("finished", "uint32")
    blocks = tirx.Cast("uint32", exchange.grid)
    last = [
        builtin_calls.store(left, tirx.const(0, "uint32")),
        *exchange.at_end,
        builtin_calls.store(number, exchange.epoch),
    ]
    leave = [
        tirx.Bind(out, builtin_calls.atomic_add(left, 1)),
        tirx.IfThenElse(tirx.EQ(out, blocks - one), flatten(last), None),
    ]
    first: tirx.PrimExpr = tirx.IntImm("bool", 1)
    for thread in exchange.program.threads:
        first = tirx.And(first, tirx.EQ(thread.var, 0))
    exchange.placement.tail.append(tirx.IfThenElse(first, flatten(leave), None))
    exchange.note(
        "signal", None, EPOCH, "the block counts itself out; the last one counts the launch",
        leave[0], each="1", flag=state.name,
    )  # fmt: skip
