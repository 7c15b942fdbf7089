"""The number of the launch, in device memory, where a CUDA graph finds it too."""

from __future__ import annotations

from tvm import tirx

from ...ir.block_barrier import sync_threads
from ...ir.walk import flatten
from ...tile.elect_leader import first_thread, this_thread
from . import builtin_calls
from .context import SyncContext

EPOCH = "launches"
CALL = 2
"""The first of its words that hold the number of a plan's call."""


def count_epochs(exchange: SyncContext) -> None:
    """Launches are counted from 1, by the last block that begins, or, if something is left for it
    to do, by the last one out.

    An atomic at the end of a block waits for all it has stored, a microsecond in which the next
    block cannot start. At the beginning it costs nothing: the last thread does it, which waits for
    the first tiles in any case. Behind them is the number of a plan's call, as many times as a copy
    announces granules at once.

    After:  ``epoch = T.tileweave.ld(launches[0]) + 1;
    if thread == last: if T.tileweave.atom_add(launches[1], 1) == blocks - 1: launches[0] = epoch;
    ...``; a launch of one block counts no blocks
    """
    words = CALL + exchange.told_at_once if exchange.is_called else CALL
    state = exchange.add_hidden(EPOCH, (words,), "uint32", symmetric=False)
    number, count = (tirx.BufferLoad(state, [tirx.IntImm("int32", i)]) for i in range(2))
    one = tirx.const(1, "uint32")
    epoch = tirx.Bind(exchange.epoch, builtin_calls.load(number) + one)
    exchange.placement.head.insert(0, epoch)
    done = [*exchange.at_end, builtin_calls.store(number, exchange.epoch)]
    alone = isinstance(exchange.grid, tirx.IntImm) and int(exchange.grid) == 1
    if not alone:
        out = tirx.Var("counted", "uint32")
        last = [builtin_calls.store(count, tirx.const(0, "uint32")), *done]
        is_last = tirx.EQ(out, tirx.Cast("uint32", exchange.grid) - one)
        bind = tirx.Bind(out, builtin_calls.atomic_add(count, 1))
        done = [bind, tirx.IfThenElse(is_last, flatten(last), None)]
        exchange.note(
            "signal", None, EPOCH, "the block counts itself; the last one counts the launch", bind,
            each="1", flag=state.name,
        )  # fmt: skip
    threads = exchange.program.threads
    axes = [thread.var for thread in threads]
    barrier = [sync_threads()] if alone else []
    if exchange.at_end:
        chosen = first_thread(axes)
        exchange.placement.tail += [*barrier, tirx.IfThenElse(chosen, flatten(done), None)]
    else:
        chosen = this_thread(axes, [thread.extent - 1 for thread in threads])
        exchange.placement.head[1:1] = [*barrier, tirx.IfThenElse(chosen, flatten(done), None)]
