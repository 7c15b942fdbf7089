"""Verification of programs with explicit signals and waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError, SyncWarning
from ....builtins.spec import builtin_of
from ...ir.group import heap_tensors
from ...ir.implicit import implicit_of
from ...ir.walk import arrows, location
from ..infer.inference import explicit_sync, is_explicit
from ..infer.options import options_of
from .conflicts import BlockAccess, Conflict, conflicts
from .events import DATA, Event, collect_events
from .happens_before import HOLDS, HappensBefore, Operation, Timeline
from .launches import Launches, Rows, UnverifiedEvent
from .outside import outside_message, reads_outside, warn_outside

LAUNCHES = 4
"""Number of consecutive launches that are analyzed: enough for three buffers used in turn."""


def verify_program(func: tirx.PrimFunc, world_size: int) -> list[UnverifiedEvent]:
    """Verify a program as ``verify_sync`` does. Return what is too large to be verified.

    Raises:
        LanguageError: the program has a race or a deadlock.
    """
    options = options_of(func)
    inferred = any(not p.scratch for p in implicit_of(func))
    if options.verify == "off" or inferred or not is_explicit(func):
        return []
    message, unverified = find_fault(func, world_size)
    if message and options.verify == "error":
        raise LanguageError(message)
    if message:
        warnings.warn(message, SyncWarning, stacklevel=3)
    return unverified


def find_fault(func: tirx.PrimFunc, world_size: int) -> tuple[str, list[UnverifiedEvent]]:
    """Return the first fault of a program specialized for a group, or "", and what is too large."""
    tensors = heap_tensors(func)
    if not tensors:
        return "", []
    program, events = collect_events(func, tensors)
    launches = Launches(func, program, events, world_size)
    verifier = _Verifier(launches, {t.name for t in tensors}, func)
    return verifier.first_fault(), verifier.unverified


Stronger = dict[Event, tuple[str, ...]]
"""Operations, each with the qualifiers that are treated as if they were sufficient."""
_WEAK: dict[str, dict[str, tuple[str, ...]]] = {
    "scope": dict.fromkeys(("signal", "wait", "fence"), ("cta", "gpu")),
    "sem": dict.fromkeys(("signal", "wait"), ("relaxed", "volatile")),
}


@dataclass
class _Verifier:
    """Verification of one program for one group.

    Attributes:
        symmetric: names of the symmetric tensors.
        signalled: names of the tensors whose flags the program signals, all at known indices.
        pairs: all pairs of accesses that need an order.
        unverified: events and tensors that are too large to be verified.
    """

    launches: Launches
    symmetric: set[str]
    func: tirx.PrimFunc
    signalled: set[str] = field(init=False)
    timeline: Timeline = field(init=False)
    operations: list[Operation] = field(init=False)
    pairs: list[Conflict] = field(init=False)
    unverified: list[UnverifiedEvent] = field(default_factory=list)

    def first_fault(self) -> str:
        """Return the message of the first fault, or ""."""
        rows = [r for n in range(LAUNCHES) for r in self.launches.rows(n)]
        warn_outside(dict.fromkeys(reads_outside(rows)))
        outside = outside_message(rows, self.func.params)
        if outside:
            return outside
        self.unverified += self.launches.unverified.values()
        if any(unverified.event.kind not in DATA for unverified in self.unverified):
            return ""  # without these operations, ordered accesses would seem to race
        if self._has_resets(rows):
            rows = [r for r in rows if r.program_launch == 0]
        self.signalled = {e.tensor.name for e in self.launches.events
                          if e.kind == "signal" and e.tensor is not None}  # fmt: skip
        self.signalled -= self.launches.unplaced
        deadlock = self._deadlock_message(rows)
        if deadlock:
            return deadlock
        self.timeline = Timeline(rows)
        pairs, unverified = conflicts(self.timeline, self.launches.world_size)
        self.unverified += unverified
        if not pairs:
            return ""
        self.operations = self.timeline.operations()
        self.pairs = pairs
        order = self._order()
        pairs.sort(key=lambda c: c.read.event.load_end_op != "")
        return next((self._race_message(c) for c in pairs if not self._is_ordered(order, c)), "")

    @staticmethod
    def _has_resets(rows) -> bool:
        """Return whether a wait awaits the same values in each launch.

        Then the caller must reset the flag between launches, which also orders the launches.
        """
        awaited: dict[Event, dict[int, set]] = {}
        for r in rows:
            if r.event.kind == "wait" and r.value is not None and r.value.size:
                awaited.setdefault(r.event, {})[r.program_launch] = set(
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

    def _deadlock_message(self, rows: list[Rows]) -> str:
        """Return the message for a wait for a flag that no rank signals, or "".

        Only tensors with other signalled flags count. If the program signals no flag of a tensor,
        the caller of the kernel may signal them.
        """
        signals = [r for r in rows if r.event.kind == "signal" and r.event.tensor is not None]
        signalled = {flag for r in signals for flag in self._flags(r)}
        for r in rows:
            event = r.event
            if event.kind != "wait" or event.tensor is None:
                continue
            if event.tensor.name not in self.signalled:
                continue
            for key in self._flags(r, blocking_only=True) if r.low else ():
                if key not in signalled:
                    flag, rank = f"{key[0]}[{', '.join(map(str, key[2:]))}]", key[1]
                    others = [e for e in self.launches.events if e.kind == "signal"
                              and e.tensor is not None and e.tensor.name == key[0]]  # fmt: skip
                    return (
                        f"{event.call_text}: rank {rank} waits for {flag}, which no rank signals; "
                        f"expected a signal of it{_lines([event, *others])}"
                    )
        return ""

    def _flags(self, r: Rows, blocking_only: bool = False) -> list[tuple]:
        """Return (tensor, owner, index...) of each flag that an event uses.

        Args:
            blocking_only: only waits that do not end at once if the flag is zero.
        """
        owner = r.low[0] if r.event.tensor.name in self.symmetric else r.rank
        flags = np.stack([owner, *r.low], axis=1)
        if blocking_only and r.value is not None:
            flags = flags[~HOLDS[r.event.relation](0, r.value)]
        flags = np.unique(flags, axis=0)
        return [(r.event.tensor.name, *flag) for flag in flags.tolist()]

    def _race_message(self, c: Conflict) -> str:
        """Return the message for a conflict that nothing orders."""
        for stronger in self._stronger():
            if self._is_ordered(self._order(stronger), c):
                return self._too_weak_message(c, stronger)
        if c.read.event.load_end_op:
            return self._unfinished_load_message(c)
        return self._missing_sync_message(c) + _not_inferred(self.func)

    def _missing_sync_message(self, c: Conflict) -> str:
        """Return the message for a conflict without a wait, a signal, or a matching pair."""
        if c.write.launch != c.read.launch or self._overwrites(c):
            return self._reuse_message(c)
        write, read = c.write.event, c.read.event
        other = f"which {_actor(c.write, c.read)} writes in the same launch"
        before = list(self._operations_of_block(c.read, "wait", "barrier", before=True))
        if not before:
            late = [
                o.event for o in self._operations_of_block(c.read, "wait", "barrier", before=False)
            ]
            hint = f" (the {late[0].op} after it comes too late)" if late else ""
            return (
                f"{read.text}, {other}, and no wait comes before it{hint}; expected "
                "W.wait_reached or another wait for a flag that the writer signals after its "
                f"write, or a barrier, before it{_lines([read, *late[:1], write])}"
            )
        waited = {o.event for o in before}
        after = [o for o in self._operations_of_block(c.write, "signal", "barrier", before=False)
                 if o.event.kind == "signal" or o.event in waited]  # fmt: skip
        if not after:
            early = [
                o.event
                for o in self._operations_of_block(c.write, "signal", "barrier", before=True)
            ]
            hint = f" (the {early[-1].op} before it does not cover it)" if early else ""
            return (
                f"{write.text}, which {_actor(c.read, c.write)} reads in the same launch, and no "
                f"signal follows it{hint}; expected W.signal of the flag that the reader waits "
                f"for after it, or a barrier between the two{_lines([write, *early[-1:], read])}"
            )
        wait, signal = before[-1].event, after[0].event
        return (
            f"{read.text}, {other}, but {wait.call_text} before it does not wait for what the "
            f"writer signals after its write, {signal.call_text}; expected a wait for that signal"
            f"{_lines([read, write, wait, signal])}"
        )

    def _overwrites(self, c: Conflict) -> bool:
        """Return whether the read of a conflict in one launch is for an earlier write of the block:
        the block has written the element more often before than the reader has read it."""
        writes = {
            p.write.position
            for p in self.pairs
            if p.read.place == c.read.place and p.write.block == c.write.block
        }
        reads = {
            p.read.position
            for p in self.pairs
            if p.write.place == c.write.place and p.read.block == c.read.block
        }
        written = sum(position < c.write.position for position in writes)
        return written > sum(position < c.read.position for position in reads)

    def _reuse_message(self, c: Conflict) -> str:
        """Return the message for a write to what an earlier read may still read, or for a read of
        an earlier launch's write."""
        write, read = c.write.event, c.read.event
        if c.write.launch < c.read.launch:
            return (
                f"{read.text}, which {_actor(c.write, c.read)} has written in an earlier launch, "
                "and nothing orders the two; expected a wait for the writer's signal, or a "
                f"barrier, before the read{_lines([read, write])}"
            )
        launches = c.write.launch - c.read.launch
        launch = f"in the launch {launches} before it"
        launch = {0: "in the same launch", 1: "in the launch before"}.get(launches, launch)
        credit = self._credit(c)
        if credit is not None:
            wait, signal = credit
            return (
                f"{write.text}, which {_actor(c.read, c.write)} may still be reading {launch}: "
                f"{wait.event.call_text} before the write does not wait for "
                f"{signal.event.call_text} after the read; expected a wait for that signal, a "
                f"newer credit{_lines([write, read, wait.event, signal.event])}"
            )
        return (
            f"{write.text}, which {_actor(c.read, c.write)} may still be reading {launch}; "
            "expected a wait before the write for a flag that the readers signal when they have "
            "read (a credit), W.sync_ranks after the reads, or two buffers that launches use in "
            "turn if every writer waits, in each launch, for all readers of what it writes"
            f"{_lines([write, read])}"
        )

    def _credit(self, c: Conflict) -> tuple[Operation, Operation] | None:
        """Return the last wait before the write for a flag that the reader signals after its read,
        and that signal; None if there is no such wait."""
        signals = {
            o.flag: o
            for o in reversed(list(self._operations_of_block(c.read, "signal", before=False)))
            if o.flag
        }
        waits = self._operations_of_block(c.write, "wait", before=True)
        pairs = [(o, signals[o.flag]) for o in waits if o.flag in signals]
        return pairs[-1] if pairs else None

    def _unfinished_load_message(self, c: Conflict) -> str:
        """Return the message for an asynchronous load that starts before the write but ends later.

        Its start is ordered before the write; its end is not.
        """
        write, read = c.write.event, c.read.event
        early = [
            o.event for o in self._operations_of_block(c.read, "signal", "barrier", before=True)
        ][-1:]
        signal = early[0].call_text if early else "nothing"
        return (
            f"{read.text} until {read.load_end_op}, and {_actor(c.write, c.read)} may overwrite it "
            f"before, since {signal} comes earlier; expected the signal that frees it after the "
            f"wait{_lines([read, *early, write])}"
        )

    def _too_weak_message(self, c: Conflict, stronger: Stronger) -> str:
        """Return the message for operations whose ``sem`` or ``scope`` is too weak."""
        faults = []
        for event, qualifiers in stronger.items():
            legal = {"sem": "release" if event.kind == "signal" else "acquire", "scope": "sys"}
            faults += [f"{event.call_text} has {q}='{getattr(event, q)}'; expected '{legal[q]}'"
                       for q in qualifiers]  # fmt: skip
        verb = "overwrites in a later launch" if c.write.launch > c.read.launch else "writes"
        return (
            f"{', and '.join(faults)}: {c.read.event.text}, which {_actor(c.write, c.read)} {verb}"
            f"{_lines([*stronger, c.read.event, c.write.event])}"
        )

    def _stronger(self) -> Iterator[Stronger]:
        """Yield sets of operations whose stronger qualifiers may order more, smallest first.

        These are one qualifier of one operation, all qualifiers of one operation, and all together.
        """
        weak: Stronger = {}
        for e in self.launches.events:
            qualifiers = [q for q in ("scope", "sem") if getattr(e, q) in _WEAK[q].get(e.kind, ())]
            if qualifiers:
                weak[e] = tuple(qualifiers)
        for event, qualifiers in weak.items():
            yield from ({event: (q,)} for q in qualifiers)
        yield from ({event: names} for event, names in weak.items() if len(names) > 1)
        yield weak

    def _operations_of_block(
        self, access: BlockAccess, *kinds: str, before: bool
    ) -> Iterator[Operation]:
        """Yield the operations of the access's block, either before or after the access."""
        for o in self.operations:
            if o.block == access.block and o.event.kind in kinds:
                if (o.position < access.position) == before:
                    yield o


def _not_inferred(func: tirx.PrimFunc) -> str:
    """Return a line that names the explicit builtin that disables inference in this program."""
    explicit = explicit_sync(func)
    if explicit is None:
        return ""
    leaf, call = explicit
    return (
        f"\n(W.{builtin_of(call).name} synchronizes explicitly, so the compiler inserts nothing in "
        f"this program; without explicit signals, waits and barriers it does){location(leaf.stmt)}"
    )


def _actor(access: BlockAccess, other: BlockAccess) -> str:
    """Return ``rank 1``, or the block if both accesses are on the same rank."""
    if access.rank != other.rank:
        return f"rank {access.rank}"
    return f"block {access.number} of its rank"


def _lines(events: list[Event]) -> str:
    """Return the lines of the events, each with its kind: `` read --> file:line``."""
    return arrows(place for event in events for place in event.labelled_lines)
