"""Launch number (epoch), stored in device memory, so that a replayed CUDA graph counts, too."""

from __future__ import annotations

from tvm import tirx

from ...ir.block_barrier import sync_threads
from ...ir.guards import first_thread, this_thread
from ...ir.walk import flatten
from . import builtin_calls
from .context import SyncContext

EPOCH = "launches"
CALL = 2
"""Index of the first word that holds the number of a plan's call."""


def count_epochs(context: SyncContext) -> None:
    """Count launches from 1. The last block that begins increments the count, or the last block
    that ends if the launch has work for it.

    An atomic at the end of a block waits for all stores of the block: one microsecond in which the
    next block cannot start. An atomic at the beginning costs nothing: the last thread executes it,
    which has to wait for the first tiles anyway. The words after the two counts hold the number of
    a plan's call, one word for each flag that a copy sets at once.

    After:  ``epoch = T.tileweave.ld(launches[0]) + 1;
    if thread == last: if T.tileweave.atom_add(launches[1], 1) == blocks - 1: launches[0] = epoch;
    ...``; a launch of one block counts no blocks
    """
    num_words = CALL + context.flags_per_copy if context.has_copies else CALL
    state = context.add_implicit(EPOCH, (num_words,), "uint32", symmetric=False)
    number, count = (tirx.BufferLoad(state, [tirx.IntImm("int32", i)]) for i in range(2))
    one = tirx.const(1, "uint32")
    epoch = tirx.Bind(context.epoch, builtin_calls.load(number) + one)
    context.placement.head.insert(0, epoch)
    counting = [*context.at_end, builtin_calls.store(number, context.epoch)]
    is_single = isinstance(context.grid, tirx.IntImm) and int(context.grid) == 1
    if not is_single:
        counted = tirx.Var("counted", "uint32")
        last = [builtin_calls.store(count, tirx.const(0, "uint32")), *counting]
        is_last = tirx.EQ(counted, tirx.Cast("uint32", context.grid) - one)
        bind = tirx.Bind(counted, builtin_calls.atomic_add(count, 1))
        counting = [bind, tirx.IfThenElse(is_last, flatten(last), None)]
        context.record(
            "signal", None, EPOCH, "the block counts itself; the last one counts the launch", bind,
            amount="1", flag=state.name,
        )  # fmt: skip
    threads = context.program.threads
    axes = [thread.var for thread in threads]
    barrier = [sync_threads()] if is_single else []
    if context.at_end:
        chosen = first_thread(axes)
        context.placement.tail += [*barrier, tirx.IfThenElse(chosen, flatten(counting), None)]
    else:
        chosen = this_thread(axes, [thread.extent - 1 for thread in threads])
        context.placement.head[1:1] = [*barrier, tirx.IfThenElse(chosen, flatten(counting), None)]
