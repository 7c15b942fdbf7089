"""What a program does in several launches in a row, on all ranks, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from ....builtins.spec import builtin_of
from ...ir.walk import op_name, written_tensors
from ..regions.accesses import Program
from ..regions.footprints import merged_footprints
from ..regions.space import Loop, NotEvaluable, Space
from .events import DATA, Event

_MOST = 1 << 21
"""Iterations of one event that are looked at."""
_SIZE = 512
"""What stands for a symbolic extent."""


class LaunchSpace(Space):
    """All iterations of an event in one launch.

    A value that only the running kernel knows, if it can differ from launch to launch only, is
    taken to be the number of the launch, from 0: a scalar parameter, or an element of memory that
    the kernel itself writes, such as an epoch.
    """

    def __init__(
        self, world_size: int, loops: Sequence[Loop], program: Program, launch: int,
        sizes: frozenset[tirx.Var], written: frozenset[tirx.Var],
    ) -> None:  # fmt: skip
        self._launch, self._written = launch, written
        super().__init__(world_size, loops, program.values, {v: _SIZE for v in sizes})

    def of(self, expr):
        try:
            return super().of(expr)
        except NotEvaluable as error:
            if error.node is not expr or not self._is_epoch(expr):
                raise
            return super().of(self._launch)

    def holds(self, condition: tirx.PrimExpr):
        """``condition``, or true where it is not known."""
        if isinstance(condition, tirx.And):
            return np.logical_and(self.holds(condition.a), self.holds(condition.b))
        try:
            return self.of(condition).astype(np.bool_)
        except NotEvaluable:
            return super().of(1).astype(np.bool_)

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
class LeftOut:
    """What is not looked at, because there is too much of it.

    Attributes:
        event: the operation, or the first access to the tensor, that is left out.
        count: how many there are, of which at most ``limit`` are looked at.
        unit: of what.
    """

    event: Event
    count: int
    limit: int
    unit: str

    @property
    def reason(self) -> str:
        return f"{self.count} {self.unit}, of which at most {self.limit} are looked at"


@dataclass(eq=False)
class Rows:
    """Every time that one event happens, in flat arrays.

    Attributes:
        turn: which launch of the program it is.
        launch, rank, block: who does it; each kernel of the program counts as a launch.
        key: its place among the statements of its block; compared as tuples.
        low, high: of the box on each axis, the rank first; of a flag, ``low`` is its index.
        value: what is added or awaited; None where that is not known.
    """

    event: Event
    turn: int
    launch: np.ndarray
    rank: np.ndarray
    block: np.ndarray
    key: list[np.ndarray]
    low: list[np.ndarray]
    high: list[np.ndarray]
    value: np.ndarray | None = None


class Launches:
    """Evaluates events for a number of launches."""

    def __init__(
        self, func: tirx.PrimFunc, program: Program, events: Sequence[Event], world_size: int
    ) -> None:
        self.events, self.world_size, self._program = events, world_size, program
        self._kernels = 1 + max((e.kernel for e in events), default=0)
        self._written = frozenset(written_tensors(func.body))
        self._sizes = frozenset(
            e for b in func.buffer_map.values() for e in b.shape if isinstance(e, tirx.Var)
        )
        self._ordering = {v for e in events if e.kind not in DATA for _, v in e.trail}
        """Loops in which something is ordered; other loops are one step."""
        self.left_out: dict[Event, LeftOut] = {}
        """Events that happen too often."""
        self.unplaced: set[str] = set()
        """Names of tensors of which a signal may be of any flag, because its place depends on
        data."""

    def rows(self, launch: int) -> list[Rows]:
        """All events of one launch, those of which it is not known where they happen left out."""
        every = (self._rows(event, launch) for event in self.events)
        return [rows for rows in every if rows is not None]

    def _rows(self, event: Event, launch: int) -> Rows | None:
        try:
            space = LaunchSpace(
                self.world_size, event.loops, self._program, launch, self._sizes, self._written
            )
            mask = space.inside
            for condition in event.conditions:
                mask = mask & space.holds(condition)
            starts, extents = self._box(event, space)
            block = space.number_of(event.grid)
        except NotEvaluable:
            if event.kind == "signal" and event.tensor is not None:
                self.unplaced.add(event.tensor.name)
            return None
        value = None
        if event.value is not None:
            try:
                value = space.of(event.value)
            except NotEvaluable:
                value = None
        for steps in self._mergers(event):
            rows = self._flat(event, space, mask, block, starts, extents, value, steps, launch)
            if rows is not None:
                return rows
        return None

    @staticmethod
    def _box(event: Event, space: LaunchSpace) -> tuple[list, list]:
        """Return where an event's box begins and its size; nothing of a wait for a flag whose place
        depends on data."""
        try:
            return [space.of(s) for s in event.starts], [space.of(e) for e in event.extents]
        except NotEvaluable:
            if event.kind != "wait":
                raise
            return [], []

    def _mergers(self, event: Event) -> list[set]:
        """Loops to be taken as one step, best first."""
        if event.kind not in DATA:
            return [set()]
        serial = {v for _, v in event.trail}
        grid = {g.var for g in event.grid}
        parallel = {x.var for x in event.loops} - serial - grid
        return [parallel | (serial - self._ordering), parallel, set()]

    def _flat(
        self, event, space, mask, block, starts, extents, value, steps, launch
    ) -> Rows | None:
        merged = tuple(a for a, x in enumerate(event.loops, 1) if x.var in steps)
        happens = mask.any(axis=merged, keepdims=True)
        box = merged_footprints(starts, extents, mask, merged, happens)
        if box is None:
            return None
        low, size = ([np.where(happens, v, 0) for v in each] for each in box)
        high = [a + n for a, n in zip(low, size, strict=True)]
        key, number = [], event.number
        for at, var in event.trail:
            if var in steps:
                number = at
                break
            key += [space.of(at), space.of(var)]
        key.append(space.of(number))
        columns = [happens, space.rank, block, *key, *low, *high]
        shape = np.broadcast_shapes(*(c.shape for c in columns))
        count = math.prod(shape)
        if count > _MOST:
            self.left_out[event] = LeftOut(event, count, _MOST, "times on all ranks in one launch")
            return None
        self.left_out.pop(event, None)
        if value is not None:
            if any(value.shape[a] > 1 for a in merged):
                value = None
            else:
                columns.append(value)
        flat = np.broadcast_arrays(*columns)
        where = flat[0]
        taken = [c[where] for c in flat[1:]]
        if event.kind not in DATA and taken[0].size:
            taken = list(np.unique(np.stack(taken), axis=1))
        rank, number_of_block, *rest = taken
        if event.by_last and rank.size:
            latest = np.zeros(self.world_size, np.int64)
            np.maximum.at(latest, rank, number_of_block)
            last = number_of_block == latest[rank]
            rank, number_of_block, *rest = (c[last] for c in (rank, number_of_block, *rest))
        key_flat, rest = rest[: len(key)], rest[len(key) :]
        n = len(low)
        number_of_launch = np.full(rank.shape, launch * self._kernels + event.kernel)
        return Rows(
            event, launch, number_of_launch, rank, number_of_block, key_flat, rest[:n],
            rest[n : 2 * n], rest[2 * n] if value is not None else None,
        )  # fmt: skip
