"""The number of the launch, in device memory, where a CUDA graph finds it too."""

from __future__ import annotations

from tvm import tirx

from ..block_barrier import sync_threads
from ..elect_leader import first_thread
from ..walk import flatten
from . import builtin_calls
from .exchange import Exchange

EPOCH = "launches"

EQUIVALENT = {
    "ld scope=cta": "the launch before wrote it",
    "st scope=cta": "the next launch reads it",
    "atom_add write after": "no block reads it; the end of the launch publishes it",
    "complete_bulk_stores drop": "what the block stored is published by its signals, or by the end "
    "of the launch",
    "sync_threads drop": "the block has met since its threads read the epoch",
}
EQUIVALENT["complete_bulk_stores read=True"] = EQUIVALENT["complete_bulk_stores drop"]
"""Changes of these operations, as mutation tests name them, that may well change nothing, and why:
the words are stronger, and stand later, than this one use of them needs."""


def count_epochs(exchange: Exchange) -> None:
    """Launches are counted from 1. The last block out notes that one more has finished, and resets
    the count of blocks. In a plan with copies the kernel before them counts.

    After:  ``epoch = T.tileweave.ld(launches[0]) + 1; ...;
    if thread == 0: if T.tileweave.atom_add(launches[1], 1) == blocks - 1: launches[0] = epoch``;
    a launch of one block counts none
    """
    words = 1 if exchange.is_called else 2
    state = exchange.add_hidden(EPOCH, (words,), "uint32", symmetric=False)
    number, left = (tirx.BufferLoad(state, [tirx.IntImm("int32", i)]) for i in range(2))
    one = tirx.const(1, "uint32")
    if exchange.is_called:
        exchange.placement.head.insert(0, tirx.Bind(exchange.epoch, builtin_calls.load(number)))
        return
    epoch = tirx.Bind(exchange.epoch, builtin_calls.load(number) + one)
    exchange.placement.head.insert(0, epoch)
    first = first_thread([thread.var for thread in exchange.program.threads])
    done = [*exchange.at_end, builtin_calls.store(number, exchange.epoch)]
    if isinstance(exchange.grid, tirx.IntImm) and int(exchange.grid) == 1:
        exchange.placement.tail += [sync_threads(), tirx.IfThenElse(first, flatten(done), None)]
        return
    out = tirx.Var("finished", "uint32")
    blocks = tirx.Cast("uint32", exchange.grid)
    last = [builtin_calls.store(left, tirx.const(0, "uint32")), *done]
    leave = [
        tirx.Bind(out, builtin_calls.atomic_add(left, 1)),
        tirx.IfThenElse(tirx.EQ(out, blocks - one), flatten(last), None),
    ]
    exchange.placement.tail.append(tirx.IfThenElse(first, flatten(leave), None))
    exchange.note(
        "signal", None, EPOCH, "the block counts itself out; the last one counts the launch",
        leave[0], each="1", flag=state.name,
    )  # fmt: skip
