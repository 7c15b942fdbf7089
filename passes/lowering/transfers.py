"""Elements that a statement writes, each with a fingerprint of the elements in its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import tirx

from ..ir.walk import children_of, op_name
from ..sync.regions.space import NotEvaluable
from .places import NOWHERE, Places, Unknown, flat_index
from .points import Points

ELEMENT_VALUES = (1 << 16, 256, 16, 4, 2, 1)
"""Upper bounds of the values of elements that decide about indices and conditions."""
_FIELDS = ("a", "b", "value")
"""Operands of expressions other than calls."""
_MIX = (0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53)
_PAIR = np.uint64(0x9E37_79B9_7F4A_7C15)


class Transfers:
    """Writes of one form of a statement, at given points.

    Args:
        places: places of the elements of both forms.
        most: upper bound of the values of elements.
    """

    def __init__(self, places: Places, most: int = ELEMENT_VALUES[0]) -> None:
        self.places, self._most = places, most
        self._writes: list[tuple[np.ndarray, np.ndarray]] = []

    def source(
        self, buffer: tirx.Buffer, indices: Sequence[np.ndarray], points: Points
    ) -> np.ndarray:
        """Return the places of elements that are read."""
        raise NotImplementedError

    def targets(
        self, buffer: tirx.Buffer, indices: Sequence[np.ndarray], points: Points
    ) -> list[np.ndarray]:
        """Return the places of all copies of elements that are written."""
        raise NotImplementedError

    def call(self, call: tirx.Call, points: Points) -> None:
        """Record the writes of a call.

        Raises:
            Unknown: the operation is not known.
        """
        raise Unknown(op_name(call) or str(call))

    def run(self, stmt: tirx.Stmt, points: Points) -> Points:
        """Record the writes of ``stmt``; return the points of the statements after it.

        Raises:
            Unknown, NotEvaluable: not all writes are known.
        """
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                points = self.run(inner, points)
        elif isinstance(stmt, tirx.For):
            self.run(stmt.body, points.iterate(stmt))
        elif isinstance(stmt, tirx.IfThenElse):
            holds = points.at_all(stmt.condition).astype(bool)
            self.run(stmt.then_case, points.where(holds))
            if stmt.else_case is not None:
                self.run(stmt.else_case, points.where(~holds))
        elif isinstance(stmt, tirx.BufferStore):
            self._store(stmt, points)
        elif isinstance(stmt, tirx.Evaluate):
            if isinstance(stmt.value, tirx.Call) and points.count:
                self.call(stmt.value, points)
        elif isinstance(stmt, tirx.Bind):
            return points.bound(stmt.var, points.at_all(stmt.value))
        elif isinstance(stmt, (tirx.AttrStmt, tirx.SBlockRealize)):
            for inner in children_of(stmt):
                self.run(inner, points)
        else:
            raise Unknown(type(stmt).__name__)
        return points

    def write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Record writes of ``values`` to ``places``."""
        kept = places != NOWHERE
        self._writes.append((places[kept], np.broadcast_to(values, places.shape)[kept]))

    def writes(self) -> np.ndarray:
        """Return hash values of the different pairs of a place and a fingerprint, in order."""
        pairs = [mix(p).ravel() * _PAIR + v.ravel().astype(np.uint64) for p, v in self._writes]
        pairs = np.sort(np.concatenate([*pairs, np.zeros(0, np.uint64)]))
        return pairs[np.diff(pairs, prepend=~pairs[:1]) != 0]

    def load(self, load: tirx.BufferLoad, points: Points) -> np.ndarray:
        """Return a value of an element that depends only on its place."""
        return (self._load_fingerprint(load, points) % np.uint64(self._most)).astype(np.int64)

    def fingerprint(self, expr: tirx.PrimExpr, points: Points) -> np.ndarray:
        """Return numbers that are equal if ``expr`` reads equal elements, and 0 for zeros."""
        if isinstance(expr, tirx.BufferLoad):
            return self._load_fingerprint(expr, points)
        if isinstance(expr, tirx.Cast):
            return self.fingerprint(expr.value, points)
        if isinstance(expr, tirx.Select):
            return self._choice([expr.condition, expr.true_value, expr.false_value], points)
        if op_name(expr) == "tirx.if_then_else":
            return self._choice(expr.args, points)
        if str(expr.dtype).startswith(("int", "uint", "bool")):
            try:
                return mix(points.at_all(expr))
            except NotEvaluable:
                pass
        is_call = isinstance(expr, tirx.Call)
        parts = expr.args if is_call else [getattr(expr, name, None) for name in _FIELDS]
        total = np.zeros(points.count, np.uint64)
        for part in parts:
            if isinstance(part, tirx.PrimExpr):
                total = total + self.fingerprint(part, points)
        return total

    def _choice(self, args: Sequence[Any], points: Points) -> np.ndarray:
        condition, *values = args
        fingerprints = [self.fingerprint(value, points) for value in values]
        try:
            return np.where(points.at_all(condition).astype(bool), *fingerprints)
        except NotEvaluable:
            return sum(fingerprints, self.fingerprint(condition, points))

    def _load_fingerprint(self, load: tirx.BufferLoad, points: Points) -> np.ndarray:
        if load.predicate is not None:
            raise Unknown("a load with a predicate")
        indices, inside = indices_of(load.buffer, load.indices, points)
        places = self.source(load.buffer, indices, points)
        return np.where(inside, mix(places), np.uint64(0))

    def _store(self, store: tirx.BufferStore, points: Points) -> None:
        buffer = store.buffer
        if store.predicate is not None or self.places.is_variable(buffer):
            raise Unknown(f"a store to {buffer.name}")
        values = self.fingerprint(store.value, points)
        indices, inside = indices_of(buffer, store.indices, points)
        for places in self.targets(buffer, indices, points):
            self.write(np.where(inside, places, NOWHERE), values)


