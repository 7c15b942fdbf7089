"""Global memory with weak ordering, which reports races in any interleaving.

Values are stored immediately. An access that is not ordered after a conflicting access of another
agent is a fault in any interleaving. Words that atomic operations access may be accessed unordered
and keep their modification order: a relaxed load may return an older value, and a change may land
before earlier changes that are not ordered before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report.errors import SimulationError, two_values
from .clock import Clock, View
from .history import Change, EndedWait, Entry, make_whole, place_of, region_of
from .order import GPU, SETS, SYS, Events, Layout, Sync
from .shadow import ShadowMemory, text_of_region
from .threads import ElementAccess, Kind, Later, ThreadOrder, ThreadRecord, clash
from .values import uninitialized_array

if TYPE_CHECKING:
    from .segments import Segments

_HISTORY = 8
"""Number of values of a word that are kept."""
_LATE_CHANGE = (
    "\nboth are atomic, but what followed the earlier one led to the later one, and no release and "
    "acquire orders the two: the earlier one may be late and replace the value of the later one"
)
_AMONG_THREADS = "\ndifferent threads of the block access it; T.sync_threads() orders them"


@dataclass
class Access:
    """One access: its agent, its time, and a view of what happens before it."""

    agent: int
    time: int
    view: View
    scope: int
    """0 for an ordinary access, else the scope of an atomic one."""
    op: str
    loc: str
    epoch: int = 0
    threads: ThreadOrder | None = None
    accessed: Callable[[], ElementAccess] | None = None
    """The thread that accesses each element, if known. ``ThreadRecord`` then checks the order with
    other accesses of the block."""
    thread_time: int = 0
    """Time in ``threads``."""


_SAFE_REUSE = (
    "\nexpected, before the write, a wait for what the reader signals after its last read, or "
    "W.sync_ranks"
)


class Memory:
    """State that all tensors of all ranks share: the log of accesses, and the clocks."""

    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self.layout, self.rng = layout, rng
        self.events = Events()
        self.sc_fences: Sync = {}
        """Clocks that the ``sc`` fences so far publish to later ones. They have one total order."""
        self.version = 0
        self.unwritten = ""
        """Explanation of the poison that was read last: what was never written, and which line has
        read it first."""
        self.on_write: Callable[[Tensor], None] = lambda tensor: None

    def choose_value(self, entries: Sequence[Entry], oldest: Callable[[], int]) -> int:
        """Choose the value that a load returns, from ``oldest`` on: its index in the history."""
        at = len(entries) - 1
        return self.rng.randint(oldest(), at) if self.rng.random() < 0.5 else at

    def choose_place(self, events: Sequence[int]) -> int | None:
        """Choose the change before which a store lands; None: it lands last."""
        return None if self.rng.random() < 0.5 else self.rng.choice(events)

    def place(self, agent: int) -> str:
        """Format an agent: ``rank 1, block 3, thread 0``."""
        if agent == 0:
            return "the host"
        rank, block, kind = (int(v) for v in self.layout.place(agent))
        if self.layout.is_stream(block):
            return f"{self.layout.names[block]} of rank {rank}"
        thread_groups, place = self.layout.thread_groups, f"rank {rank}, {self.layout.names[block]}"
        if kind < thread_groups:
            return f"{place}, {self.thread_names[kind]}"
        if kind < thread_groups + SETS:
            return f"{place}, {'all' if kind < thread_groups + 2 else 'several'} threads"
        is_bulk = kind < 2 * thread_groups + SETS
        return f"{place}, {'bulk copies' if is_bulk else 'asynchronous loads'}"

    thread_names: tuple[str, ...] = ("thread 0", "other threads")

    def epoch_of(self, event: int) -> int:
        return self.events.what[event][4]

    def describe(self, event: int) -> str:
        op, loc, tensor, key, epoch, _ = self.events.what[event]
        region = f" of {tensor.name}{text_of_region(key)}" if tensor else ""
        line = f" --> {loc}" if loc else ""
        place = self.place(int(self.events.agent[event]))
        return f"{op}{region} by {place} in launch {epoch}{line}"

    def last_events(self, agents: set[int]) -> str:
        """Format the last 10 events of the blocks of these agents."""
        blocks = {tuple(int(v) for v in self.layout.place(a)[:2]) for a in agents if a}
        lines: list[str] = []
        for event in range(len(self.events.what) - 1, max(0, len(self.events.what) - 5000), -1):
            agent = int(self.events.agent[event])
            if tuple(int(v) for v in self.layout.place(agent)[:2]) in blocks:
                lines.append(f"  {self.describe(event)}")
                if len(lines) == 10:
                    break
        return "\n".join(["last events of these blocks:", *reversed(lines)])

    def compatible(self, event: int | np.ndarray, access: Access) -> Any:
        """Return whether events and the access are atomic at scopes that include each other."""
        own_rank, own_block, _ = self.layout.place(access.agent)
        if isinstance(event, int):
            rank, block, _ = self.layout.place(self.events.agent.item(event))
            needed = SYS if rank != own_rank else GPU if block != own_block else 1
            return min(self.events.scope.item(event), access.scope) >= needed
        rank, block, _ = self.layout.place(self.events.agent[event])
        needed = np.where(rank != own_rank, SYS, np.where(block != own_block, GPU, 1))
        return np.minimum(self.events.scope[event], access.scope) >= needed

    def note(self, tensor: Tensor, key: Any, access: Access, writes: bool = False) -> int:
        details = (access.op, access.loc, tensor, key, access.epoch, writes)
        return self.events.add(access.agent, access.time, access.scope, details)

    def conflict(
        self, kind: str, tensor: Tensor, key: Any, access: Access, event: int, at: tuple,
        more: str = "",
    ) -> SimulationError:  # fmt: skip
        """Return the error for an access that conflicts with an earlier event."""
        relation = "is not ordered after"
        if kind == "reuse":
            late = self.epoch_of(event) > access.epoch
            relation = (
                "reads what a later use may already overwrite: it is not ordered before"
                if late
                else "overwrites what an earlier use may still read: it is not ordered after"
            )
            more = more or _SAFE_REUSE
        current = f"{access.op} of {tensor.name}{text_of_region(key)}"
        return SimulationError(
            kind,
            f"{current} by {self.place(access.agent)} in launch {access.epoch} --> {access.loc}\n"
            f"{relation}\n{self.describe(event)}\nfirst at {tensor.name}{list(at)}"
            f"{more or self._scopes(event, access)}\n"
            + self.last_events({access.agent, int(self.events.agent[event])}),
            event=event,
        )

    def _scopes(self, event: int, access: Access) -> str:
        """Explain why two atomic accesses conflict."""
        if not (self.events.scope[event] and access.scope):
            return ""
        if not self.compatible(event, access):
            return "\nboth are atomic, but not at scopes that include each other"
        return (
            "\nboth are atomic, but what followed the load led to the store, and no release and "
            "acquire orders the two: the load may be late and return the stored value"
        )


class Tensor:
    """Tensor in global memory: of one rank, or symmetric with the rank as first axis."""

    def __init__(self, memory: Memory, name: str, shape: tuple, dtype: np.dtype, *, written: bool):
        self.memory, self.name, self.shape, self.dtype = memory, name, shape, dtype
        self._strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        self.data = uninitialized_array(shape, dtype)
        self.poison = np.ones(shape, np.bool_)
        self.may_be_poison = True
        self.unwritten = ""
        """Explanation of the poison that was stored last, as in ``Memory``."""
        self.written = written
        """True if the program writes the tensor. If not, its reads need no order."""
        self.writes, self.reads = ShadowMemory(memory, shape), ShadowMemory(memory, shape)
        self.by_threads = ThreadRecord(int(np.prod(shape)), dtype.itemsize)
        self.words: dict[int, list[Entry]] = {}
        """Modification order of each word that atomic accesses change."""
        self.changes: dict[int, list[Change]] = {}
        """All changes of each word that atomic accesses change."""
        self.waits: dict[int, list[EndedWait]] = {}
        self.polled: dict[int, list[int]] = {}
        """Polls of each word with a flag since its last change."""
        self._looked: dict[int, list[int]] = {}
        """Atomic loads of each word since its last change, except those of waits and polling
        loops, because what follows these depends on the value."""
        self._observed: dict[int, dict[int, dict[int, int]]] = {}
        """Time at which each agent first observed a value, by word and event of the store."""
        self.ranks: tuple[int, ...] = ()
        """Rank of each index of the first axis, if the tensor is symmetric."""
        self.inserted = False
        """True if the tensor has counters that the compiler inserted."""
        self.segments: Segments | None = None
        """Rows of the current launches, if the tensor is ragged."""

    def element(self, index: tuple) -> str:
        """Format an element: ``flags[1, 0]``."""
        return f"{self.name}[{', '.join(map(str, index))}]"

    @property
    def symmetric(self) -> bool:
        return bool(self.ranks)

    def part(self, rank: int) -> tuple:
        """Return the index of the part of a rank; of all elements if the tensor is its own."""
        return (self.ranks.index(rank),) if self.ranks else (Ellipsis,)

    @property
    def flat(self) -> np.ndarray:
        """Flat index of each element."""
        return self.writes.flat

    def is_blank(self, key: Any) -> bool:
        """Return whether an element of a region has neither an input nor a write."""
        return bool(np.any(self.poison[key] & (self.writes.last[key] == 0)))

    def give(self, key: Any, values: np.ndarray) -> None:
        """Store input of the host."""
        self.data[key] = values
        self.poison[key] = False
        self.may_be_poison = bool(self.poison.any())

    def read(self, key: Any, access: Access) -> tuple[Any, Any]:
        """Return the values and a mask of those that are poison, or None."""
        if self.written:
            self._check_read(key, access)
            event = self.memory.note(self, key, access)
            self.reads.note(key, event, access)
            self._note_threads(key, event, access, Kind.READ)
        return self.contents(key, access.loc, access)

    def contents(self, key: Any, loc: str, access: Access | None = None) -> tuple[Any, Any]:
        """Return values and poison as ``read`` does, without recording an access."""
        poison = self._poison(key)
        if self.segments is not None and access is not None:
            poison = self.segments.stale(key, access, poison)
        if poison is not None:
            self.memory.unwritten = self.unwritten or (
                f"{self.name} is read before it is written --> {loc}; expected an input, or a "
                "write before"
            )
        return self.data[key], poison

    def write(self, key: Any, values: Any, access: Access, poison: Any = None) -> None:
        """Store values. If ``key`` contains an element twice, its values must be equal or those of
        one thread."""
        self._record_write(key, access)
        self.data[key] = values
        if access.accessed is not None and poison is None:
            element = clash(self.data, key, values, access.accessed)
            if element is not None:
                rank, block, _ = (int(v) for v in self.memory.layout.place(access.agent))
                where = f"rank {rank}, {self.memory.layout.names[block]}, in launch {access.epoch}"
                raise two_values(self.name, self._index_of(element), where, access.loc)
        if poison is not None or self.may_be_poison:
            self.poison[key] = False if poison is None else poison
            if poison is not None:
                self.may_be_poison, self.unwritten = True, self.memory.unwritten
        self._changed(key)

    def write_first(
        self, index: list[np.ndarray], values: np.ndarray, covered: np.ndarray | None,
        parts: Sequence[tuple[np.ndarray, Access]],
    ) -> bool:  # fmt: skip
        """Store to different elements by the first accesses of their launch to them.

        Args:
            index: index of each value, by axis.
            covered: mask of the values to store; None: all.
            parts: accesses, each with the mask of the values that it stores.

        Returns:
            False, without any effect, if an access must be checked: call ``write`` for each.
        """
        chosen: Any = ... if covered is None else covered
        index, values = [i[chosen].reshape(-1) for i in index], values[chosen].reshape(-1)
        elements = np.ravel_multi_index(tuple(index), self.shape)
        accesses, last = [access for _, access in parts], self.writes.last.reshape(-1)
        if self.segments is not None or self.words or not (
            self.writes.are_earlier(elements, accesses)
            and self.reads.are_earlier(elements, accesses)
        ):  # fmt: skip
            return False
        before, numbers = last[elements], np.arange(len(elements))
        last[elements] = numbers
        if (last[elements] != numbers).any():
            last[elements] = before
            return False
        for stored, access in parts:
            mask = stored[chosen].reshape(-1)
            key = tuple(i[mask] for i in index)
            event = self.memory.note(self, key, access, writes=True)
            last[elements[mask]] = event
            if access.threads is not None and access.accessed is not None:
                later = Later(event, access.accessed, Kind.WRITE, access.thread_time)
                self.by_threads.add_unchecked(access.threads, later)
        if "last" in self.reads.__dict__:
            self.reads.last.reshape(-1)[elements] = 0
        self.data.reshape(-1)[elements] = values
        if self.may_be_poison:
            self.poison.reshape(-1)[elements] = False
        self._changed(())
        return True

    def update(self, key: Any, combine: Callable, values: Any, access: Access) -> None:
        """Change many elements atomically by the ufunc ``combine``. Indices may repeat."""
        poison = self._poison(key)
        if poison is not None:
            raise SimulationError(
                "poison",
                f"{access.op} of {self.name}{text_of_region(key)}, which is uninitialized, by "
                f"{self.memory.place(access.agent)} in launch {access.epoch} --> {access.loc}",
            )
        self._record_write(key, access)
        if any(isinstance(k, np.ndarray) for k in key):
            combine.at(self.data, key, values)
        else:
            self.data[key] = combine(self.data[key], values).astype(self.dtype)
        self._changed(key)

    def look(self, index: tuple, access: Access) -> int:
        """Load a word atomically without using its value. Return the event."""
        self._check_read(index, access)
        event = self.memory.note(self, index, access)
        self.reads.note(index, event, access)
        self._note_threads(index, event, access, Kind.ATOMIC_READ)
        return event

    def look_words(self, indices: list[tuple], access: Access, polls: bool = False) -> list[int]:
        """Load consecutive words by one atomic access. Return the flat index of each."""
        event = self.look(region_of(indices), access)
        flats = [self.flat_index(index) for index in indices]
        if not polls:
            for flat in flats:
                self._looked.setdefault(flat, []).append(event)
        return flats

    def load_word(self, index: tuple, access: Access, newest: bool, polls: bool = False) -> Entry:
        """Load a word atomically: its newest value or, unless ``newest``, an older visible one."""
        return self.load_words([index], access, newest, polls)[0]

    def load_words(
        self, indices: list[tuple], access: Access, newest: bool, polls: bool = False
    ) -> list[Entry]:
        """Load consecutive words by one atomic access. It observes all words of a vector store, or
        none."""
        flats = self.look_words(indices, access, polls)
        histories = [
            self.words.get(flat) or [Entry(self.data[index], 0, {}, bool(self.poison[index]))]
            for flat, index in zip(flats, indices, strict=True)
        ]
        positions = [
            len(entries) - 1
            if newest or len(entries) == 1
            else self.memory.choose_value(
                entries, partial(self._oldest_visible, entries, flat, access)
            )
            for flat, entries in zip(flats, histories, strict=True)
        ]
        if len(positions) > 1:
            make_whole(histories, positions)
        chosen = [entries[i] for entries, i in zip(histories, positions, strict=True)]
        self.note_observed(indices, chosen, {access.agent: access.time})
        return chosen

    def note_observed(
        self, indices: list[tuple], entries: list[Entry], times: Mapping[int, int]
    ) -> None:
        """Note that agents observed these values of the words at these times."""
        for index, entry in zip(indices, entries, strict=True):
            flat = self.flat_index(index)
            if flat in self.words:
                first = self._observed.setdefault(flat, {}).setdefault(entry.event, {})
                for agent, time in times.items():
                    first.setdefault(agent, time)

    def overtaken(self, indices: list[tuple], access: Access) -> int | None:
        """Choose an earlier change of these words before which a store by this access lands.

        None means that the store lands last. Coherence allows each change that neither happens
        before the access nor was observed before it. A read-modify-write stays next to the value
        that it replaced.
        """
        events: list[int] = []
        for number, index in enumerate(indices):
            flat = self.flat_index(index)
            entries = self.words.get(flat, ())
            if all(entry.replaces for entry in entries[1:]):
                return None
            late = entries[self._oldest_visible(entries, flat, access) + 1 :]
            free_events = [entry.event for entry in late if not entry.replaces]
            events = [event for event in events if event in free_events] if number else free_events
        return self.memory.choose_place(events) if events else None

    def store_word(
        self, index: tuple, value: Any, access: Access, sync: Sync, *, causes: Clock | None = None,
        replaces: bool = False, adds: bool = False, combine: Any = None, polls: bool = False,
        before: int | None = None,
    ) -> None:  # fmt: skip
        """Change a word atomically.

        Args:
            replaces: whether a read-modify-write makes the new value from the previous one.
            adds: whether it is an addition.
            combine: commutative function that makes the new value; None: no such function.
            polls: whether a loop that may poll makes it.
            others: as for ``store_words``.
        """
        template = Entry(None, 0, sync, False, causes, replaces, combine, polls)
        self._store([index], [value], access, template, before, adds)

    def store_words(
        self, indices: list[tuple], values: Sequence[Any], access: Access, sync: Sync, *,
        causes: Clock | None = None, before: int | None = None,
    ) -> None:  # fmt: skip
        """Store consecutive words by one atomic access.

        Args:
            sync: what acquiring the new value joins.
            causes: clock of all that led to the store.
            before: event of the change before which the store lands; None: it lands last.
        """
        self._store(indices, values, access, Entry(None, 0, sync, False, causes), before)

    def _store(
        self, indices: list[tuple], values: Sequence[Any], access: Access, template: Entry,
        before: int | None, adds: bool = False,
    ) -> None:  # fmt: skip
        """Store consecutive words. ``template`` is an entry without its value and its event."""
        words = [(index, self.flat_index(index)) for index in indices]
        for index, flat in words:
            if not self.words.get(flat):
                self.words[flat] = [self._without_history(index)]
            if template.causes is not None:
                self._check_looked(index, flat, access, template.causes)
        event = self._record_write(region_of(indices), access)
        for (index, flat), value in zip(words, values, strict=True):
            entries = self.words[flat]
            position = place_of(entries, before)
            change = Change(event, entries[position - 1].value, value, adds)
            self.changes.setdefault(flat, []).append(change)
            if position == len(entries):
                self.data[index] = value
                self.poison[index] = False
            entry = template._replace(value=self.dtype.type(value), event=event)
            self.words[flat] = entries = [*entries[:position], entry, *entries[position:]]
            if len(entries) > _HISTORY:
                self._observed.get(flat, {}).pop(entries.pop(0).event, None)
        self.memory.version += 1
        self.memory.on_write(self)

    def count(self, index: tuple, value: Any) -> None:
        """Change a word that a barrier uses. The barrier itself orders this change."""
        self.data[index] = value
        self.words.pop(self.flat_index(index), None)
        self.memory.version += 1
        self.memory.on_write(self)

    def note_wait(self, index: tuple, relation: str, expected: Any) -> None:
        """Note that the last load of this word ended a wait for ``expected`` by ``relation``."""
        seen = self.newest(index).value
        awaited = EndedWait(int(self.reads.last[index]), relation, expected, seen)
        self.waits.setdefault(self.flat_index(index), []).append(awaited)

    def newest(self, index: tuple, before: int | None = None) -> Entry:
        """Return the newest value of a word, or the one just before a change, without an access."""
        entries = self.words.get(self.flat_index(index))
        if entries:
            return entries[place_of(entries, before) - 1]
        return self._without_history(index)

    def history(self, index: tuple) -> Callable[[], list[Entry] | None]:
        """Return a function of the modification order of a word: another list after each change;
        None if no atomic access has changed the word."""
        return partial(self.words.get, self.flat_index(index))

    def overtakings(self, index: tuple) -> Iterator[tuple[int, int]]:
        """Yield each change that landed late, with an earlier change before which it landed."""
        entries = self.words.get(self.flat_index(index), ())
        for position, entry in enumerate(entries):
            earlier = [e.event for e in entries[position + 1 :] if e.event < entry.event]
            if earlier:
                yield entry.event, earlier[0]

    def _without_history(self, index: tuple) -> Entry:
        event = int(self.writes.last[index])
        return Entry(self.data[index], event, {}, bool(self.poison[index]))

    def _oldest_visible(self, entries: Sequence[Entry], flat: int, access: Access) -> int:
        """Return the index of the newest value whose store, or a load of it, happens before this
        access. Coherence hides older values."""
        events, observed = self.memory.events, self._observed.get(flat, {})
        for position in range(len(entries) - 1, 0, -1):
            event = entries[position].event
            if access.view.covers(events.agent[event], events.time[event]):
                return position
            if any(access.view.covers(*seen) for seen in observed.get(event, {}).items()):
                return position
        return 0

    def _record_write(self, key: Any, access: Access) -> int:
        if self.segments is not None:
            self.segments.refuse_second_write(key, access)
        self._check_write(key, access)
        event = self.memory.note(self, key, access, writes=True)
        if self.segments is not None:
            self.segments.note(key, access, event)
        self.writes.note(key, event, access)
        self.reads.clear(key, access)
        self._note_threads(key, event, access, Kind.ATOMIC if access.scope else Kind.WRITE)
        return event

    def _note_threads(self, key: Any, event: int, access: Access, kind: Kind) -> None:
        """Refuse an access that is not ordered after one by another thread of its block."""
        if access.accessed is None or access.threads is None:
            return
        conflict = self.by_threads.add(
            access.threads, event, access.accessed, kind, access.thread_time
        )
        if conflict is not None:
            before, element = conflict
            index = self._index_of(element)
            raise self.memory.conflict("race", self, key, access, before, index, _AMONG_THREADS)

    def _index_of(self, element: int) -> tuple[int, ...]:
        """Return the index of an element from its flat index."""
        return tuple(int(i) for i in np.unravel_index(element, self.shape))

    def _check_read(self, key: Any, access: Access) -> None:
        """Refuse a read that is not ordered with a write by another agent."""
        conflict = self.writes.unordered(key, access)
        if conflict is not None:
            event, index = conflict
            kind = "reuse" if self.memory.epoch_of(event) > access.epoch else "race"
            raise self.memory.conflict(kind, self, key, access, event, index)

    def _check_write(self, key: Any, access: Access) -> None:
        """Refuse a write that is not ordered with an access by another agent.

        The fault is ``reuse`` if the reader used the value of an earlier write, in this launch or
        an earlier one. Else it is ``race``: the reader should have waited for this write.
        """
        conflict = self.writes.unordered(key, access)
        if conflict is not None:
            raise self.memory.conflict("race", self, key, access, *conflict)
        conflict = self.reads.unordered(key, access)
        if conflict is not None:
            event, index = conflict
            wrote = int(self.writes.last[index])
            served = wrote != 0 and self.memory.epoch_of(wrote) == self.memory.epoch_of(event)
            served &= not self.memory.events.scope[event]
            kind = "reuse" if served else self._kind(event, access)
            raise self.memory.conflict(kind, self, key, access, event, index)

    def _kind(self, event: int, access: Access) -> str:
        """Return the kind of the fault of a change that is not ordered after an event."""
        return "reuse" if access.epoch > self.memory.epoch_of(event) else "race"

    def _check_looked(self, index: tuple, flat: int, access: Access, causes: Clock) -> None:
        """Refuse a change to which an unordered earlier load of the same word led.

        The load might then return the value of the change that it led to itself.
        """
        events = self.memory.events
        for event in self._looked.pop(flat, ()):
            event_time = int(events.agent[event]), int(events.time[event])
            if causes.covers(*event_time) and not access.view.covers(*event_time):
                kind = self._kind(event, access)
                raise self.memory.conflict(kind, self, index, access, event, index)

    def refuse_late(
        self, index: tuple, access: Access, causes: Callable[[], Clock], combine: Any = None
    ) -> None:
        """Refuse a change to which an unordered read-modify-write of another block led, of the same
        word, unless both combine values by one commutative function.

        On a GPU the change might land first, and the read-modify-write replace its value. A block
        is ordered after what it has replaced or observed of the word: the flow of data between its
        threads is not tracked.

        Args:
            causes: returns the clock of all that may have led to the change.
            combine: commutative function of the change, if there is one.
        """
        flat, log, clock = self.flat_index(index), self.memory.events, None
        entries = self.words.get(flat, ())
        if not any(entry.replaces for entry in entries):
            return
        place = self.memory.layout.place
        own, observed = place(access.agent)[:2], self._observed.get(flat, {})
        for entry in reversed(entries):
            agent, time = int(log.agent[entry.event]), int(log.time[entry.event])
            agents = (agent, *observed.get(entry.event, ()))
            if access.view.covers(agent, time) or any(place(a)[:2] == own for a in agents):
                return
            commutes = combine is not None and entry.combine is combine
            if entry.replaces and not entry.polls and not commutes:
                clock = clock or causes()
                if clock.covers(agent, time):
                    kind = self._kind(entry.event, access)
                    raise self.memory.conflict(
                        kind, self, index, access, entry.event, index, _LATE_CHANGE
                    )

    def _poison(self, key: Any) -> Any:
        if not self.may_be_poison:
            return None
        poison = self.poison[key]
        return poison if poison.any() else None

    def _changed(self, key: Any) -> None:
        if self.words:
            touched = self.writes.flat[key]
            for flat in [f for f in self.words if np.any(touched == f)]:
                event = int(self.writes.last.flat[flat])
                self.changes[flat].append(Change(event, None, None, False))
                del self.words[flat]
        self.memory.version += 1
        self.memory.on_write(self)

    def flat_index(self, index: tuple) -> int:
        """Return the flat index of an element."""
        return sum(map(mul, map(int, index), self._strides))
