"""Checks that signals and waits agree: excess and missing arrivals, signals without a wait.

They use the history of each word: its changes, and the waits for it that have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ...builtins.signals import signal
from ...builtins.spec import declaration_of
from ..report.errors import SimulationError
from .history import Change, EndedWait
from .memory import Memory, Tensor

_COUNTS = ("eq", "ge", "gt", "reached")
"""Relations of waits for a number of arrivals."""
_SIGNALS = (declaration_of(signal).text, "p.write_value", "p.copy_value")
"""Operations whose only purpose is to end a wait."""


def refuse_surplus(tensors: Mapping[str, list[Tensor]]) -> None:
    """Refuse counters with more arrivals than are waited for, if the excess grows with each launch.

    A constant excess is a credit, which a later launch consumes. A counter is a word that only
    additions change. A wait that the initial value satisfies waits for no arrival. Ranks draw the
    tickets of a lock or semaphore in any order, so its targets do not follow the launches. Such a
    counter is not checked: an early launch waits for arrivals of later ones, or each arrival has
    its own target.

    Raises:
        SimulationError: ``arrival``, with the numbers by launch.
    """
    for tensor in _each(tensors):
        for flat, waits in tensor.waits.items():
            counts = _growing(tensor, tensor.changes.get(flat, []), waits)
            if counts:
                raise _surplus(tensor, flat, counts)


def _growing(
    tensor: Tensor, changes: list[Change], waits: list[EndedWait]
) -> dict[int, tuple[int, int]]:
    """Return, for each launch that waited, the arrivals and the largest target so far.

    The result is empty if the difference does not grow in each launch, or if the counter counts
    tickets.
    """
    if not changes or not _only_grows(tensor, changes):
        return {}
    memory, start = tensor.memory, changes[0].before
    targets: dict[int, set[int]] = {}
    for wait in waits:
        if wait.relation in _COUNTS:
            target = _difference(tensor, wait.want, start) + (wait.relation == "gt")
            targets.setdefault(memory.epoch_of(wait.event), set()).add(target)
    counts, unclaimed, before = {}, [], set()
    for epoch in sorted(targets):
        before |= targets[epoch]
        if max(targets[epoch]) > 0:
            earlier = [c for c in changes if memory.epoch_of(c.event) <= epoch]
            arrived = sum(_difference(tensor, c.after, c.before) for c in earlier)
            counts[epoch] = arrived, max(before)
            unclaimed.append(arrived - len(before))
    excess = [arrived - target for arrived, target in counts.values()]
    grows = len(excess) > 1 and excess[0] > 0
    grows = grows and all(a < b for e in (excess, unclaimed) for a, b in pairwise(e))
    return counts if grows else {}


def _surplus(tensor: Tensor, flat: int, counts: dict[int, tuple[int, int]]) -> SimulationError:
    lines = [
        f"  up to launch {epoch}: {arrived} arrivals, {target} waited for, {arrived - target} over"
        for epoch, (arrived, target) in counts.items()
    ]
    memory = tensor.memory
    signalled = _last_by_loc(memory, [c.event for c in tensor.changes[flat]])
    waited = _last_by_loc(memory, [w.event for w in tensor.waits[flat]])
    return SimulationError(
        "arrival",
        event=tensor.changes[flat][-1].event,
        report="\n".join([
            f"{_name(tensor, flat)} receives more arrivals than are waited for, "
            "and the excess grows",
            *lines,
            "signalled by:", *(f"  {text}" for text in signalled),
            "waited for by:", *(f"  {text}" for text in waited),
        ]),
    )  # fmt: skip


def has_reached(tensor: Tensor, seen: Any, expected: Any) -> bool:
    """Return whether a word has reached ``expected``, modulo wrap-around."""
    return _difference(tensor, seen, expected) >= 0


def is_passed(tensor: Tensor, index: tuple, relation: str, expected: Any) -> bool:
    """Return whether a counter has passed the only value that a wait accepts."""
    changes = tensor.changes.get(_flat(tensor, index), [])
    if relation != "eq" or not changes or not _only_grows(tensor, changes):
        return False
    return _difference(tensor, changes[-1].after, expected) > 0


def story(
    tensor: Tensor, index: tuple, relation: str, expected: Any, lines: Mapping[str, str]
) -> str:
    """Explain a wait that does not end: distance to ``expected``, past signals, possible signals.

    Args:
        lines: operations of the program that signal this tensor, by line.
    """
    memory, flat = tensor.memory, _flat(tensor, index)
    seen = tensor.newest(index).value
    missing = _difference(tensor, expected, seen) + (relation == "gt") if relation in _COUNTS else 0
    parts = []
    if missing:
        amount = abs(missing)
        parts.append(f"{amount} missing" if missing > 0 else f"passed by {amount}: it has {amount} "
                     "too many and never returns to this value")  # fmt: skip
    for late, earlier in tensor.overtakings(index):
        parts.append(f"lost: {memory.describe(late)}")
        parts.append(f"  landed before {memory.describe(earlier)}: nothing orders the two")
    for loc, op in lines.items():
        events = _events_at(memory, tensor.changes.get(flat, []), loc)
        other = [
            event
            for other, changes in tensor.changes.items()
            if other != flat
            for event in _events_at(memory, changes, loc)
        ]
        role = "signalled by" if missing < 0 else "could signal it"
        text = f"{role}: {op} --> {loc}, so far {_times(events)}"
        if events:
            text += f", last by {_doer(memory, events[-1])}"
        if other:
            last = memory.describe(max(other)).split(" of ", 1)[1].split(" --> ")[0]
            text += f"; other words of {tensor.name} {_times(other)}, last {last}"
        parts.append(text)
    if not lines:
        parts.append(f"could signal it: no line of the program signals {tensor.name}")
    return "\n".join(f"    {part}" for part in parts)


def unconsumed(tensors: Mapping[str, list[Tensor]]) -> dict[tuple, str]:
    """Return the warnings for signals of the program to words that are never waited for or read, by
    tensor and line."""
    words_of: dict[tuple[str, str, str], list[str]] = {}
    for tensor in _each(tensors):
        if tensor.inserted:  # data may decide that no read needs what a signal announces
            continue
        signals = {
            flat: locs
            for flat, changes in tensor.changes.items()
            if flat not in tensor.waits
            and (locs := _events_at(tensor.memory, changes, ops=_SIGNALS))
        }  # fmt: skip
        if not signals:
            continue
        read, what = _read(tensor), tensor.memory.events.what
        for flat, events in signals.items():
            if not read.flat[flat]:
                for op, loc in {(what[e][0].split(" ")[0], what[e][1]) for e in events}:
                    words_of.setdefault((tensor.name, op, loc), []).append(_name(tensor, flat))
    return {
        (name, loc): f"{_some(names)} signalled, but never waited for or read: {op} --> {loc}"
        for (name, op, loc), names in words_of.items()
    }


def _read(tensor: Tensor) -> np.ndarray:
    """Return a mask of the elements that were read. An atomic operation that returns the old value
    reads it."""
    read = np.zeros(tensor.shape, np.bool_)
    for op, _, accessed, key, _, writes in tensor.memory.events.what:
        if accessed is tensor and (not writes or op.startswith("W.atom_")):
            read[key] = True
    return read


def _each(tensors: Mapping[str, list[Tensor]]) -> Iterator[Tensor]:
    """Iterate over the distinct tensors of all ranks."""
    for of_ranks in tensors.values():
        yield from dict.fromkeys(of_ranks)


def _only_grows(tensor: Tensor, changes: list[Change]) -> bool:
    return all(c.adds and _difference(tensor, c.after, c.before) > 0 for c in changes)


def _difference(tensor: Tensor, a: Any, b: Any) -> int:
    """Return ``a - b`` of two words, signed, modulo wrap-around."""
    half = 1 << (tensor.dtype.itemsize * 8 - 1)
    return (int(a) - int(b) + half) % (2 * half) - half


def _events_at(
    memory: Memory, changes: list[Change], loc: str = "", ops: tuple[str, ...] = ()
) -> list[int]:
    """Return the events of these changes, filtered by line and by operation."""
    what = memory.events.what
    return [
        c.event
        for c in changes
        if (not loc or what[c.event][1] == loc) and (not ops or what[c.event][0].startswith(ops))
    ]


def _last_by_loc(memory: Memory, events: list[int]) -> list[str]:
    """Return a text for each line of the program: the number of events, and the last one."""
    by_loc: dict[str, list[int]] = {}
    for event in events:
        by_loc.setdefault(memory.events.what[event][1], []).append(event)
    return [
        f"{memory.events.what[line_events[0]][0]} --> {loc}, {_times(line_events)}, "
        f"last by {_doer(memory, line_events[-1])}"
        for loc, line_events in by_loc.items()
    ]


def _doer(memory: Memory, event: int) -> str:
    return f"{memory.place(int(memory.events.agent[event]))} in launch {memory.epoch_of(event)}"


def _times(events: list[int]) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(len(events), f"{len(events)} times")


def _some(names: list[str]) -> str:
    return (
        f"{names[0]} is" if len(names) == 1 else f"each of {len(names)} words ({names[0]}, ..) is"
    )


def _name(tensor: Tensor, flat: int) -> str:
    index = np.unravel_index(flat, tensor.shape)
    return f"{tensor.name}[{', '.join(str(int(i)) for i in index)}]"


def _flat(tensor: Tensor, index: tuple) -> int:
    return int(np.ravel_multi_index(index, tensor.shape))
