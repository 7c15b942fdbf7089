"""Streams and their items: kernels, copies, writes of words, waits and events."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.plans.regions import Region
from ...runtime.plans.steps import Copy, CopyValue, WaitValue, WriteValue, name_of_stream
from ..memory.clock import Clock
from ..memory.memory import Access, Tensor
from ..memory.order import SYS, BlockOrder
from ..memory.segments import Segments
from ..memory.threads import ThreadOrder
from ..memory.values import convert
from ..report.errors import SimulationError
from .block import Frame, coordinates
from .steps import Waiting, go
from .word_wait import StreamWait

if TYPE_CHECKING:
    from ..frontend.program import Kernel
    from .machine import Machine

_IDLE = 3
"""Iterations of a polling loop without a change of memory after which other blocks run first."""
_CHUNKS = 3
"""Number of parts of a copy, so that other agents may observe it half done."""


@dataclass(eq=False)
class Coroutine:
    """Unit of scheduling: a resident block, or a stream that copies."""

    name: str
    work: Work
    order: BlockOrder
    frame: Any
    steps: Iterator[Any]
    pace: float
    waiting: Waiting | None = None
    spins: int = 0
    """Iterations of a polling loop since the last change of memory."""
    spun_at: int = -1

    def spin(self, version: int) -> None:
        self.spins = self.spins + 1 if self.spun_at == version else 0
        self.spun_at = version

    def is_idle(self, version: int) -> bool:
        return self.spins >= _IDLE and self.spun_at == version


@dataclass(eq=False)
class Stream:
    """One stream of one rank."""

    rank: int
    name: str | None
    clock: Clock
    """Clock of all that happens before the next item."""
    items: list[Work | Record | WaitEvent]
    work: Work | None = None
    launched: int = 0
    polled: Clock = field(init=False)
    """Clock of what led to the words with flags that its blocks have polled."""

    def __post_init__(self) -> None:
        self.polled = self.clock
        for item in self.items:
            item.stream = self

    def __str__(self) -> str:
        return name_of_stream(self.name)

    @property
    def is_blocked(self) -> bool:
        """True if the stream waits for an event."""
        return self.work is None and bool(self.items)

    def finish(self, work: Work) -> None:
        self.clock, self.work, self.launched = Clock.end(work.ends), None, work.epoch + 1
        self.polled = Clock.end([self.polled, *work.polled])

    @property
    def epoch(self) -> int | None:
        """Number of the current launch; None after the last."""
        now = self.work or next(iter(self.items), None)
        return None if now is None else now.epoch

    def blocked_by(self, machine: Machine) -> Iterator[str]:
        """Yield texts that say why the stream is blocked, if its rank is in no earlier launch."""
        epochs = [s.epoch for s in machine.streams if s.rank == self.rank]
        if self.epoch is None or any(e is not None and e < self.epoch for e in epochs):
            return
        work = self.work
        if work is not None and work.next < work.blocks:
            yield work.has_no_room(machine.resident_blocks)
        elif work is None and self.items:
            item = self.items[0]
            yield f"{self} waits for {item.event.stream} in launch {item.epoch} --> {item.loc}"
        pending = [i for i in self.items if isinstance(i, Work) and i.epoch == self.epoch]
        if pending:
            more = f", and {len(pending) - 1} more after it" if len(pending) > 1 else ""
            yield f"{self}: {pending[0].title} has not started{more} --> {pending[0].loc}"


@dataclass(eq=False)
class Event:
    """A point of a stream. It has a clock after the stream has reached it."""

    stream: str
    clock: Clock | None = None
    polled: Clock | None = None
    """Causes of the words with flags that the stream has polled before."""


@dataclass(eq=False)
class Record:
    """Item that records ``event``."""

    event: Event
    epoch: int
    stream: Stream | None = None


@dataclass(eq=False)
class WaitEvent:
    """Item that makes the stream wait for ``event`` and joins its clock."""

    event: Event
    epoch: int
    loc: str
    stream: Stream | None = None


@dataclass(eq=False, kw_only=True)
class Work:
    """Item of a stream that consists of one or more blocks.

    Attributes:
        enqueue_index: position in the order in which the host enqueued the steps of the rank.
        title, loc: of the step, for reports.
        takes_room: whether each block needs an SM.
    """

    epoch: int
    enqueue_index: int
    title: str
    loc: str
    takes_room: bool = True
    blocks: int = 1
    next: int = 0
    running: int = 0
    stream: Stream = field(init=False)
    ends: list[Clock] = field(default_factory=list)
    """Final clock of each block that has ended."""
    polled: list[Clock] = field(default_factory=list)
    """Causes of the words with flags that each of these blocks has polled."""

    def begin(self) -> None:
        self.stream.work = self

    def start(self, machine: Machine, number: int, pace: float) -> Coroutine:
        """Return the coroutine of block ``number``."""
        raise NotImplementedError

    def end(self) -> None:
        """Check what the ended work has done."""

    def signals(self, tensor: Tensor) -> dict[str, str]:
        """Return the operations that change words of ``tensor`` atomically, by line."""
        return {}

    def has_no_room(self, resident_blocks: int) -> str:
        return (
            f"{self.title} in {self.stream} in launch {self.epoch} needs an SM, and all "
            f"{resident_blocks} are occupied by blocks that do not end (resident_blocks)"
            f" --> {self.loc}"
        )

    def _order(self, machine: Machine, slot: int, threads: ThreadOrder | None = None) -> BlockOrder:
        layout, stream = machine.layout, self.stream
        slot += layout.first[stream.name]
        order = BlockOrder.start(layout, stream.rank, slot, stream.clock, threads)
        order.polled = stream.polled
        return order


@dataclass(eq=False, kw_only=True)
class Launch(Work):
    """Launch of a kernel."""

    kernel: Kernel
    env: list
    extents: tuple[int, ...]
    most_blocks: int | None
    """Number of blocks that run; None: all."""
    tensors: dict[str, Tensor]
    """Tensors by parameter of the program."""

    def __post_init__(self) -> None:
        self.numbers = sampled(self.extents, self.most_blocks)
        self.blocks = len(self.numbers)

    def index(self, number: int) -> tuple[int, ...]:
        return index_in(self.extents, number)

    def start(self, machine: Machine, number: int, pace: float) -> Coroutine:
        kernel = self.kernel
        order = self._order(machine, 1 + number, ThreadOrder(kernel.thread_groups))
        number = self.numbers[number]
        env = list(self.env)
        for (slot, _), i in zip(kernel.grid, self.index(number), strict=True):
            env[slot] = i
        block = kernel.block(machine, self, number, order, env)
        frame = Frame(block, kernel.mask, env)
        return Coroutine(block.name(), self, order, frame, _run_block(kernel, frame), pace)

    @property
    def segments(self) -> list[Segments]:
        """Rows of each ragged tensor of the kernel."""
        return [t.segments for t in self.tensors.values() if t.segments is not None]

    def end(self) -> None:
        for segments in self.segments:
            segments.end_launch(self.stream.rank)

    def signals(self, tensor: Tensor) -> dict[str, str]:
        lines = self.kernel.signals
        names = [name for name, value in self.tensors.items() if value is tensor]
        return {loc: op for name in names for loc, op in lines.get(name, {}).items()}

    def has_no_room(self, resident_blocks: int) -> str:
        of = "" if self.stream.name is None else f" of {self.stream}"
        return (
            f"blocks {self.next} to {self.blocks - 1}{of} have not started: {resident_blocks} fit "
            "at a time (resident_blocks) and none of those ends"
        )


def index_in(grid: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Return the index of a block along each axis of a grid."""
    out = []
    for extent in grid:
        out.append(number % extent)
        number //= extent
    return tuple(out)


