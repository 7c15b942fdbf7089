"""Stand-in for the driver and the GPUs of several ranks, with streams, events and CUDA graphs.

The host enqueues; then ``run`` executes all ranks. Operations of different streams run in random
order, kernels step by step, unless an event orders them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tileweave.runtime.host.driver import DriverError

Steps = Iterator[Callable[[], bool]]
"""Execution of a kernel: between two steps it waits until the function returns True."""


@dataclass(eq=False)
class Work:
    """Operation in a stream: it runs after others, and occupies the SMs if it is a kernel."""

    after: list[Work]
    kernel: Callable[[], Steps] | None = None
    steps: Steps | None = None
    waits_for: Callable[[], bool] = lambda: True
    is_done: bool = False


@dataclass(eq=False)
class Node:
    """Node of a graph: a kernel, a wait for an event, or the record of one."""

    after: list[Node]
    kernel: Callable[[int], Steps] | None = None
    awaited: Event | None = None
    recorded: Event | None = None

    def __int__(self) -> int:
        return id(self)


@dataclass(eq=False)
class Graph:
    number: int
    nodes: list[Node] = field(default_factory=list)

    def add(self, **fields: Any) -> Node:
        self.nodes.append(Node(**fields))
        return self.nodes[-1]


@dataclass(eq=False)
class Event:
    """Event with the work of a stream, or the nodes of a capture, that it recorded last."""

    work: Work | None = None
    capture: Graph | None = None
    nodes: list[Node] = field(default_factory=list)


class Gpu:
    """GPU of one rank, with its driver.

    Attributes:
        calls: names of the driver functions that were called.
        refuses_removal: whether a graph refuses to remove edges.
    """

    def __init__(self, refuses_removal: bool = False) -> None:
        self.work: list[Work] = []
        self.calls: list[str] = []
        self.refuses_removal = refuses_removal
        self._last: dict[int, Work] = {}
        self._captures: dict[int, Graph] = {}
        """Stream -> graph that captures it."""
        self._nodes: dict[int, list[Node]] = {}
        self._numbers = 0

    def launch(self, stream: int, kernel: Callable[[int], Steps]) -> None:
        """Enqueue a kernel; the argument of ``kernel`` is the number of the launch or replay."""
        if graph := self._captures.get(stream):
            self._nodes[stream] = [graph.add(after=self._nodes[stream], kernel=kernel)]
        else:
            number = self._next()
            self._append(stream, [], lambda: kernel(number))

    def begin_capture(self, stream: int) -> None:
        self._captures[stream], self._nodes[stream] = Graph(self._next()), []

    def fork(self, stream: int, other: int) -> None:
        """Let ``other`` wait for ``stream``, which joins it to the capture of ``stream``."""
        graph = self._captures[stream]
        self._nodes.setdefault(other, [])
        self._nodes[other] = [*self._nodes[other], *self._nodes[stream]]
        self._captures[other] = graph

    def end_capture(self, stream: int) -> Graph:
        graph = self._captures[stream]
        for other in [s for s, g in self._captures.items() if g is graph]:
            del self._captures[other], self._nodes[other]
        return graph

    def replay(self, graph: Graph, stream: int) -> int:
        """Enqueue a graph; return the number of the replay."""
        number, before, copies = self._next(), self._last.get(stream), {}
        recorded: list[tuple[Event, Work]] = []
        for node in _sorted(graph.nodes):
            after = [copies[n] for n in node.after] or ([before] if before else [])
            if node.awaited is not None and node.awaited.work is not None:
                after.append(node.awaited.work)
            kernel = node.kernel
            work = Work(after, None if kernel is None else lambda k=kernel: k(number))
            copies[node] = work
            self.work.append(work)
            if node.recorded is not None:
                recorded.append((node.recorded, work))
        for event, work in recorded:
            event.work, event.capture = work, None
        self._append(stream, [*copies.values()])
        return number

    def destroy(self, stream: int) -> None:
        """Destroy a stream: its work continues, and a new stream may get its handle."""
        self._last.pop(stream, None)

    def call(self, name: str, *args: Any, stream: int | None = None) -> Any:
        """Call a function of the driver, as ``runtime.host.driver.call``."""
        self.calls.append(name)
        return getattr(self, name)(*args)

    def cuEventCreate(self, flags: int) -> Event:
        return Event()

    def cuEventRecord(self, event: Event, stream: int) -> None:
        event.capture, event.work = self._captures.get(stream), self._last.get(stream)
        event.nodes = [*self._nodes.get(stream, [])]

    def cuStreamWaitEvent(self, stream: int, event: Event, flags: int) -> None:
        graph = self._captures.get(stream)
        if flags:
            assert graph is not None, "an external wait outside of a capture"
            node = graph.add(after=self._nodes[stream], awaited=event)
            self._nodes[stream] = [node]
            return
        assert event.capture is graph, "an event of another capture, or of none"
        if graph is not None:
            self._nodes[stream] = list(dict.fromkeys([*self._nodes[stream], *event.nodes]))
        elif event.work is not None:
            self._append(stream, [event.work])

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple:
        graph = self._captures.get(stream)
        if graph is None:
            return 0, 0, None, [], [], 0
        nodes = self._nodes[stream]
        return 1, graph.number, graph, [*nodes], [], len(nodes)

    def cuGraphAddEventRecordNode(
        self, graph: Graph, after: Sequence[Node], count: int, event: Event
    ) -> Node:
        assert count == len(after)
        return graph.add(after=[*after], recorded=event)

    def cuGraphAddDependencies(
        self, graph: Graph, nodes: list[Node], ends: list[Node], data: None, count: int
    ) -> None:
        assert count == 1 and nodes[0] not in ends[0].after, "an edge that exists"
        ends[0].after.append(nodes[0])

    def cuGraphRemoveDependencies(
        self, graph: Graph, nodes: list[Node], ends: list[Node], data: None, count: int
    ) -> None:
        if self.refuses_removal:
            raise DriverError("cuGraphRemoveDependencies: CUDA_ERROR_NOT_SUPPORTED")
        ends[0].after.remove(nodes[0])

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _append(
        self, stream: int, after: list[Work], kernel: Callable[[], Steps] | None = None
    ) -> None:
        before = self._last.get(stream)
        work = Work([*after, *([before] if before else [])], kernel)
        self._last[stream] = work
        self.work.append(work)


def _sorted(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes in an order in which each one follows those before it."""
    done: dict[Node, None] = {}
    while len(done) < len(nodes):
        done |= dict.fromkeys(n for n in nodes if all(before in done for before in n.after))
    return [*done]


