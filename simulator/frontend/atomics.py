"""Atomic accesses of words: their effect on values and on the happens-before order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..machine.block import Frame
from ..memory.alignment import require_aligned
from ..memory.history import Entry
from ..memory.memory import Tensor
from ..memory.order import LEVEL, SYS, Sync, merge
from ..memory.threads import EACH_THREAD, ElementAccess, Executors
from ..report.errors import SimulationError
from .accesses import GlobalRef, out_of_bounds

ThreadGroups = tuple[int, ...]


@dataclass(frozen=True)
class Word:
    """One atomic operation of a program, with its semantics and scope."""

    ref: GlobalRef
    sem: str
    scope: str
    combine: Any = None
    """Commutative function of a read-modify-write; None: another change."""

    @property
    def level(self) -> int:
        return SYS if self.sem == "volatile" else LEVEL[self.scope]

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel")

    def load(
        self, frame: Frame, tensor: Tensor, index: tuple, thread_groups: ThreadGroups, newest=False
    ):
        """Load a word; return the value and whether it is poison."""
        return self.load_all(frame, tensor, [index], thread_groups, newest)[0]

    def load_all(
        self,
        frame: Frame,
        tensor: Tensor,
        words: list[tuple],
        thread_groups: ThreadGroups,
        newest=False,
        accessed: Callable[[], ElementAccess] | None = None,
    ) -> list[tuple[Any, bool]]:
        """Load consecutive words by one access; return each value and whether it is poison."""
        block = frame.block
        first, *others = block.loaders(thread_groups)
        polls = newest or frame.polls
        accessed = None if polls else accessed
        access = block.access(first, self.ref.op, self.ref.loc, self.level, accessed=accessed)
        entries = tensor.load_words(words, access, newest or frame.newest, polls)
        for other in others:
            access = block.access(other, self.ref.op, self.ref.loc, self.level)
            tensor.look_words(words, access, polls)
        for entry in entries:
            self._observe(block.order, thread_groups, entry)
        if len(thread_groups) > 1:
            tensor.note_observed(words, entries, block.order.times(thread_groups))
        return [(entry.value, entry.poisoned) for entry in entries]

    def look(self, frame: Frame, tensor: Tensor, index: tuple, thread_groups: ThreadGroups) -> None:
        """Record one load for all loads of a wait that do not end it."""
        access = frame.block.access(thread_groups, self.ref.op, self.ref.loc, self.level)
        tensor.look(index, access)

    def store(
        self,
        frame: Frame,
        tensor: Tensor,
        words: list[tuple],
        thread_groups: ThreadGroups,
        values: list,
        accessed: Callable[[], ElementAccess] | None = None,
    ) -> None:
        """Store consecutive words by one access."""
        block = frame.block
        access = block.access(
            thread_groups, self.ref.op, self.ref.loc, self.level, accessed=accessed
        )
        for index in words:
            tensor.refuse_late(index, access, lambda: block.causes(thread_groups))
        sync = self._publish(block.order, thread_groups)
        before = tensor.overtaken(words, access)
        tensor.store_words(
            words, values, access, sync, causes=block.causes(thread_groups), before=before
        )

    def change(
        self,
        frame: Frame,
        tensor: Tensor,
        index: tuple,
        thread_groups: ThreadGroups,
        f: Callable[[Any], Any],
        accessed: Callable[[], ElementAccess] | None = None,
    ) -> Any:
        """Replace a value by ``f`` of it: the newest one, unless the change lands late. Return the
        old value."""
        block = frame.block
        access = block.access(
            thread_groups, self.ref.op, self.ref.loc, self.level, accessed=accessed
        )
        tensor.refuse_late(index, access, lambda: block.causes(thread_groups), self.combine)
        before = tensor.overtaken([index], access)
        entry = tensor.newest(index, before)
        if entry.poisoned:
            raise unwritten_word(frame, self.ref, index)
        self._observe(block.order, thread_groups, entry)
        sync = merge(entry.sync, self._publish(block.order, thread_groups))
        tensor.store_word(
            index, f(entry.value), access, sync, causes=block.causes(thread_groups), replaces=True,
            adds=self.combine is np.add, combine=self.combine, polls=frame.polls, before=before,
        )  # fmt: skip
        return entry.value

    def _observe(self, order: Any, thread_groups: ThreadGroups, entry: Entry) -> None:
        order.observe(entry.causes)
        if self.acquires:
            order.acquire(thread_groups, entry.sync, self.level)
            return
        for i in thread_groups:
            order.note_seen(i, entry.sync)

    def _publish(self, order: Any, thread_groups: ThreadGroups) -> Sync:
        sync: Sync = {}
        for i in thread_groups:
            sync = merge(sync, order.fences[i])
            if self.releases:
                sync = merge(sync, order.release(i, self.level))
        return sync


def unwritten_word(frame: Frame, ref: GlobalRef, index: tuple) -> SimulationError:
    return SimulationError(
        "poison",
        f"{ref.op} of {ref.name}[{', '.join(map(str, index))}], which is uninitialized, by "
        f"{frame.block.place}; expected an input, such as zeros"
        f"\n --> {ref.loc}",
    )


def places(
    frame: Frame, index: list, *values: Any, each_thread: bool, lanes: int = 1
) -> Iterator[tuple]:
    """Yield each execution: thread groups, position in the vector or None, index, values.

    If nothing differs between threads, all of them together are one execution, unless
    ``each_thread``.
    """
    extra = 1 if lanes > 1 else 0
    vectors = [i for i in index if isinstance(i, np.ndarray)]
    wide = [v for v in values if isinstance(v, np.ndarray) and v.ndim > extra]
    if not vectors and not wide and not each_thread:
        yield frame.mask.thread_groups, None, tuple(int(i) for i in index), values
        return
    if frame.space is not None:
        points_of = frame.space if each_thread else ()
        shape = np.broadcast_shapes(points_of, *(v.shape for v in vectors),
                                    *(v.shape[: v.ndim - extra] for v in wide))  # fmt: skip
        active = np.ones(shape, np.bool_)
        if frame.active is not None:
            active = active & frame.active
        points = [(frame.mask.thread_groups, tuple(p)) for p in np.argwhere(active)]
        shape = active.shape
    else:
        shape = frame.mask.on.shape
        points = frame.mask.each

    def pick(value: Any, position: tuple, trailing: int) -> Any:
        if not isinstance(value, np.ndarray) or value.ndim <= trailing:
            return value
        tail = value.shape[value.ndim - trailing :]
        return np.broadcast_to(value, shape + tail)[position]

    for thread_groups, position in points:
        yield (
            thread_groups,
            position,
            tuple(int(pick(i, position, 0)) for i in index),
            tuple(pick(v, position, extra) for v in values),
        )


def accessed_by(
    frame: Frame, tensor: Tensor, words: list[tuple], position: tuple | None
) -> Callable[[], ElementAccess] | None:
    """Return the function of the elements and threads of one execution of ``places``; None if its
    threads are not known."""
    loop, space, own, mask = frame.loop, frame.space, frame.loop_points, frame.mask
    if space is not None and loop is None:
        return None

    def accessed() -> ElementAccess:
        if space is None or loop is None:
            points = mask.threads if position is None else np.array(position[:1])
            return of_points(EACH_THREAD, points)
        points = np.arange(int(np.prod(space))) if own is None else own.reshape(-1)
        if position is not None:
            points = points[[int(np.ravel_multi_index(position, space))]]
        return of_points(loop, points)

    def of_points(by: Executors, points: np.ndarray) -> ElementAccess:
        elements = [tensor.flat_index(index) for index in words]
        return ElementAccess(by, np.tile(elements, len(points)), np.repeat(points, len(elements)))

    return accessed


def words_at(frame: Frame, ref: GlobalRef, tensor: Tensor, index: tuple, lanes: int) -> list[tuple]:
    """Return the indices of ``lanes`` consecutive words; none if a guard skips the access.

    Raises:
        SimulationError: they are not inside the tensor, and no guard skips them.
    """
    shape = tensor.shape
    in_bounds = [0 <= i < n for i, n in zip(index, shape, strict=True)]
    if not all(in_bounds) or index[-1] + lanes > shape[-1]:
        if ref.clips and (in_bounds[0] or not tensor.symmetric):
            return []
        raise out_of_bounds(frame, ref.name, shape, index, ref.loc)
    if lanes > 1:
        require_aligned(frame, tensor, index, lanes * tensor.dtype.itemsize, ref.op, ref.loc)
    return [(*index[:-1], index[-1] + lane) for lane in range(lanes)]


def gather(frame: Frame, results: list[tuple[Any, Any]], dtype: np.dtype, lanes: int) -> Any:
    """Combine the results of executions, by position, into one value."""
    if len(results) == 1 and (results[0][0] is None or frame.mask.single is not None):
        return results[0][1]
    out = np.zeros(frame.shape + ((lanes,) if lanes > 1 else ()), dtype)
    for position, value in results:
        out[position] = value
    return out