class TileTransfers(Transfers):
    """Writes of a statement on tiles: ``T.copy``, ``T.fill``, ``T.Parallel``."""

    def source(self, buffer, indices, points):
        if self.places.is_variable(buffer):
            return self.places.in_memory(buffer, indices, points)
        return self.places.of_tile(buffer, indices, points)[0]

    def targets(self, buffer, indices, points):
        return self.places.of_tile(buffer, indices, points)

    def copy(self, source: tirx.Call, target: tirx.Call, points: Points) -> None:
        """Record the writes of a copy between two regions."""
        values, inside, sizes = self._region(source, points)
        places = self.source(source.args[0].buffer, values, points)
        fingerprints = np.where(inside, mix(places), np.uint64(0))
        indices, inside, written = self._region(target, points)
        if sizes != written:
            raise Unknown("a copy between regions of different shapes")
        for places in self.targets(target.args[0].buffer, indices, points):
            self.write(np.where(inside, places, NOWHERE), fingerprints)

    def fill(self, target: tirx.Call, value: tirx.PrimExpr, points: Points) -> None:
        """Record the writes of one value to all elements of a region."""
        indices, inside, _ = self._region(target, points)
        fingerprint = self.fingerprint(value, points)
        for places in self.targets(target.args[0].buffer, indices, points):
            self.write(np.where(inside, places, NOWHERE), fingerprint)

    def contains(self, region: tirx.Call, points: Points) -> bool:
        """Return whether all elements of a region are inside of its buffer."""
        return bool(self._region(region, points)[1].all())

    def _region(
        self, region: tirx.Call, points: Points
    ) -> tuple[list[np.ndarray], np.ndarray, list[int]]:
        """Return the indices of all elements of a region at one point, which of them are inside of
        its buffer, and its extents that are not 1."""
        start, _, *extents = region.args
        sizes = [int(points.at_all(extent)[0]) for extent in extents]
        offsets = np.indices(sizes).reshape(len(sizes), -1)
        indices = [
            points.evaluate(index) + offset
            for index, offset in zip(start.indices, offsets, strict=True)
        ]
        buffer = start.buffer
        return *clip_indices(buffer, indices, points), [n for n in sizes if n != 1]


class LoweredTransfers(Transfers):
    """Writes of a statement on elements, by the threads of a block.

    Args:
        calls: functions that record the writes of an operation, by its name.
    """

    def __init__(
        self,
        places: Places,
        calls: dict[str, Callable[[LoweredTransfers, tirx.Call, Points], None]],
        most: int,
    ) -> None:
        super().__init__(places, most)
        self._calls = calls

    def source(self, buffer, indices, points):
        if self.places.is_fragment(buffer):
            return self.registers(buffer, indices, points)[1]
        return np.broadcast_to(self.places.in_memory(buffer, indices, points), points.count)

    def targets(self, buffer, indices, points):
        if self.places.is_fragment(buffer):
            return [self.registers(buffer, indices, points)[0]]
        return [np.broadcast_to(self.places.in_memory(buffer, indices, points), points.count)]

    def registers(
        self, buffer: tirx.Buffer, indices: Sequence[np.ndarray], points: Points
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ``Places.of_register`` of registers of the threads at ``points``."""
        threads = points.at_all(points.thread)
        number = np.broadcast_to(flat_index(buffer, indices, points), points.count)
        return self.places.of_register(buffer.data, number, threads)

    def call(self, call, points):
        if op_name(call) not in self._calls:
            raise Unknown(op_name(call))
        self._calls[op_name(call)](self, call, points)


def mix(places: np.ndarray) -> np.ndarray:
    """Return hash values of integers; that of 0 is 0."""
    bits = np.asarray(places).astype(np.int64).view(np.uint64)
    for factor in _MIX:
        bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(33))


def indices_of(
    buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr], points: Points
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the values of ``indices``, clipped to ``buffer``, and a mask of those inside of it."""
    if any(isinstance(index, tirx.Ramp) for index in indices):
        raise Unknown("a vector")
    return clip_indices(buffer, [points.at_all(index) for index in indices], points)


def clip_indices(
    buffer: tirx.Buffer, indices: list[np.ndarray], points: Points
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return ``indices``, clipped to ``buffer``, and a mask of those inside of it."""
    inside: np.ndarray = np.ones(1, bool)
    kept = []
    for index, extent in zip(indices, buffer.shape, strict=True):
        size = points.evaluate(extent)
        inside = inside & (index >= 0) & (index < size)
        kept.append(np.clip(index, 0, np.maximum(size - 1, 0)))
    return kept, inside
