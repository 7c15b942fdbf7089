"""Whether signals and waits agree: arrivals too many or too few, signals that nobody waits for.

All of it is read off the history of the words: what changed them, and what was waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ...builtins.signals import signal
from ...builtins.spec import declaration_of
from ..report.errors import SimulationError
from .memory import Awaited, Change, Memory, Tensor

_COUNTS = ("eq", "ge", "gt", "reached")
"""Relations that wait for a number of arrivals."""
_SIGNALS = (declaration_of(signal).text, "p.write_value", "p.copy_value")
"""Operations that have no use but to be waited for."""


def refuse_surplus(tensors: Mapping[str, list[Tensor]]) -> None:
    """Refuse counters whose excess over what is waited for grows from launch to launch.

    A constant excess is a credit, which a later launch uses up. Only words that nothing but
    additions change are counters; a wait that the initial value satisfies waits for no arrival.
    Ranks take the tickets of a lock or semaphore in any order, so that its targets do not follow
    the launches. Such a counter is left out: an early launch waits for what later ones add, or
    each arrival has a target of its own.

    Raises:
        SimulationError: ``arrival``, with the numbers by launch.
    """
    for tensor in _each(tensors):
        for flat, waits in tensor.waits.items():
            found = _growing(tensor, tensor.changes.get(flat, []), waits)
            if found:
                raise _surplus(tensor, flat, found)


def _growing(
    tensor: Tensor, changes: list[Change], waits: list[Awaited]
) -> dict[int, tuple[int, int]]:
    """By launch that waited: arrivals up to it and the largest number waited for up to it; empty if
    the difference does not grow all the time, or if the counter serves tickets."""
    if not changes or not _only_grows(tensor, changes):
        return {}
    memory, start = tensor.memory, changes[0].before
    targets: dict[int, set[int]] = {}
    for wait in waits:
        if wait.relation in _COUNTS:
            target = _difference(tensor, wait.want, start) + (wait.relation == "gt")
            targets.setdefault(memory.epoch_of(wait.event), set()).add(target)
    found, unclaimed, before = {}, [], set()
    for epoch in sorted(targets):
        before |= targets[epoch]
        if max(targets[epoch]) > 0:
            earlier = [c for c in changes if memory.epoch_of(c.event) <= epoch]
            arrived = sum(_difference(tensor, c.after, c.before) for c in earlier)
            found[epoch] = arrived, max(before)
            unclaimed.append(arrived - len(before))
    excess = [arrived - target for arrived, target in found.values()]
    grows = len(excess) > 1 and excess[0] > 0
    grows = grows and all(a < b for e in (excess, unclaimed) for a, b in pairwise(e))
    return found if grows else {}


def _surplus(tensor: Tensor, flat: int, found: dict[int, tuple[int, int]]) -> SimulationError:
    counts = [
        f"  up to launch {epoch}: {arrived} arrivals, {target} waited for, {arrived - target} over"
        for epoch, (arrived, target) in found.items()
    ]
    memory = tensor.memory
    signalled = _last_by_site(memory, [c.event for c in tensor.changes[flat]])
    waited = _last_by_site(memory, [w.event for w in tensor.waits[flat]])
    return SimulationError(
        "arrival",
        event=tensor.changes[flat][-1].event,
        report="\n".join([
            f"{_name(tensor, flat)} gets more arrivals than are waited for, more in each launch",
            *counts,
            "signalled by:", *(f"  {text}" for text in signalled),
            "waited for by:", *(f"  {text}" for text in waited),
        ]),
    )  # fmt: skip


def has_reached(tensor: Tensor, seen: Any, want: Any) -> bool:
    """Whether a word is at ``want`` or above it, across wrap-around."""
    return _difference(tensor, seen, want) >= 0


def is_passed(tensor: Tensor, index: tuple, relation: str, want: Any) -> bool:
    """Whether a counter went beyond the one value that is waited for."""
    changes = tensor.changes.get(_flat(tensor, index), [])
    if relation != "eq" or not changes or not _only_grows(tensor, changes):
        return False
    return _difference(tensor, changes[-1].after, want) > 0


def story(tensor: Tensor, index: tuple, relation: str, want: Any, lines: Mapping[str, str]) -> str:
    """For the report of who stands at a flag: how far it is from ``want``, who signalled it and who
    could have. ``lines`` are those of the program that signal this tensor: line -> operation."""
    memory, flat = tensor.memory, _flat(tensor, index)
    seen = tensor.newest(index).value
    apart = _difference(tensor, want, seen) + (relation == "gt") if relation in _COUNTS else 0
    parts = []
    if apart:
        amount = abs(apart)
        parts.append(f"{amount} missing" if apart > 0 else f"passed by {amount}: it has {amount} "
                     "too many and never comes back")  # fmt: skip
    for late, earlier in tensor.overtakings(index):
        parts.append(f"lost: {memory.describe(late)}")
        parts.append(f"  landed before {memory.describe(earlier)}: nothing orders the two")
    for loc, op in lines.items():
        here = _events_at(memory, tensor.changes.get(flat, []), loc)
        other = [
            event
            for other, changes in tensor.changes.items()
            if other != flat
            for event in _events_at(memory, changes, loc)
        ]
        who = "signalled by" if apart < 0 else "could signal it"
        text = f"{who}: {op} --> {loc}, so far {_times(here)}"
        if here:
            text += f", last by {_doer(memory, here[-1])}"
        if other:
            last = memory.describe(max(other)).split(" of ", 1)[1].split(" --> ")[0]
            text += f"; other words of {tensor.name} {_times(other)}, last {last}"
        parts.append(text)
    if not lines:
        parts.append(f"could signal it: no line of the program signals {tensor.name}")
    return "\n".join(f"    {part}" for part in parts)


def unconsumed(tensors: Mapping[str, list[Tensor]]) -> dict[tuple, str]:
    """(tensor, line) of signals to words that nobody waits for or reads -> what to say of them."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for tensor in _each(tensors):
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
                    found.setdefault((tensor.name, op, loc), []).append(_name(tensor, flat))
    return {
        (name, loc): f"{_some(words)} signalled, but nobody waits for or reads it: {op} --> {loc}"
        for (name, op, loc), words in found.items()
    }


