"""All events of a program in several consecutive launches, on all ranks, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from ....builtins.spec import builtin_of
from ...ir.accesses import written_tensors
from ...ir.walk import op_name
from ..regions.accesses import Program
from ..regions.footprints import merged_footprints
from ..regions.space import IterationSpace, Loop, NotEvaluable
from .events import DATA, Event

_MAX_COUNT = 1 << 21
"""Limit of the iterations of one event in one launch; events with more are not verified."""
_SIZE = 512
"""Value that is assumed for a symbolic extent."""


class LaunchSpace(IterationSpace):
    """Iteration space of an event in one launch.

    Some values are known only at run time but differ only between launches. They are assumed to
    equal the number of the launch, counted from 0. These are scalar parameters, and elements of
    memory that the kernel itself writes or that have a constant index, such as an epoch.
    """

    def __init__(
        self, world_size: int, loops: Sequence[Loop], program: Program, launch: int,
        sizes: frozenset[tirx.Var], written: frozenset[tirx.Var],
    ) -> None:  # fmt: skip
        self._launch, self._written = launch, written
        super().__init__(world_size, loops, program.values, {v: _SIZE for v in sizes})

    def evaluate(self, expr):
        try:
            return super().evaluate(expr)
        except NotEvaluable as error:
            if error.node is not expr or not self._is_epoch(expr):
                raise
            return super().evaluate(self._launch)

    def holds(self, condition: tirx.PrimExpr):
        """Evaluate ``condition``; a part that is not known counts as true."""
        if isinstance(condition, tirx.And):
            return np.logical_and(self.holds(condition.a), self.holds(condition.b))
        try:
            return self.evaluate(condition).astype(np.bool_)
        except NotEvaluable:
            return super().evaluate(1).astype(np.bool_)

    def _is_epoch(self, expr) -> bool:
        if isinstance(expr, tirx.Var):
            return not str(expr.dtype).startswith("handle")
        spec = builtin_of(expr)
        if spec is not None and spec.loads and op_name(expr.args[0]) == "tl.access_ptr":
            expr = expr.args[0].args[0]
        if not isinstance(expr, tirx.BufferLoad) or expr.buffer.scope() not in ("", "global"):
            return False
        return expr.buffer.data in self._written or not _varies(expr.indices)


def _varies(indices) -> bool:
    return any(not isinstance(i, tirx.IntImm) for i in indices)


@dataclass(frozen=True)
class UnverifiedEvent:
    """An event or a tensor that is not verified because it is too large.

    Attributes:
        event: the operation, or the first access to the tensor.
        count: number of items to analyze.
        limit: maximum of ``count``.
        unit: name of the counted items.
    """

    event: Event
    count: int
    limit: int
    unit: str

    @property
    def reason(self) -> str:
        return f"{self.count} {self.unit}, more than the limit of {self.limit}"


@dataclass(eq=False)
class Rows:
    """All occurrences of one event in one launch, as flat arrays.

    Attributes:
        program_launch: number of the launch of the program.
        launch, rank, block: launch, rank and block of each occurrence. Each kernel of the program
            counts as a launch.
        key: position among the statements of the block; positions compare as tuples.
        low, high: box on each axis (0 is the rank axis); for a flag, ``low`` is its index.
        value: value that is added, stored or awaited; None if it is not known.
    """

    event: Event
    program_launch: int
    launch: np.ndarray
    rank: np.ndarray
    block: np.ndarray
    key: list[np.ndarray]
    low: list[np.ndarray]
    high: list[np.ndarray]
    value: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class _EventPoints:
    """One event, evaluated in its whole iteration space; the arrays broadcast."""

    event: Event
    space: LaunchSpace
    mask: np.ndarray
    block: np.ndarray
    starts: list[np.ndarray]
    extents: list[np.ndarray]
    value: np.ndarray | None


class Launches:
    """Evaluate events for a number of launches."""

    def __init__(
        self, func: tirx.PrimFunc, program: Program, events: Sequence[Event], world_size: int
    ) -> None:
        self.events, self.world_size, self._program = events, world_size, program
        self._kernels = 1 + max((e.kernel for e in events), default=0)
        self._written = frozenset(written_tensors(func.body))
        self._sizes = frozenset(
            e for b in func.buffer_map.values() for e in b.shape if isinstance(e, tirx.Var)
        )
        self._ordering = {v for e in events if e.kind not in DATA for _, v in e.serial_loops}
        """Variables of the loops that contain synchronization; accesses of other loops merge."""
        self.unverified: dict[Event, UnverifiedEvent] = {}
        """Events that happen too often to be verified."""
        self.unplaced: set[str] = set()
        """Names of tensors with a signal that may be for any flag, as its index depends on data."""

    def rows(self, launch: int) -> list[Rows]:
        """Return all events of one launch, except those whose place is not known."""
        rows = (self._rows(event, launch) for event in self.events)
        return [r for r in rows if r is not None]

    def _rows(self, event: Event, launch: int) -> Rows | None:
        try:
            evaluated = self._evaluate(event, launch)
        except NotEvaluable:
            if event.kind == "signal" and event.tensor is not None:
                self.unplaced.add(event.tensor.name)
            return None
        for merged in self._mergers(event):
            rows = self._flat(evaluated, merged, launch)
            if rows is not None:
                return rows
        return None

    def _evaluate(self, event: Event, launch: int) -> _EventPoints:
        space = LaunchSpace(
            self.world_size, event.loops, self._program, launch, self._sizes, self._written
        )
        mask = space.inside
        for condition in event.conditions:
            mask = mask & space.holds(condition)
        starts, extents = self._box(event, space)
        block = space.block_number(event.grid)
        value = None
        if event.value is not None:
            try:
                value = space.evaluate(event.value)
            except NotEvaluable:
                value = None
        return _EventPoints(event, space, mask, block, starts, extents, value)

    @staticmethod
    def _box(event: Event, space: LaunchSpace) -> tuple[list, list]:
        """Return the starts and extents of an event's box.

        They are empty for a wait for a flag whose index depends on data.
        """
        try:
            return [space.evaluate(s) for s in event.starts], [
                space.evaluate(e) for e in event.extents
            ]
        except NotEvaluable:
            if event.kind != "wait":
                raise
            return [], []

    def _mergers(self, event: Event) -> list[set]:
        """Return sets of loop variables; the boxes of each set's loops can merge. Best first."""
        if event.kind not in DATA:
            return [set()]
        serial = {v for _, v in event.serial_loops}
        grid = {g.var for g in event.grid}
        parallel = {x.var for x in event.loops} - serial - grid
        return [parallel | (serial - self._ordering), parallel, set()]

    def _flat(self, evaluated: _EventPoints, merged: set, launch: int) -> Rows | None:
        """Return the occurrences of an event, with boxes merged along the loops ``merged``.

        Return None if the boxes do not merge, or if there are too many occurrences.
        """
        event, space, mask = evaluated.event, evaluated.space, evaluated.mask
        axes = tuple(a for a, x in enumerate(event.loops, 1) if x.var in merged)
        happens = mask.any(axis=axes, keepdims=True)
        box = merged_footprints(evaluated.starts, evaluated.extents, mask, axes, happens)
        if box is None:
            return None
        low, size = ([np.where(happens, v, 0) for v in values] for values in box)
        high = [a + n for a, n in zip(low, size, strict=True)]
        key = self._key(event, space, merged)
        columns = [happens, space.rank, evaluated.block, *key, *low, *high]
        count = math.prod(np.broadcast_shapes(*(c.shape for c in columns)))
        if count > _MAX_COUNT:
            unit = "times on all ranks in one launch"
            self.unverified[event] = UnverifiedEvent(event, count, _MAX_COUNT, unit)
            return None
        self.unverified.pop(event, None)
        value = evaluated.value
        if value is not None and any(value.shape[a] > 1 for a in axes):
            value = None
        if value is not None:
            columns.append(value)
        active, *flat = np.broadcast_arrays(*columns)
        rank, block, *fields = self._occurrences(event, [c[active] for c in flat])
        key, fields = fields[: len(key)], fields[len(key) :]
        n = len(low)
        number = np.full(rank.shape, launch * self._kernels + event.kernel)
        return Rows(
            event, launch, number, rank, block, key, fields[:n], fields[n : 2 * n],
            fields[2 * n] if value is not None else None,
        )  # fmt: skip

    @staticmethod
    def _key(event: Event, space: LaunchSpace, merged: set) -> list[np.ndarray]:
        """Return the position of an event in its block, outside of the loops ``merged``."""
        key, number = [], event.number
        for loop_number, variable in event.serial_loops:
            if variable in merged:
                number = loop_number
                break
            key += [space.evaluate(loop_number), space.evaluate(variable)]
        return [*key, space.evaluate(number)]

    def _occurrences(self, event: Event, columns: list[np.ndarray]) -> list[np.ndarray]:
        """Drop duplicates of synchronization, and all but the last block if only that takes part.

        Args:
            columns: flat arrays; the first two are the rank and the block.
        """
        if event.kind not in DATA and columns[0].size:
            columns = list(np.unique(np.stack(columns), axis=1))
        rank, block = columns[:2]
        if event.by_last and rank.size:
            last_block = np.zeros(self.world_size, np.int64)
            np.maximum.at(last_block, rank, block)
            columns = [c[block == last_block[rank]] for c in columns]
        return columns