def block_names(grid: tuple[int, ...], most: int | None) -> list[str]:
    """Return the names of the blocks of a launch, with the coordinates of each."""
    return [f"block {n}{coordinates(index_in(grid, n))}" for n in sampled(grid, most)]


def sampled(extents: tuple[int, ...], most: int | None) -> Sequence[int]:
    """Return the numbers of at most ``most`` blocks of a grid: those at its corners, which include
    the first and the last one, and others at equal distances."""
    total = math.prod(extents)
    if most is None or most >= total:
        return range(total)
    strides = [math.prod(extents[:axis]) for axis in range(len(extents))]
    ends = itertools.product(*({0, n - 1} for n in extents))
    corners = dict.fromkeys([0, total - 1, *(int(np.dot(end, strides)) for end in ends)])
    chosen = list(corners)[:most]
    others = np.setdiff1d(np.arange(total), chosen)
    between = np.linspace(0, len(others) - 1, most - len(chosen), dtype=int)
    return sorted([*chosen, *others[between].tolist()])


def _run_block(kernel: Kernel, frame: Frame) -> Iterator[Any]:
    yield from go(kernel.body, frame)
    frame.block.require_end()


@dataclass(eq=False, kw_only=True)
class ByStream(Work):
    """Work that the stream does itself."""

    def start(self, machine: Machine, number: int, pace: float) -> Coroutine:
        order = self._order(machine, 0)
        return Coroutine(self.doer, self, order, _Nothing(), self._steps(machine, order), pace)

    @property
    def doer(self) -> str:
        return f"{self.stream} of rank {self.stream.rank}"

    def _steps(self, machine: Machine, order: BlockOrder) -> Iterator[Any]:
        raise NotImplementedError

    def _access(self, order: BlockOrder, scope: int = 0) -> Access:
        agent, time, view = order.actor((0,))
        return Access(agent, time, view, scope, self.title, self.loc, self.epoch)

    def _poison(self, use: str) -> SimulationError:
        """Return the fault of a use of uninitialized memory."""
        place = f"{self.title} in {self.doer} in launch {self.epoch}"
        return SimulationError("poison", f"{place} {use} --> {self.loc}")