def run(gpus: Sequence[Gpu], seed: int, kernels: int) -> bool:
    """Execute all that is enqueued, in random order; return False if it deadlocks.

    Args:
        kernels: number of kernels for which a GPU has room at the same time.
    """
    rng = random.Random(seed)
    waiting = [[*gpu.work] for gpu in gpus]
    running: list[list[Work]] = [[] for _ in gpus]
    while any(waiting) or any(running):
        ranks = [*range(len(gpus))]
        rng.shuffle(ranks)
        if not any(_step(waiting[rank], running[rank], kernels, rng) for rank in ranks):
            return False
    return True


def _step(waiting: list[Work], running: list[Work], kernels: int, rng: random.Random) -> bool:
    """Continue a running kernel of a rank, or start other work; return whether it did."""
    started = [w for w in running if w.waits_for()]
    ready = [
        w for w in waiting
        if all(before.is_done for before in w.after)
        and (w.kernel is None or len(running) < kernels)
    ]  # fmt: skip
    if not (started or ready):
        return False
    work = rng.choice([*started, *ready])
    if work.steps is None:
        waiting.remove(work)
        if work.kernel is None:
            work.is_done = True
            return True
        work.steps = work.kernel()
        running.append(work)
    try:
        work.waits_for = next(work.steps)
    except StopIteration:
        work.is_done = True
        running.remove(work)
    return True
