"""Words that hold data and a flag, of 4 bytes each, in one atomic access of 8 bytes.

The accesses are relaxed, so they order no other memory. But a thread stores nothing that depends on
a word before its poll of that word has ended. So a store may replace a word if the polls of it have
led to the store, through other words and other ranks. ``polled`` in ``BlockOrder`` is the clock of
what led to the words that a block has polled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..report.errors import SimulationError
from .clock import Clock

if TYPE_CHECKING:
    from ..frontend.atomics import ThreadGroups, Word
    from ..machine.block import Frame
    from .memory import Access, Tensor

_FLAG_SHIFT = 32
_DATA_MASK = (1 << _FLAG_SHIFT) - 1


def flag_of(value: Any) -> int:
    """Return the flag in a word."""
    return int(value) >> _FLAG_SHIFT


def had_flag(tensor: Tensor, index: tuple, flag: int) -> bool:
    """Return whether a store gave a word this flag."""
    return any(flag_of(entry.value) == flag for entry in tensor.history(index)() or ())


def load_flagged(
    frame: Frame, word: Word, tensor: Tensor, index: tuple, thread_groups: ThreadGroups
) -> int:
    """Load a word whose flag a poll has seen; return its data."""
    order = frame.block.order
    ((value, _),) = word.load_all(frame, tensor, [index], thread_groups, newest=True)
    order.polled = joined(order.polled, tensor.newest(index).causes)
    flat = tensor.flat_index(index)
    tensor.polled.setdefault(flat, []).append(int(tensor.reads.last[index]))
    return int(value) & _DATA_MASK


def store_flagged(
    frame: Frame, word: Word, tensor: Tensor, index: tuple, thread_groups: ThreadGroups,
    data: int, flag: int,
) -> None:  # fmt: skip
    """Store data and a flag in a word.

    Raises:
        SimulationError: ``reuse`` if the word has this flag already, or if a poll of it has not led
            to this store, and may still read.
    """
    block = frame.block
    access = block.access(thread_groups, word.ref.op, word.ref.loc, word.level)
    causes = joined(block.causes(thread_groups), block.order.polled)
    before = tensor.newest(index)
    if not before.poisoned and flag_of(before.value) == flag:
        raise SimulationError(
            "reuse",
            f"{word.ref.op} stores flag {flag} in {tensor.element(index)}, by "
            f"{block.place}, and the word has this flag: a poll cannot "
            f"tell the new data from the old; expected another flag\n --> {word.ref.loc}",
        )
    _refuse_unread(tensor, index, access, causes)
    sync = {}
    tensor.store_words([index], [flag << _FLAG_SHIFT | data], access, sync, causes=causes)


def _refuse_unread(tensor: Tensor, index: tuple, access: Access, causes: Clock) -> None:
    """Refuse a store that nothing orders after a poll of the word."""
    events = tensor.memory.events
    for event in tensor.polled.pop(tensor.flat_index(index), ()):
        agent, time = int(events.agent[event]), int(events.time[event])
        if not causes.covers(agent, time) and not access.view.covers(agent, time):
            more = "\nnothing that the storing block has polled follows from this poll"
            raise tensor.memory.conflict("reuse", tensor, index, access, event, index, more)


def joined(clock: Clock, other: Clock | None) -> Clock:
    """Return the join of a clock and, if there is one, another."""
    return clock if other is None else clock.joined(other)