def _read(tensor: Tensor) -> np.ndarray:
    """Which elements somebody read; an atomic operation that returns the value reads it."""
    read = np.zeros(tensor.shape, np.bool_)
    for op, _, accessed, key, _, writes in tensor.memory.events.what:
        if accessed is tensor and (not writes or op.startswith("W.atom_")):
            read[key] = True
    return read


def _each(tensors: Mapping[str, list[Tensor]]) -> Iterator[Tensor]:
    """Every tensor of every rank once."""
    for of_ranks in tensors.values():
        yield from dict.fromkeys(of_ranks)


def _only_grows(tensor: Tensor, changes: list[Change]) -> bool:
    return all(c.adds and _difference(tensor, c.after, c.before) > 0 for c in changes)


def _difference(tensor: Tensor, a: Any, b: Any) -> int:
    """``a - b`` of two words, signed, across wrap-around."""
    half = 1 << (tensor.dtype.itemsize * 8 - 1)
    return (int(a) - int(b) + half) % (2 * half) - half


def _events_at(
    memory: Memory, changes: list[Change], loc: str = "", ops: tuple[str, ...] = ()
) -> list[int]:
    """Events of these changes by one line, or by one of some operations."""
    what = memory.events.what
    return [
        c.event
        for c in changes
        if (not loc or what[c.event][1] == loc) and (not ops or what[c.event][0].startswith(ops))
    ]


def _last_by_site(memory: Memory, events: list[int]) -> list[str]:
    """One line of text for each line of the program: how often, and the last time."""
    by_site: dict[str, list[int]] = {}
    for event in events:
        by_site.setdefault(memory.events.what[event][1], []).append(event)
    return [
        f"{memory.events.what[of[0]][0]} --> {loc}, {_times(of)}, last by {_doer(memory, of[-1])}"
        for loc, of in by_site.items()
    ]


def _doer(memory: Memory, event: int) -> str:
    return f"{memory.place(int(memory.events.agent[event]))} in launch {memory.epoch_of(event)}"


def _times(events: list[int]) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(len(events), f"{len(events)} times")


def _some(words: list[str]) -> str:
    return (
        f"{words[0]} is" if len(words) == 1 else f"each of {len(words)} words ({words[0]}, ..) is"
    )


def _name(tensor: Tensor, flat: int) -> str:
    index = np.unravel_index(flat, tensor.shape)
    return f"{tensor.name}[{', '.join(str(int(i)) for i in index)}]"


def _flat(tensor: Tensor, index: tuple) -> int:
    return int(np.ravel_multi_index(index, tensor.shape))
