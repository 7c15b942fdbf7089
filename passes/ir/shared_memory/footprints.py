"""Bytes of shared memory that each thread of a block accesses in one statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from tvm import DataType, IRModule, tirx

from ..factors import summands
from ..walk import base_of, calls_in, nodes_in, op_name
from .effects import SHARED, WRITE, Access, Describe, data_of
from .values import WARP, Known, ThreadValues, threads_of

MANY = -2
"""Owner of bytes that several threads access, or any thread."""
_NO_THREAD = -1
_UNITS = (16, 8, 4, 2, 1)


class Tile(NamedTuple):
    """Bytes ``first`` to ``end`` of the allocation ``root``."""

    root: tirx.Var
    first: int
    end: int

    def overlaps(self, other: Tile) -> bool:
        is_same = self.root.same_as(other.root)
        return is_same and self.first < other.end and other.first < self.end


@dataclass(frozen=True)
class Cells:
    """Cells of ``unit`` bytes that a statement accesses, from byte ``first * unit`` on.

    Attributes:
        owner: thread that accesses each cell, ``MANY`` or ``_NO_THREAD``.
        warps: bits of the warps that access each cell.
    """

    unit: int
    first: int
    owner: np.ndarray
    warps: np.ndarray


@dataclass(eq=False)
class Footprint:
    """Accesses of all threads that execute a statement, as spans of ``length`` bytes.

    Attributes:
        root: the allocation.
        begins, threads: first byte and thread of each span.
        by_warp: whether all threads of the warp access the span.
        warps: bits of the warps that access memory.
        repeats: whether two iterations write one place in different threads.
    """

    root: tirx.Var
    begins: np.ndarray
    threads: np.ndarray
    length: int
    by_warp: bool
    repeats: bool = False
    _cells: dict[int, Cells] = field(default_factory=dict)
    _overlaps: dict[tuple[Footprint, bool], list[tuple[int, int]]] = field(default_factory=dict)

    @cached_property
    def unit(self) -> int:
        divisor = int(np.gcd.reduce(np.append(self.begins, self.length)))
        return next(u for u in _UNITS if divisor % u == 0)

    @cached_property
    def warps(self) -> int:
        return sum(1 << int(w) for w in np.unique(self.threads // WARP))

    @cached_property
    def makers(self) -> frozenset[int]:
        """The threads."""
        return frozenset(self.threads.tolist())

    @cached_property
    def key(self) -> bytes:
        spans = np.stack([self.begins, self.threads])
        return repr((self.root.name, self.length, self.by_warp)).encode() + spans.tobytes()

    def cells(self, unit: int) -> Cells:
        """Return the accessed cells of ``unit`` bytes, a divisor of ``self.unit``."""
        if unit not in self._cells:
            self._cells[unit] = self._compute_cells(unit)
        return self._cells[unit]

    def _compute_cells(self, unit: int) -> Cells:
        first = int(self.begins.min()) // unit
        size = (int(self.begins.max()) + self.length) // unit - first
        owner = np.full(size, _NO_THREAD, np.int32)
        warps = np.zeros(size, np.uint32)
        spans = (self.begins // unit - first)[:, None] + np.arange(self.length // unit)
        owners = np.full(spans.shape, MANY, np.int32)
        if not self.by_warp:
            owners[:] = self.threads[:, None]
        owner[spans] = owners
        lost = owner[spans] != owners
        owner[spans[lost]] = MANY
        for warp in np.unique(self.threads // WARP):
            warps[spans[self.threads // WARP == warp]] |= np.uint32(1 << int(warp))
        return Cells(unit, first, owner, warps)

    def overlap(self, other: Footprint, same_thread: bool) -> list[tuple[int, int]]:
        """Return pairs of bits of warps that access one place in different threads.

        Args:
            same_thread: whether accesses of one thread count, too.
        """
        if (other, same_thread) not in self._overlaps:
            self._overlaps[other, same_thread] = _compute_overlap(self, other, same_thread)
        return self._overlaps[other, same_thread]


def _compute_overlap(a: Footprint, b: Footprint, same_thread: bool) -> list[tuple[int, int]]:
    if a.root is not b.root and not a.root.same_as(b.root):
        return []
    unit = min(a.unit, b.unit)
    x, y = a.cells(unit), b.cells(unit)
    first = max(x.first, y.first)
    end = min(x.first + len(x.owner), y.first + len(y.owner))
    if end <= first:
        return []
    ours, theirs = slice(first - x.first, end - x.first), slice(first - y.first, end - y.first)
    left, right = x.owner[ours], y.owner[theirs]
    both = (left != _NO_THREAD) & (right != _NO_THREAD)
    if not same_thread:
        both &= (left != right) | (left == MANY)
    if not both.any():
        return []
    pairs = x.warps[ours][both].astype(np.uint64) << np.uint64(32) | y.warps[theirs][both]
    return [(int(p) >> 32, int(p) & 0xFFFFFFFF) for p in np.unique(pairs)]


def row_sizes(mod: IRModule) -> dict[str, int]:
    """Return the number of elements in a row of tiles in shared memory, by name.

    These are tiles that TileLang stores in the order of their elements, because no operation on
    tiles accesses them. The last index of an access is inside of a row.
    """
    sizes: dict[str, int] = {}
    for block in (b for f in mod.functions.values() for b in nodes_in(f.body, tirx.SBlock)):
        accesses = nodes_in(block.body, tirx.BufferLoad, tirx.BufferStore)
        buffers = [access.buffer for access in accesses] + list(block.alloc_buffers)
        others = set(block.annotations.get("layout_map", {}))
        others.update(a for call in nodes_in(block.body, tirx.Call) for a in call.args)
        for call in calls_in(block.body, lambda c: op_name(c).startswith("tl.tileop.")):
            others.update(load.buffer.data for load in nodes_in(call, tirx.BufferLoad))
        for tile in block.alloc_buffers:
            is_stored_by_rows = tile.data not in others and all(
                b.same_as(tile) for b in buffers if b.data.same_as(tile.data)
            )
            if tile.scope() in SHARED and len(tile.shape) > 1 and is_stored_by_rows:
                sizes[tile.data.name] = 0 if tile.data.name in sizes else int(tile.shape[-1])
    return sizes


class Footprints:
    """Footprints of accesses for the values that variables have now.

    Args:
        rows: result of ``row_sizes``.
    """

    def __init__(self, values: ThreadValues, body: tirx.Stmt, rows: Mapping[str, int]) -> None:
        self.values, self._rows = values, rows
        self.sizes: dict[tirx.Var, int] = {}
        self._places: dict[tirx.Var, tuple[tirx.Var, int]] = {}
        self._tiles: dict[tirx.Var, int] = {}
        self._bounds: dict[Access, int] = {}
        """Results of ``_bound``."""
        self._descriptors: dict[tirx.Var, _Descriptor] = {}
        self._known: dict[bytes, Footprint] = {}
        self._evaluated: dict[tuple[Any, ...], Footprint | None] = {}
        self._sampled: dict[int, int] = {}
        """Number of samples on each axis of the place that was evaluated last."""
        nodes = nodes_in(body, tirx.AllocBuffer, tirx.DeclBuffer, tirx.Bind)
        for stmt in (n for n in nodes if isinstance(n, tirx.AllocBuffer)):
            buffer = stmt.buffer
            self._places[buffer.data] = (buffer.data, 0)
            elements = int(np.prod([int(n) for n in buffer.shape]))
            self.sizes[buffer.data] = -(-elements * _bits(buffer.dtype) // 8)
        for stmt in (n for n in nodes if isinstance(n, tirx.DeclBuffer)):
            self._measure(stmt.buffer)
        for stmt in (n for n in nodes if isinstance(n, tirx.Bind)):
            if op_name(stmt.value) == "tirx.handle_add_byte_offset":
                self._alias(stmt.var, stmt.value)

    def _measure(self, buffer: tirx.Buffer) -> None:
        if buffer.scope() in SHARED:
            elements = int(np.prod([int(n) for n in buffer.shape]))
            size = -(-elements * _bits(buffer.dtype) // 8)
            self._tiles[buffer.data] = max(size, self._tiles.get(buffer.data, 0))

    def tile(self, access: Access) -> Tile:
        """Return the tile that is accessed, or its row if this is known."""
        pointer = access.pointer
        if access.product is not None:
            pointer = self._descriptors[pointer].pointer
        data = data_of(pointer)
        root, first = self._places[data]
        if row := self._row(pointer, data):
            return Tile(root, first + row.start, first + row.stop)
        size = self._tiles.get(data) or self._bound(access, pointer)
        return Tile(root, first, min(first + size, self.sizes[root]))

    def _bound(self, access: Access, pointer: Any) -> int:
        """Return an upper bound of the bytes from the begin of a buffer of unknown size to the end
        of an access of it."""
        if access not in self._bounds:
            bound = self.sizes[self._root(data_of(pointer))[0]]
            if op_name(pointer) == "tirx.tvm_access_ptr" and access.product is None:
                last = self.values.most(pointer.args[2]) * _bits(pointer.args[0].dtype) // 8
                bound = min(bound, last + (access.bytes or self._length(pointer)))
            self._bounds[access] = bound
        return self._bounds[access]

    def _row(self, pointer: Any, data: tirx.Var) -> range | None:
        """Return the bytes, in its tile, of the row of an element; None if it is not known."""
        size = self._rows.get(data.name, 0)
        load = pointer.args[0] if op_name(pointer) == "tirx.address_of" else pointer
        indices = getattr(load, "indices", ())
        if not size or len(indices) != 1:
            return None
        terms = [f * v for f, v in summands(base_of(indices[0]), 1) if f % size == 0]
        start = self.values.constant(sum(terms, tirx.IntImm("int32", 0)))
        itemsize = _bits(load.buffer.dtype) // 8
        return None if start is None else range(start * itemsize, (start + size) * itemsize)

    def _alias(self, variable: tirx.Var, value: Any) -> None:
        offset = 0
        while op_name(value) == "tirx.handle_add_byte_offset":
            offset, value = offset + int(value.args[1]), value.args[0]
        if value in self._places:
            root, before = self._places[value]
            self._places[variable] = (root, before + offset)

    def describe(self, effect: Describe) -> None:
        """Follow a change of a matrix descriptor."""
        call = effect.call
        if op_name(call) == "tl.initialize_wgmma_descriptor":
            layout, leading, stride = (int(a) for a in call.args[2:5])
            row = (0, 128, 64, 32)[layout]
            described = _Descriptor(call.args[1], (), row, leading * 16, stride * 16)
        else:
            described = self._descriptors[effect.descriptor]
            described = replace(described, distances=(*described.distances, call.args[1]))
        self._descriptors[effect.descriptor] = described

    def of(self, access: Access, mask: np.ndarray) -> Footprint | None:
        """Return the bytes that the threads of ``mask`` access; None if they access none."""
        if not mask.any():
            return None
        is_operand = access.product is not None
        root, start, length = self._operand(access) if is_operand else self._element(access)
        if root is None:
            return None
        arrays = [(a.shape, a.tobytes()) for a in (mask, start) if a is not None]
        samples, loops = tuple(self._sampled.items()), tuple(self.values.loops)
        key = (access, length, self.tile(access), samples, loops, *arrays)
        if key not in self._evaluated:
            self._evaluated[key] = self._footprint(root, start, length, mask, access)
        return self._evaluated[key]

    def _footprint(
        self, root: tirx.Var, start: Known, length: int, mask: np.ndarray, access: Access
    ) -> Footprint | None:
        spans = None if start is None else self._spans(root, start, length, mask, access)
        if spans is None:
            threads = np.flatnonzero(threads_of(mask))
            _, first, end = self.tile(access)
            begins = np.full(len(threads), first, np.int64)
            by_warp = access.by_warp or len(threads) > 1
            footprint = Footprint(root, begins, threads, end - first, by_warp)
        else:
            begins, threads, repeats = spans
            if not len(begins):
                return None
            footprint = Footprint(root, begins, threads, length, access.by_warp, repeats)
        return self._known.setdefault(footprint.key, footprint)

    def _spans(
        self, root: tirx.Var, start: np.ndarray, length: int, mask: np.ndarray, access: Access
    ) -> tuple[np.ndarray, np.ndarray, bool] | None:
        """Return the spans of threads; None if samples of unknown values do not lead to all."""
        shape = np.broadcast_shapes(start.shape, mask.shape, (self.values.count,) + (1,) * 11)
        if np.prod(shape) > 1 << 22:
            return None
        begins = np.broadcast_to(start, shape)
        runs = np.broadcast_to(mask, shape) & (begins >= 0) & (begins + length <= self.sizes[root])
        threads = np.broadcast_to(
            np.arange(self.values.count).reshape((-1,) + (1,) * (len(shape) - 1)), shape
        )
        if access.lanes < WARP:
            runs = runs & (threads % WARP < access.lanes)
        if self._sampled:
            _, first, end = self.tile(access)
            inside = runs & (begins >= first) & (begins + length <= end)
            key = tuple(slice(self._sampled.get(axis)) for axis in range(len(shape)))
            every, chosen = (
                np.unique(begins[k][inside[k]] * 1024 + threads[k][inside[k]]) for k in ((), key)
            )
            if not len(chosen) or len(every) > len(chosen):
                return None
            begins, runs, threads = begins[key], runs[key], threads[key]
        repeats = bool(access.mode & WRITE) and self._repeats(begins, threads, runs, length)
        pairs = np.unique(begins[runs] * 1024 + threads[runs])
        return pairs // 1024, pairs % 1024, repeats

    def _repeats(
        self, begins: np.ndarray, threads: np.ndarray, runs: np.ndarray, length: int
    ) -> bool:
        """Return whether different threads access one place in different iterations."""
        loops = [axis for axis in self.values.loops if begins.shape[axis] > 1]
        if not loops:
            return False
        others = [a for a in range(1, begins.ndim - 1) if a not in loops and begins.shape[a] > 1]
        if others:  # samples of unknown values: compare accesses for one of them
            key = tuple(slice(1, 2) if a in others else slice(None) for a in range(begins.ndim))
            begins, threads, runs = begins[key], threads[key], runs[key]
        iteration = np.zeros(begins.shape, np.int64)
        for axis in loops:
            shape = [1] * begins.ndim
            shape[axis] = -1
            count = begins.shape[axis]
            iteration = iteration * count + np.arange(count).reshape(shape)
        cell, thread, number = begins[runs] // length, threads[runs], iteration[runs]
        if not len(cell):
            return False
        order = np.argsort(cell, kind="stable")
        cell, thread, number = cell[order], thread[order], number[order]
        starts = np.flatnonzero(np.diff(cell, prepend=cell[0] - 1))

        def varies(array: np.ndarray) -> np.ndarray:
            return np.minimum.reduceat(array, starts) != np.maximum.reduceat(array, starts)

        return bool((varies(thread) & varies(number)).any())

    def _element(self, access: Access) -> tuple[Any, Any, int]:
        root, start = self._start(access.pointer)
        length = self._length(access.pointer) if access.bytes is None else access.bytes
        return root, start, length

    def _length(self, pointer: Any) -> int:
        name = op_name(pointer)
        if name == "tirx.tvm_access_ptr":
            extent = self.values.constant(pointer.args[3])
            size = 1 << 30 if extent is None else extent * _bits(pointer.args[0].dtype) // 8
            root, _ = self._root(pointer.args[1])
            return max(1, min(size, self.sizes.get(root, 1)))
        if name == "tirx.address_of":
            return self._length(pointer.args[0])
        if name == "tirx.handle_add_byte_offset":
            return self._length(pointer.args[0]) if isinstance(pointer.args[0], tirx.Call) else 1
        vector = pointer.indices[-1]
        lanes = int(vector.lanes) if _is_contiguous(vector) else 1
        return max(1, lanes * _bits(pointer.buffer.dtype) // 8)

    def _root(self, data: tirx.Var) -> tuple[tirx.Var | None, int]:
        return self._places.get(data, (None, 0))

    def _start(
        self, pointer: Any, *distances: tirx.PrimExpr
    ) -> tuple[tirx.Var | None, np.ndarray | None]:
        """Return the allocation and the first byte of a pointer in each thread.

        Args:
            distances: expressions of bytes to add.
        """
        name = op_name(pointer)
        if name == "tirx.handle_add_byte_offset" and isinstance(pointer.args[0], tirx.Call):
            return self._start(pointer.args[0], pointer.args[1], *distances)
        if name == "tirx.tvm_access_ptr":
            data, index, bits = pointer.args[1], pointer.args[2], _bits(pointer.args[0].dtype)
        else:
            node = pointer.args[0] if name == "tirx.address_of" else pointer
            data, bits = node.buffer.data, _bits(node.buffer.dtype)
            index = node.indices[0]
            if len(node.indices) > 1:
                return self._root(data)[0], None
            index = index.base if _is_contiguous(index) else index
        root, offset = self._root(data)
        (first, *more), self._sampled = self.values.places(index, *distances)
        if first is None or any(m is None for m in more):
            return root, None
        return root, offset + first * bits // 8 + sum(more)

    def _operand(self, access: Access) -> tuple[Any, Any, int]:
        """Return the span of rows that an operand of ``wgmma`` is read from."""
        operand, described = access.product, self._descriptors[access.pointer]
        row, leading, stride = described.row, described.leading, described.stride
        units = tirx.Mul(operand.offset, tirx.IntImm(operand.offset.dtype, 16))
        root, first = self._start(described.pointer, *described.distances, units)
        if root is None or first is None:
            return root, None, self.sizes.get(root, 0)
        depth = operand.depth * operand.itemsize
        if operand.k_major:
            length = (operand.extent // 8 - 1) * stride + 8 * (row or 16)
            length += 0 if row else (depth // 16 - 1) * leading
        else:
            width, wide = row or 16, operand.extent * operand.itemsize
            along, across = (stride, leading) if row else (leading, stride)
            length = (operand.depth // 8 - 1) * along + 8 * width + (wide // width - 1) * across
        return root, first // (row or 16) * (row or 16), max(16, length)


@dataclass(frozen=True)
class _Descriptor:
    """Matrix descriptor of ``wgmma``: address, distances in bytes that are added, and layout.

    Attributes:
        row: bytes of a row of the swizzle; 0 for none.
        leading, stride: byte offsets.
    """

    pointer: Any
    distances: tuple[tirx.PrimExpr, ...]
    row: int
    leading: int
    stride: int


def _is_contiguous(index: tirx.PrimExpr) -> bool:
    return (
        isinstance(index, tirx.Ramp)
        and isinstance(index.stride, tirx.IntImm)
        and int(index.stride) == 1
    )


def _bits(dtype: Any) -> int:
    return DataType(str(dtype)).bits
