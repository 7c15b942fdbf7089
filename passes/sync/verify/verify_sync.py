"""A program that signals and waits itself is held to the rules by which others are inferred."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError, SyncWarning
from ....builtins.spec import builtin_of
from ...group.specialize_group import heap_tensors
from ...ir.implicit import implicit_of
from ...ir.walk import arrows, location
from ..infer.infer_sync import explicit_sync, is_explicit
from ..infer.options import options_of
from .conflicts import Conflict, Touch, conflicts
from .events import DATA, Event, collect_events
from .happens_before import HOLDS, HappensBefore, Operation, Timeline
from .launches import Launches, LeftOut, Rows
from .outside import reads_outside, warn_outside

LAUNCHES = 4
"""How many in a row are looked at: what three buffers in turn repeat."""


def verify_sync(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Refuse a program whose own signals, waits and barriers leave accesses to symmetric tensors
    unordered, within a launch or between launches.

    Accesses, flags and values are computed for all ranks, blocks and rounds of a few launches. What
    a block of one rank writes and another block, of any rank, reads must be ordered by a chain of
    signals and waits, barriers and fences of sufficient scope. Memory is taken to start at zero,
    and what only the running kernel knows to be the number of the launch. A wait for a flag whose
    place, or the place of a signal of its tensor, depends on data orders everything. Not proven:
    what depends on data (such accesses are left out); single words that ``W.ld`` and ``W.st``
    access; the order of the threads of a block; two writes of the same element; that awaited
    numbers are reached.

    What there is too much of to look at is left out, too, with a ``SyncWarning``.

    Raises:
        LanguageError: names the accesses, their lines, and what would order them.

    Before and after: the same program
    """
    name = func.attrs["global_symbol"]
    for one in verified(func, world_size):
        message = f"verify_sync of {name}: {one.event.text}: {one.reason}; it is not verified"
        warnings.warn(f"{message}{one.event.location}", SyncWarning, stacklevel=2)
    return func


def verified(func: tirx.PrimFunc, world_size: int) -> list[LeftOut]:
    """``verify_sync`` of a program; what it has left out, because there is too much of it."""
    options = options_of(func)
    inferred = any(not h.scratch for h in implicit_of(func))
    if options.verify == "off" or inferred or not is_explicit(func):
        return []
    message, left_out = find_fault(func, world_size)
    if message and options.verify == "error":
        raise LanguageError(message)
    if message:
        warnings.warn(message, SyncWarning, stacklevel=3)
    return left_out


def find_fault(func: tirx.PrimFunc, world_size: int) -> tuple[str, list[LeftOut]]:
    """What is wrong with the order of a program that was made one of a group, or ""; and what was
    too much to be looked at."""
    tensors = heap_tensors(func)
    if not tensors:
        return "", []
    program, events = collect_events(func, tensors)
    launches = Launches(func, program, events, world_size)
    judge = _Judge(launches, {t.name for t in tensors}, func)
    return judge.verdict(), judge.left_out


Stronger = dict[Event, tuple[str, ...]]
"""Operations with words that are taken to be stronger than they are."""
_WEAK: dict[str, dict[str, tuple[str, ...]]] = {
    "scope": dict.fromkeys(("signal", "wait", "fence"), ("cta", "gpu")),
    "sem": dict.fromkeys(("signal", "wait"), ("relaxed", "volatile")),
}