@dataclass(eq=False, kw_only=True)
class Await(ByStream):
    """Wait for a word to reach a value: an acquire for what follows in the stream."""

    step: WaitValue
    flag: Tensor

    def _steps(self, machine: Machine, order: BlockOrder) -> Iterator[Any]:
        yield None
        flag, index = self.flag, self.step.flag.key
        want = convert(self.step.value, flag.dtype)

        wait = StreamWait(
            machine, flag, index, "reached", want, flag.element(index), self.step.op, self.loc,
            f"{self.doer} in launch {self.epoch}", self._unwritten,
        )  # fmt: skip
        yield from wait.until_ready(lambda: flag.look(index, self._access(order, SYS)))
        entry = flag.load_word(index, self._access(order, SYS), newest=True, polls=True)
        order.acquire((0,), entry.sync, SYS)
        flag.note_wait(index, "reached", want)

    def _unwritten(self) -> SimulationError:
        what = f"waits for {self.step.flag}, which is uninitialized"
        return self._poison(f"{what}; expected an input, such as zeros")


@dataclass(eq=False, kw_only=True)
class Transfer(ByStream):
    """Copy, or write of words."""

    step: Copy | WriteValue | CopyValue
    dst: Tensor
    src: Tensor | None

    def _steps(self, machine: Machine, order: BlockOrder) -> Iterator[Any]:
        copies = isinstance(self.step, Copy)
        return (self._copy if copies else self._write)(machine, order)

    def signals(self, tensor: Tensor) -> dict[str, str]:
        copies = isinstance(self.step, Copy)
        return {} if copies or self.dst is not tensor else {self.loc: self.step.op}

    def _copy(self, machine: Machine, order: BlockOrder) -> Iterator[Any]:
        step, access = self.step, self._access(order)
        parts = list(_parts(step.dst.key, step.src.key))
        machine.order_parts(parts)
        for dst, src in parts:
            yield None
            values, poison = self.src.read(src, access)
            values = np.array(values)
            poison = None if poison is None else np.array(poison)
            if poison is not None and not self.dst.symmetric:
                raise self._poison(f"reads {step.src}, which is partly uninitialized")
            yield None
            self.dst.write(dst, values, access, poison)

    def _write(self, machine: Machine, order: BlockOrder) -> Iterator[Any]:
        step = self.step
        sources = _words(step.src) if isinstance(step, CopyValue) else [None]
        words = list(zip(_words(step.dst), sources, strict=True))
        machine.order_words(words)
        for dst, src in words:
            yield None
            if src is not None:
                value, poison = self.src.read(src, self._access(order))
                if poison is not None:
                    raise self._poison(f"reads {step.src}, which is partly uninitialized")
                yield None
            else:
                value = convert(step.value, self.dst.dtype)
            access = self._access(order, SYS)
            before = self.dst.overtaken([dst], access)
            self.dst.store_word(dst, value, access, order.release(0, SYS), before=before)


class _Nothing:
    """Frame of work that has no threads."""

    newest = False


def _words(region: Region) -> Iterator[tuple[int, ...]]:
    """Return the indices of the elements of a region."""
    sides = zip(region.start, region.extent, strict=True)
    return itertools.product(*(range(start, start + extent) for start, extent in sides))


def _parts(dst: tuple, src: tuple) -> Iterator[tuple[tuple, tuple]]:
    """Divide two regions of the same shape into the same parts."""
    axes = [
        [axis for axis, part in enumerate(key) if isinstance(part, slice)] for key in (dst, src)
    ]
    for one, other in zip(*axes, strict=True):
        size = dst[one].stop - dst[one].start
        if size == 1:
            continue
        step = -(-size // _CHUNKS)
        for low in range(0, size, step):
            length = min(step, size - low)
            yield _part_of(dst, one, low, length), _part_of(src, other, low, length)
        return
    yield dst, src


def _part_of(key: tuple, axis: int, low: int, length: int) -> tuple:
    start = key[axis].start + low
    return (*key[:axis], slice(start, start + length), *key[axis + 1 :])
