"""Search of all interleavings by dynamic partial-order reduction.

A process is a block, some threads of a block in a branch of their own, or a stream of a plan. A
step is what a process does between two points where others may run. Steps of different processes
are dependent if they access the same word atomically and one of them writes, if one arrives at a
barrier and the other leaves it, or if both need the same free SM. Ordinary accesses need no such
rule: those that conflict are ordered by steps that are dependent, or a race is reported in any
interleaving.

The search executes a schedule, finds pairs of dependent steps that nothing else orders, and notes
at the state before the first of them which process must run there to reverse the pair. Sleep sets
prevent that a schedule is executed that is equivalent to an earlier one.

Source: source-DPOR with sleep sets, Abdulla, Aronis, Jonsson and Sagonas, "Optimal dynamic
partial order reduction", POPL 2014; the pairs of steps and the waits that disable a process follow
Flanagan and Godefroid, "Dynamic partial-order reduction for model checking software", POPL 2005.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

READ, WRITE, ARRIVE = 1, 2, 4
"""Kinds of accesses of a step. Only two reads, and two arrivals at a barrier, are independent."""

Process = tuple[int, ...]
"""Number of the step of the host that started it, and of the block; then of the threads."""
Footprint = dict[tuple, int]
"""Kinds of the accesses of a step, by word or barrier."""
Snapshot = list[tuple]
"""Reads of a process in an iteration of a polling loop: tensor, index, bytes."""


class CutShort(Exception):
    """The schedule need not be executed further: an equivalent one is executed elsewhere."""


def conflict(one: int, other: int) -> bool:
    """Return whether accesses of these kinds are dependent."""
    return (one | other) not in (READ, ARRIVE)


def independent(one: Footprint, other: Footprint) -> bool:
    return not any(key in other and conflict(kind, other[key]) for key, kind in one.items())


@dataclass
class StepEffects:
    """Effects of one step.

    Attributes:
        before: value of each word, or phase of each barrier, before its first change in the step.
        guard: word or barrier for which the step waited.
        holds: whether the wait ends for this value or phase.
        first_event: number of the first access of the step in the log of the memory.
        spun: whether the step ended before an iteration of a loop that polls.
    """

    footprint: Footprint
    before: dict[tuple, Any] = field(default_factory=dict)
    guard: tuple | None = None
    holds: Callable[[Any], bool] = lambda value: True
    first_event: int = 0
    spun: bool = False


@dataclass
class Node:
    """A state of the current schedule, and the step that it executes there.

    Attributes:
        enabled: processes that can run.
        sleep: processes whose step here leads to no new schedule, with the step's footprint.
        process: process that runs; None if it is still to be chosen.
        backtrack: processes that must run here, in turn.
        choices: alternative taken and number of alternatives of each choice within the step.
        touched: union of the footprints of all alternatives so far.
        stuck: processes in a polling loop that ends only if one of these values changes.
        polls: processes of which no such value has changed.
        past: steps that happen before this one, as a bit mask.
    """

    enabled: frozenset[Process]
    sleep: dict[Process, Footprint]
    process: Process | None = None
    backtrack: set[Process] = field(default_factory=set)
    choices: list[list[int]] = field(default_factory=list)
    touched: Footprint = field(default_factory=dict)
    stuck: dict[Process, Snapshot] = field(default_factory=dict)
    polls: frozenset[Process] = frozenset()
    step: StepEffects = field(default_factory=lambda: StepEffects({}))
    past: int = 0


class Search:
    """Depth-first search over the schedules of a deterministic machine, which restarts for each."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._retries = False
        self.restart()

    def restart(self) -> None:
        """Begin the next schedule."""
        self.depth, self._fresh = 0, max(0, len(self.nodes) - 1)
        self._last: dict[Process, int] = {}
        """Last step of each process."""
        self._accesses: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
        """Step and kind of all accesses of each word or barrier."""
        self._stuck: dict[Process, Snapshot] = {}
        self.causes: dict[Process, list[int]] = defaultdict(list)
        """Steps without which the next step of a process would not be possible."""
        self._polling: set[Process] = set()
        """Processes that have begun a loop that polls."""
        self._first_events: list[int] = []
        """Number of the first access of each step in the log of the memory."""
        self._choice = 0

    @property
    def now(self) -> int:
        """Number of the current step."""
        return self.depth - 1

    def pick(
        self, able: Collection[Process], unchanged: Callable[[Snapshot], bool]
    ) -> Process | None:
        """Return the process that runs next; None if none can.

        Args:
            able: processes that wait for nothing.
            unchanged: whether the memory still has these values.

        Raises:
            CutShort: all that can run are asleep.
        """
        if self.depth < len(self.nodes):
            self._stuck.update(self.nodes[self.depth].stuck)
        polls = frozenset(p for p in able if p in self._stuck and unchanged(self._stuck[p]))
        enabled = frozenset(able) - polls
        if not enabled:
            return None
        if self.depth == len(self.nodes):
            self.nodes.append(self.new_node(enabled))
        node = self.nodes[self.depth]
        node.enabled, node.polls = enabled, polls
        if node.process is None:
            awake = enabled - node.sleep.keys()
            if not awake:
                raise CutShort
            node.process = self._preferred(awake)
            node.backtrack.add(node.process)
        self.depth, self._choice = self.depth + 1, 0
        self._stuck.pop(node.process, None)
        return node.process

    def new_node(self, enabled: frozenset[Process]) -> Node:
        """Return the node of a state that the search enters."""
        if not self.nodes:
            return Node(enabled, {})
        before = self.nodes[-1]
        sleep = {
            process: footprint
            for process, footprint in before.sleep.items()
            if process != before.process and independent(footprint, before.step.footprint)
        }
        return Node(enabled, sleep)

    def _preferred(self, awake: Collection[Process]) -> Process:
        """Let a process run until it waits or polls, because most steps are independent."""
        before = self.nodes[self.depth - 1] if self.depth else None
        if before is not None and before.process in awake and not before.step.spun:
            return before.process
        others = [p for p in awake if before is None or p != before.process]
        return min(others or awake)

    def choose(self, count: int) -> int:
        """Choose one of ``count`` alternatives within the current step."""
        if count == 1:
            return 0
        choices = self.nodes[self.now].choices
        if self._choice == len(choices):
            choices.append([0, count])
        taken, number = choices[self._choice]
        assert number == count, "the steps of a schedule differ when they are repeated"
        self._choice += 1
        return taken

    def has_chosen(self, step: int) -> bool:
        """Return whether a step took another alternative than the first one."""
        return any(taken for taken, _ in self.nodes[step].choices)

    def is_past(self, event: int, past: int) -> bool:
        """Return whether the step of an access is one of ``past``, steps before the current one."""
        after = bisect_right(self._first_events, event)
        return after > 0 and bool(past >> (after - 1) & 1)

    def past_of(self, process: Process, footprint: Footprint) -> int:
        """Return the steps that happen before a step of this process with this footprint."""
        past = self._own_past(process)
        for key, kind in footprint.items():
            for step, other in reversed(self._accesses.get(key, ())):
                if conflict(kind, other):
                    past |= self._until(step)
                    if other & WRITE:
                        break
        return past

    def _own_past(self, process: Process) -> int:
        past = 0
        for step in self.causes[process]:
            past |= self._until(step)
        return past | (self._until(self._last[process]) if process in self._last else 0)

    def _until(self, step: int) -> int:
        return self.nodes[step].past | 1 << step

    def executed(self, step: StepEffects) -> None:
        """Note what the current step did, and where the steps that it races with are reversed."""
        node = self.nodes[self.now]
        assert node.process is not None
        self._first_events.append(step.first_event)
        node.step, node.past = step, self.past_of(node.process, step.footprint)
        for key, kind in step.footprint.items():
            node.touched[key] = node.touched.get(key, 0) | kind
        if self.now >= self._fresh:
            self.reverse_races(node)
        self.causes[node.process].clear()
        self._last[node.process] = self.now
        for key, kind in step.footprint.items():
            self._accesses[key].append((self.now, kind))
        if step.spun:
            self._polling.add(node.process)

    def reverse_races(self, node: Node) -> None:
        """Make other schedules execute the current step before each step that it races with."""
        for step in set(self._races(node)):
            self._reverse(step)

    def _races(self, node: Node) -> Iterator[int]:
        process = node.process
        assert process is not None
        earlier = self._own_past(process)
        for key, kind in node.step.footprint.items():
            for step, other in reversed(self._accesses.get(key, ())):
                if not conflict(kind, other):
                    continue
                if earlier >> step & 1:
                    if other & WRITE:
                        break
                    continue
                if self._enables(step, node.step):
                    continue
                yield step
                # A polling read before this step may turn out to be impossible.
                if other & WRITE and process not in self._polling:
                    break

    def _enables(self, earlier: int, step: StepEffects) -> bool:
        """Return whether the wait of a step cannot end just before an earlier step."""
        before = self.nodes[earlier].step.before
        if step.guard not in before or self.has_chosen(earlier):
            return False
        return not step.holds(before[step.guard])

    def _reverse(self, before: int) -> None:
        """Make a process run at the state before a step that leads to the current step first."""
        node = self.nodes[before]
        steps = [
            step
            for step in range(before + 1, self.depth)
            if not self.nodes[step].past >> before & 1
        ]
        if steps[-1:] != [self.now]:
            steps.append(self.now)
        among = sum(1 << step for step in steps)
        first: dict[Process, int] = {}
        for step in steps:
            process = self.nodes[step].process
            assert process is not None
            first.setdefault(process, step)
        initials = {p for p, step in first.items() if not self.nodes[step].past & among}
        if self.nodes[self.now].process in initials & node.polls:
            return  # another iteration of a polling loop that changes nothing
        if initials & (node.backtrack | node.sleep.keys()):
            return
        able = initials & node.enabled
        node.backtrack |= {min(able)} if able else node.enabled

    def note_stuck(self, process: Process, snapshot: Snapshot) -> None:
        """Note that the current step can only be repeated until one of these values changes.

        Raises:
            CutShort: always. The next schedule runs another process here.
        """
        node = self.nodes[self.now]
        node.stuck[process] = snapshot
        node.process, node.choices, node.touched = None, [], {}
        node.backtrack.discard(process)
        self._retries = True
        raise CutShort

    def advance(self) -> bool:
        """Prepare the next schedule; return False if there is none."""
        if self._retries:
            self._retries = False
            if not self.nodes[-1].backtrack:
                return True
        while self.nodes:
            node = self.nodes[-1]
            if self._has_next(node):
                return True
            self.nodes.pop()
        return False

    @staticmethod
    def _has_next(node: Node) -> bool:
        """Prepare the next alternative or process at a node."""
        if node.process is not None:
            while node.choices and node.choices[-1][0] + 1 == node.choices[-1][1]:
                node.choices.pop()
            if node.choices:
                node.choices[-1][0] += 1
                return True
            node.sleep[node.process] = node.touched
        waiting = [p for p in node.backtrack if p not in node.sleep and p not in node.stuck]
        node.process, node.touched = (min(waiting) if waiting else None), {}
        return bool(waiting)