@dataclass
class _Judge:
    launches: Launches
    symmetric: set[str]
    func: tirx.PrimFunc
    signalled: set[str] = field(init=False)
    timeline: Timeline = field(init=False)
    operations: list[Operation] = field(init=False)
    left_out: list[LeftOut] = field(default_factory=list)

    def verdict(self) -> str:
        rows = [r for n in range(LAUNCHES) for r in self.launches.rows(n)]
        warn_outside(dict.fromkeys(reads_outside(rows)))
        self.left_out += self.launches.left_out.values()
        if any(one.event.kind not in DATA for one in self.left_out):
            return ""  # what it orders would seem unordered
        if self._resets(rows):
            rows = [r for r in rows if r.turn == 0]
        self.signalled = {e.tensor.name for e in self.launches.events
                          if e.kind == "signal" and e.tensor is not None}  # fmt: skip
        self.signalled -= self.launches.unplaced
        stuck = self._deadlock(rows)
        if stuck:
            return stuck
        self.timeline = Timeline(rows)
        found, left_out = conflicts(self.timeline, self.launches.world_size)
        self.left_out += left_out
        if not found:
            return ""
        self.operations = self.timeline.operations()
        order = self._order()
        found.sort(key=lambda c: c.read.event.until != "")
        return next((self._race(c) for c in found if not self._is_ordered(order, c)), "")

    @staticmethod
    def _resets(rows) -> bool:
        """Whether a wait is for the same value in each launch, so that somebody must reset the flag
        in between, and thereby orders the launches."""
        awaited: dict[Event, dict[int, set]] = {}
        for r in rows:
            if r.event.kind == "wait" and r.value is not None and r.value.size:
                awaited.setdefault(r.event, {})[r.turn] = set(
                    zip(r.value.tolist(), *(w.tolist() for w in r.low), strict=True)
                )
        return any(
            len(by_launch) == LAUNCHES and all(v == by_launch[0] for v in by_launch.values())
            for by_launch in awaited.values()
        )

    def _order(self, stronger: Stronger | None = None) -> HappensBefore:
        return HappensBefore(
            self.timeline, self.operations, lambda name: name not in self.symmetric,
            self.signalled, stronger or {},
        )  # fmt: skip

    @staticmethod
    def _is_ordered(order: HappensBefore, c: Conflict) -> bool:
        write, read = c.write.place, c.read.place
        if c.write.launch <= c.read.launch and order.precedes(write, read):
            return True
        return c.read.launch <= c.write.launch and order.precedes(read, write)

    def _deadlock(self, rows: list[Rows]) -> str:
        """A wait for a flag that nobody signals, though the program signals others of its tensor.

        A tensor of which it signals none is the business of whoever launches it."""
        signals = [r for r in rows if r.event.kind == "signal" and r.event.tensor is not None]
        signalled = {word for r in signals for word in self._words(r)}
        for r in rows:
            event = r.event
            if event.kind != "wait" or event.tensor is None:
                continue
            if event.tensor.name not in self.signalled:
                continue
            for word in self._words(r, stands=True) if r.low else ():
                if word not in signalled:
                    flag, rank = f"{word[0]}[{', '.join(map(str, word[2:]))}]", word[1]
                    others = [e for e in self.launches.events if e.kind == "signal"
                              and e.tensor is not None and e.tensor.name == word[0]]  # fmt: skip
                    return (
                        f"{event.shown}: rank {rank} waits for {flag}, which nobody signals; "
                        f"expected a signal of it{_lines([event, *others])}"
                    )
        return ""

    def _words(self, r: Rows, stands: bool = False) -> list[tuple]:
        """The flags, each with the rank whose memory holds it.

        Args:
            stands: only where a wait does not end at once, the flag being zero.
        """
        home = r.low[0] if r.event.tensor.name in self.symmetric else r.rank
        each = np.stack([home, *r.low], axis=1)
        if stands and r.value is not None:
            each = each[~HOLDS[r.event.relation](0, r.value)]
        each = np.unique(each, axis=0)
        return [(r.event.tensor.name, *word) for word in each.tolist()]

    def _race(self, c: Conflict) -> str:
        for stronger in self._stronger():
            if self._is_ordered(self._order(stronger), c):
                return self._too_weak(c, stronger)
        if c.read.event.until:
            return self._unfinished(c)
        return self._missing(c) + _not_inferred(self.func)

    def _missing(self, c: Conflict) -> str:
        if c.write.launch != c.read.launch:
            return self._reused(c)
        write, read = c.write.event, c.read.event
        who = f"which {_by(c.write, c.read)} writes in the same launch"
        before = list(self._of(c.read, "wait", "barrier", before=True))
        if not before:
            late = [o.event for o in self._of(c.read, "wait", "barrier", before=False)]
            also = f" (the {late[0].op} behind it comes too late)" if late else ""
            return (
                f"{read.text}, {who}, and no wait comes before it{also}; expected W.wait_reached "
                "or another wait for a flag that the writer signals after its write, or a "
                f"barrier, before it{_lines([read, *late[:1], write])}"
            )
        waited = {o.event for o in before}
        after = [o for o in self._of(c.write, "signal", "barrier", before=False)
                 if o.event.kind == "signal" or o.event in waited]  # fmt: skip
        if not after:
            early = [o.event for o in self._of(c.write, "signal", "barrier", before=True)]
            also = f" (the {early[-1].op} before it says nothing of it)" if early else ""
            return (
                f"{write.text}, which {_by(c.read, c.write)} reads in the same launch, and no "
                f"signal follows it{also}; expected W.signal of the flag that the reader waits "
                f"for after it, or a barrier between the two{_lines([write, *early[-1:], read])}"
            )
        return (
            f"{read.text}, {who}, but {before[-1].event.shown} before it does not wait for what "
            f"the writer signals after its write, {after[0].event.shown}; expected a wait for that "
            f"signal{_lines([read, write, before[-1].event, after[0].event])}"
        )

    def _reused(self, c: Conflict) -> str:
        write, read = c.write.event, c.read.event
        if c.write.launch < c.read.launch:
            return (
                f"{read.text}, which {_by(c.write, c.read)} has written in an earlier launch, and "
                "nothing orders that; expected a wait for its signal, or a barrier, before it"
                f"{_lines([read, write])}"
            )
        launches = c.write.launch - c.read.launch
        when = "in the launch before" if launches == 1 else f"in the launch {launches} before it"
        return (
            f"{write.text}, which {_by(c.read, c.write)} may still be reading {when}; expected a "
            "wait before the write for a flag that the readers signal when they have read (a "
            "credit), W.sync_ranks behind the reads, or two buffers that launches take in turn if "
            "every writer waits, in each launch, for all who read what it writes"
            f"{_lines([write, read])}"
        )

    def _unfinished(self, c: Conflict) -> str:
        """The load itself is ordered before the write, its end is not."""
        write, read = c.write.event, c.read.event
        early = [o.event for o in self._of(c.read, "signal", "barrier", before=True)][-1:]
        what = early[0].shown if early else "nothing"
        return (
            f"{read.text} until {read.until}, and {_by(c.write, c.read)} may overwrite it before, "
            f"since {what} comes earlier; expected the signal that frees it after the wait"
            f"{_lines([read, *early, write])}"
        )

    def _too_weak(self, c: Conflict, stronger: Stronger) -> str:
        said = []
        for event, words in stronger.items():
            legal = {"sem": "release" if event.kind == "signal" else "acquire", "scope": "sys"}
            said += [f"{event.shown} has {w}='{getattr(event, w)}'; expected '{legal[w]}'"
                     for w in words]  # fmt: skip
        again = "overwrites in a later launch" if c.write.launch > c.read.launch else "writes"
        return (
            f"{', and '.join(said)}: {c.read.event.text}, which {_by(c.write, c.read)} {again}"
            f"{_lines([*stronger, c.read.event, c.write.event])}"
        )

    def _stronger(self) -> Iterator[Stronger]:
        """What could order more if it were stronger: a word of one, one, and all together."""
        every: Stronger = {}
        for e in self.launches.events:
            weak = [w for w in ("scope", "sem") if getattr(e, w) in _WEAK[w].get(e.kind, ())]
            if weak:
                every[e] = tuple(weak)
        for event, words in every.items():
            yield from ({event: (w,)} for w in words)
        yield from ({event: words} for event, words in every.items() if len(words) > 1)
        yield every

    def _of(self, touch: Touch, *kinds: str, before: bool) -> Iterator[Operation]:
        """Operations of the same block before or behind an access."""
        for o in self.operations:
            if o.block == touch.block and o.event.kind in kinds:
                if (o.position < touch.position) == before:
                    yield o


def _not_inferred(func: tirx.PrimFunc) -> str:
    """Return a line that names the builtin because of which the compiler inserts nothing."""
    explicit = explicit_sync(func)
    if explicit is None:
        return ""
    leaf, call = explicit
    return (
        f"\n(W.{builtin_of(call).name} synchronizes explicitly, so the compiler inserts nothing in "
        f"this program; without explicit signals, waits and barriers it does){location(leaf.stmt)}"
    )


def _by(one: Touch, other: Touch) -> str:
    """``rank 1``, or which block where it is the same rank."""
    return f"rank {one.rank}" if one.rank != other.rank else f"block {one.number} of its rank"


def _lines(events: list[Event]) -> str:
    """Return where the events are, each line with its kind: `` read --> file:line``."""
    return arrows(place for event in events for place in event.places)
