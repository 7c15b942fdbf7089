"""TileLang's operations on whole tiles: copy, fill, gemm, reduce, scan, atomic addition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx

from ...passes.ir.walk import base_of
from ..machine.block import AsyncCopy, Frame, MBarrier
from ..machine.steps import Step
from ..memory.memory import Access, Tensor
from ..memory.order import GPU, SYS
from ..memory.threads import ElementAccess
from ..memory.values import (
    accumulation_dtype,
    convert,
    is_float,
    numpy_dtype,
    poison_of_product,
    union_of_poison,
)
from ..report.errors import uninitialized, unsupported
from .accesses import GlobalRef, note_clipped, out_of_bounds, require_one_value, uniform
from .numbers import note_contracted, note_operand, require_numbers
from .statements import Statements


class Box(NamedTuple):
    """Elements of a region that are inside its tensor or tile."""

    inside: tuple[Any, ...]
    """The part of the tensor: slices or, for a reshaped view, arrays of indices."""
    part: tuple[slice, ...]
    """This part, in indices of the region."""
    shape: tuple[int, ...]
    """Shape of the region."""
    is_whole: bool
    """True if the region is inside the tensor."""

    def cut(self, values: Any) -> Any:
        """Return the part of an array of the region, or a scalar as it is."""
        return values if self.is_whole or not np.ndim(values) else values[self.part]


@lru_cache(maxsize=1 << 16)
def _clipped(starts: tuple[int, ...], extents: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    inside, part = [], []
    for start, extent, size in zip(starts, extents, shape, strict=True):
        low, high = min(max(start, 0), size), min(max(start + extent, 0), size)
        inside.append(slice(low, max(low, high)))
        part.append(slice(low - start, max(low, high) - start))
    is_whole = all(s.stop - s.start == n for s, n in zip(inside, extents, strict=True))
    return Box(tuple(inside), tuple(part), extents, is_whole)


@lru_cache(maxsize=1 << 10)
def _viewed(
    starts: tuple[int, ...], extents: tuple[int, ...], view: tuple[int, ...], shape: tuple[int, ...]
) -> Box:
    """Return the box of a view of a tensor; ``inside`` has indices of the tensor."""
    box = _clipped(starts, extents, view)
    places = np.ix_(*(np.arange(part.start, part.stop) for part in box.inside))
    return box._replace(inside=np.unravel_index(np.ravel_multi_index(places, view), shape))


class Region(NamedTuple):
    """Box of a tensor or tile, by starts and extents."""

    starts: Callable[[Frame], list]
    extents: Callable[[Frame], tuple[int, ...]]
    ref: GlobalRef | None
    slot: int
    name: str
    scope: str
    loc: str
    view: Callable[[Frame], tuple[int, ...]] | None = None
    """Shape of a reshaped view, in whose indices the box is."""
    constant: Box | None = None
    """Box of a tile if its starts and extents are constants."""

    def box(self, frame: Frame, shape: tuple, symmetric: bool) -> Box:
        """Return the elements inside a tensor or tile of this shape."""
        if self.constant is not None:
            return self.constant
        starts, extents = self.starts(frame), self.extents(frame)
        for start in starts:
            if type(start) is not int:
                what = f"a region of {self.name} that differs between threads,"
                starts = [uniform(s, frame, self.loc, what) for s in starts]
                break
        if symmetric and not 0 <= starts[0] <= shape[0] - extents[0]:
            raise out_of_bounds(frame, self.name, shape, starts, self.loc)
        if self.view is not None:
            return _viewed(tuple(starts), extents, self.view(frame), tuple(shape))
        box = _clipped(tuple(starts), extents, shape)
        if self.ref is not None and not box.is_whole:
            for axis, (start, extent, size) in enumerate(zip(starts, extents, shape, strict=True)):
                if start < 0 or start + extent > size:
                    index = [*starts]
                    index[axis] = start if start < 0 else max(start, size)
                    note_clipped(
                        frame, self.name, shape, axis, index, self.ref.constants, extent, self.loc
                    )
        return box

    def read(
        self, frame: Frame, op: str, start: Callable[[], Access] | None = None,
        divided: bool = False, fragment: Region | None = None,
    ) -> tuple[np.ndarray, Any]:  # fmt: skip
        """Return values, which are zero outside of the tensor, and poison.

        Args:
            start: starts the access to record, if the program writes the tensor; None: an access
                by all active threads.
            divided: whether the threads divide the box as in T.Parallel.
            fragment: the other side, if its layout divides the box.
        """
        tile = None
        if self.ref is None:
            tile = frame.tile(self.slot)
            frame.block.use(tile, frame.mask.overlapping)
            box = self.box(frame, tile.shape, False)
            values, bad = tile.data, tile.poison
            if tile.by_thread:
                values, bad = tile.agreed(frame.mask.threads)
            values, bad = values[box.inside], None if bad is None else bad[box.inside]
            if tile.parted:
                require_one_value(frame, tile, bad, self.loc)
            dtype = tile.dtype
        else:
            tensor = self.ref.tensor(frame)
            box, dtype = self.box(frame, tensor.shape, tensor.symmetric), tensor.dtype
            if not tensor.written:
                values, bad = tensor.contents(box.inside, self.loc)
            elif start is not None:
                values, bad = tensor.read(box.inside, start())
            else:
                accessed = self._accessed(frame, tensor, box, fragment) if divided else None
                thread_groups = frame.mask.overlapping
                access = frame.block.access(thread_groups, op, self.loc, accessed=accessed)
                values, bad = tensor.read(box.inside, access)
        if bad is not None and not bad.any():
            bad = None
        if bad is not None and tile is not None:
            frame.block.note_poison(tile, box.inside, self.loc)
        if box.is_whole:
            return values, bad
        full, poison = np.zeros(box.shape, dtype), None
        full[box.part] = values
        if bad is not None:
            poison = np.zeros(box.shape, np.bool_)
            poison[box.part] = bad
        return full, poison

    def write(
        self, frame: Frame, values: Any, poison: Any, op: str, bulk_source: Any = None,
        bulk: bool = False, divided: bool = False, fragment: Region | None = None,
    ) -> None:  # fmt: skip
        """Store the part inside the tensor.

        Args:
            bulk: whether the copy completes asynchronously.
            divided, fragment: as for ``read``.
        """
        if self.ref is None:
            tile = frame.tile(self.slot)
            frame.block.overwrite(tile)
            box = self.box(frame, tile.shape, False)
            if frame.block.stores:
                frame.block.require_unread(tile, box.inside, self.loc)
            values, bad = self._fitted(frame, box, values, poison, tile.dtype)
            key = (slice(None), *box.inside) if tile.by_thread else box.inside
            tile.data[key] = values
            frame.block.set_poison(tile, key, bad)
            return
        tensor = self.ref.tensor(frame)
        box = self.box(frame, tensor.shape, tensor.symmetric)
        values, bad = self._fitted(frame, box, values, poison, tensor.dtype)
        if bad is not None and np.any(bad) and not tensor.symmetric:
            raise uninitialized(f"{op} to {self.name} of", frame.block, self.loc)
        accessed = self._accessed(frame, tensor, box, fragment) if divided else None
        access = self._access(frame, op, bulk, bulk_source, 0, accessed)
        tensor.write(box.inside, values, access, bad)

    def _fitted(
        self, frame: Frame, box: Box, values: Any, poison: Any, dtype: np.dtype
    ) -> tuple[Any, Any]:
        """Return the values and the poison of the elements inside the tensor."""
        values = box.cut(convert(_fit(values, box.shape, self), dtype))
        if frame.operands is not None:
            require_numbers(frame, self.name, np.ogrid[box.inside], values, None, self.loc)
        return values, None if poison is None else box.cut(_fit(poison, box.shape, self))

    def update(
        self, frame: Frame, ufunc: Any, values: Any, op: str, bulk: bool, scope: int,
        fragment: Region | None,
    ) -> None:  # fmt: skip
        """Combine values with the elements atomically."""
        if self.ref is None:
            before, bad = self.read(frame, op)
            note_operand(frame, self.name, before)
            if bad is not None:
                raise uninitialized(f"{op} to {self.name}, which is", frame.block, self.loc)
            self.write(frame, ufunc(before, _fit(values, before.shape, self)), None, op)
            return
        tensor = self.ref.tensor(frame)
        box = self.box(frame, tensor.shape, tensor.symmetric)
        values, _ = self._fitted(frame, box, values, None, tensor.dtype)
        accessed = self._accessed(frame, tensor, box, fragment)
        access = self._access(frame, op, bulk, None, scope, accessed)
        tensor.update(box.inside, ufunc, values, access)

    def _access(
        self, frame: Frame, op: str, bulk: bool, source: Any, scope: int, accessed: Any = None
    ) -> Access:
        if not bulk:
            thread_groups = frame.mask.overlapping
            return frame.block.access(thread_groups, op, self.loc, scope, accessed=accessed)
        thread_groups = frame.mask.thread_groups
        access = frame.block.bulk_access(thread_groups, op, self.loc, scope, source)
        frame.block.commit(frame.mask)
        return access

    @staticmethod
    def _accessed(
        frame: Frame, tensor: Tensor, box: Box, fragment: Region | None
    ) -> Callable[[], ElementAccess] | None:
        """Return the elements inside the tensor, and the point of the box, or the element of the
        fragment, that accesses each."""
        shape, elements = box.shape, None
        if fragment is not None:
            shape = frame.tile(fragment.slot).shape
            elements = fragment.box(frame, shape, False).inside
            if np.zeros(shape, np.bool_)[elements].size != math.prod(box.shape):
                return None
        loop = frame.mask.loop(tuple(n for n in shape if n != 1))
        if loop is None or frame.space is not None:
            return None

        def accessed() -> ElementAccess:
            points = np.arange(int(np.prod(shape))).reshape(shape)
            points = points if elements is None else points[elements].reshape(box.shape)
            points = points[box.part]
            return ElementAccess(loop, tensor.flat[box.inside].reshape(-1), points.reshape(-1))

        return accessed


def _fit(values: Any, shape: tuple, region: Region) -> Any:
    """Reshape ``values`` to the shape of the box. Axes of extent 1 may differ."""
    if not isinstance(values, np.ndarray) or values.shape == shape or not values.ndim:
        return values
    if [n for n in np.shape(values) if n != 1] != [n for n in shape if n != 1]:
        raise unsupported(
            f"a copy of shape {np.shape(values)} to {region.name} of shape {shape}", region.loc
        )
    return values.reshape(shape)


def region(c: Statements, node: Any, loc: str) -> Region:
    """Compile ``T.region(tensor[starts], mode, extents)``, or a BufferLoad of one element."""
    load, extents = (
        (node, []) if isinstance(node, tirx.BufferLoad) else (node.args[0], node.args[2:])
    )
    buffer = load.buffer
    starts = [base_of(i) for i in load.indices]
    extents = extents or [i.lanes if isinstance(i, tirx.Ramp) else 1 for i in load.indices]
    extents = [e if isinstance(e, tirx.PrimExpr) else tirx.IntImm("int32", int(e)) for e in extents]
    sizes = _sizes(c, extents, buffer.name, loc)
    origin = c.indices(starts, buffer.name, loc)
    if buffer.data in c.globals or buffer.data in c.tiles:
        c.require_type(buffer, loc)
    else:
        raise unsupported(f"tensor {buffer.name} in {c.memory_of(buffer)} memory", loc)
    ref, slot, view, box = None, c.tiles.get(buffer.data, -1), None, None
    literals = [c.constant(e) for e in (*starts, *extents)]
    if buffer.data in c.globals:
        ref = c.guarded(buffer, starts, "", loc)
    if c.is_reshaped(buffer):
        if buffer.data in c.symmetric:
            raise unsupported(f"an operation on tiles of {buffer.name}, a reshaped view,", loc)
        view = _sizes(c, list(buffer.shape), buffer.name, loc)
    elif ref is None and None not in literals:
        box = _clipped(tuple(literals[: len(starts)]), sizes(None), c.made[slot][0])
    return Region(origin, sizes, ref, slot, buffer.name, buffer.scope(), loc, view, box)


def _sizes(c: Statements, extents: list, name: str, loc: str) -> Callable[[Any], tuple[int, ...]]:
    """Compile the extents of a region."""
    values = c.indices(extents, name, loc)
    if all(c.constant(e) is not None for e in extents):
        constants = tuple(map(int, values(None)))
        return lambda frame: constants
    return lambda frame: tuple(map(int, values(frame)))


@dataclass(frozen=True)
class Windows:
    """Part of the matrix of all windows of an image: a row for each place of the window, with the
    elements (row, column, channel) of the window.

    Args:
        image: the tensor (images, height, width, channels); elements outside of it are zero.
        block: expressions of the row and column of the part, in units of its shape.
        shape: rows and columns of the part.
        kernel, stride, dilation, padding: geometry of the windows.
    """

    image: Region
    block: Callable[[Frame], list]
    shape: tuple[int, int]
    kernel: int
    stride: int
    dilation: int
    padding: int

    slot = -1
    scope = "global"

    @property
    def name(self) -> str:
        return self.image.name

    @property
    def ref(self) -> GlobalRef | None:
        return self.image.ref

    @property
    def loc(self) -> str:
        return self.image.loc

    def read(
        self, frame: Frame, op: str, start: Callable[[], Access] | None = None, **_: Any
    ) -> tuple[np.ndarray, Any]:
        """Return values and poison; ``start`` as for ``Region.read``."""
        tensor = self.image.ref.tensor(frame)
        _, height, width, channels = tensor.shape
        (rows, columns), blocks = self.shape, self.block(frame)
        row, column = (
            uniform(block, frame, self.loc) * extent + np.arange(extent)
            for block, extent in zip(blocks, self.shape, strict=True)
        )
        reach = (self.kernel - 1) * self.dilation + 1 - 2 * self.padding
        high, wide = ((size - reach) // self.stride + 1 for size in (height, width))
        image, y, x = row // (high * wide), row // wide % high, row % wide
        place, channel = column // channels, column % channels

        def position(window: np.ndarray, element: np.ndarray) -> np.ndarray:
            first = window * self.stride - self.padding
            return first[:, None] + element * self.dilation

        y, x = position(y, place // self.kernel), position(x, place % self.kernel)
        index = [np.broadcast_to(i, (rows, columns)) for i in (image[:, None], y, x, channel)]
        inside = np.logical_and.reduce(
            [(0 <= i) & (i < n) for i, n in zip(index, tensor.shape, strict=True)]
        )
        access = start() if start else frame.block.access(frame.mask.overlapping, op, self.loc)
        values, bad = tensor.read(tuple(i[inside] for i in index), access)
        out, poison = np.zeros((rows, columns), tensor.dtype), None
        out[inside] = values
        if bad is not None:
            poison = np.zeros(out.shape, np.bool_)
            poison[inside] = bad
        return out, poison


def im2col(c: Statements, call: tirx.Call, loc: str) -> Step:
    image, dst = region(c, call.args[0], loc), region(c, call.args[1], loc)
    shape = tuple(c.made[dst.slot][0][-2:])
    block = c.indices(list(call.args[2:4]), "T.im2col", loc)
    return _copy(c, call, Windows(image, block, shape, *map(int, call.args[4:8])), dst)


def copy(c: Statements, call: tirx.Call, loc: str) -> Step:
    return _copy(c, call, region(c, call.args[0], loc), region(c, call.args[1], loc))


def _copy(c: Statements, call: tirx.Call, src: Region | Windows, dst: Region) -> Step:
    loc = dst.loc
    op = "T." + call.op.name.rsplit(".", 1)[-1]
    bulk = dst.ref is not None and src.scope.startswith("shared")
    barrier = dict(call.annotations.items()).get("barrier") if call.annotations else None
    if barrier is not None and src.ref is not None:
        mbarrier = c.mbarrier(barrier, loc)
        return _async_load(c, call, src, dst, op, mbarrier)
    if op == "T.async_copy" and src.ref is not None:
        return _async_load(c, call, src, dst, op, None)
    if c.pipelined and src.ref is not None and dst.scope.startswith("shared"):
        return _pipelined_load(c, call, src, dst, op)
    fragment = next((side for side in (src, dst) if side.scope == "local.fragment"), None)

    def run(frame: Frame):
        values, poison = src.read(frame, op, divided=True, fragment=fragment)
        source = None
        if bulk and op == "T.tma_copy":  # T.copy itself waits until its source has been read
            tile = frame.tile(src.slot)
            source = tile, src.box(frame, tile.shape, False).inside
        note_operand(frame, src.name, values)
        dst.write(frame, values, poison, op, source, bulk, True, fragment)

    return c.preempted(run, call)


def _pipelined_load(c: Statements, call: Any, src: Region | Windows, dst: Region, op: str) -> Step:
    """Compile a load that TileLang makes asynchronous, with a wait before the tile's first use."""

    def run(frame: Frame):
        block, groups = frame.block, frame.mask.overlapping
        start = partial(block.load_access, groups, op, src.loc, None)
        values, poison = src.read(frame, op, start)
        note_operand(frame, src.name, values)
        dst.write(frame, values, poison, op)
        frame.tile(dst.slot).loaded = block.order.last_load(0)

    return c.preempted(run, call)


def _async_load(
    c: Statements, call: Any, src: Region | Windows, dst: Region, op: str,
    barrier: Callable[[Frame], MBarrier] | None,
) -> Step:  # fmt: skip
    """Compile a load to shared memory for which the program waits: at the mbarrier or, if that is
    None, by T.ptx_wait_group. Until then the tile is poison."""

    def run(frame: Frame):
        block, full = frame.block, barrier(frame) if barrier is not None else None
        access = block.load_access(frame.mask.overlapping, op, src.loc, full)
        values, poison = src.read(frame, op, lambda: access)
        values = np.array(values)
        tile = frame.tile(dst.slot)
        target = dst._replace(constant=dst.box(frame, tile.shape, False))
        wait = "T.ptx_wait_group(0)" if full is None else f"a wait at mbarrier {full.name}"
        flight = AsyncCopy(target.constant.inside, op, src.loc, wait)
        tile.begin_copy(flight)

        def deliver() -> None:
            frame.operands = None  # those of the statement that waits
            tile.copies.remove(flight)
            target.write(frame, values, poison, op)

        if full is not None:
            full.issue(access.time, deliver)
        else:
            block.loads.append((access.time, deliver))

    return c.preempted(run, call)


def fill(c: Statements, call: tirx.Call, loc: str) -> Step:
    dst, value = region(c, call.args[0], loc), c.compile(call.args[1], loc)

    def run(frame: Frame):
        poison = value.poison and value.poison(frame)
        dst.write(frame, value.value(frame), poison, "T.fill", divided=True)

    return c.preempted(run, call)


def gemm(c: Statements, call: tirx.Call, loc: str) -> Step:
    a, b, out = (region(c, call.args[i], loc) for i in range(3))
    transposed = [bool(call.args[i].value) for i in (3, 4)]
    clear = c.compile(call.args[9], loc).value
    accumulator = numpy_dtype(call.args[2].args[0].buffer.dtype)
    wide = (
        np.dtype(np.float32) if is_float(accumulator) and accumulator.itemsize < 8 else accumulator
    )

    def matrix(source, frame, transpose):
        values, poison = source.read(frame, "T.gemm")
        if values.ndim > 2:
            shape = [n for n in values.shape if n != 1]
            values = values.reshape(shape)
            poison = None if poison is None else poison.reshape(shape)
        values = values.astype(wide, copy=False)
        return (values.T, None if poison is None else poison.T) if transpose else (values, poison)

    def run(frame: Frame):
        left, bad_left = matrix(a, frame, transposed[0])
        right, bad_right = matrix(b, frame, transposed[1])
        product, poison = left @ right, poison_of_product(bad_left, bad_right)
        note_contracted(frame, a.name, left, -1)
        note_contracted(frame, b.name, right, -2)
        if not clear(frame):
            before, bad = out.read(frame, "T.gemm")
            note_operand(frame, out.name, before.reshape(product.shape))
            product += before.reshape(product.shape).astype(wide, copy=False)
            poison = union_of_poison(poison, None if bad is None else bad.reshape(product.shape))
        if poison is not None:
            poison = np.broadcast_to(poison, product.shape)
        out.write(frame, product, poison, "T.gemm")

    return c.preempted(run, call)


COMBINE = {
    "sum": np.add, "abssum": np.add, "max": np.fmax, "absmax": np.fmax, "min": np.fmin,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
}  # fmt: skip
"""Ufuncs by the names of TileLang's reductions."""
_PROPAGATES = {np.fmax: np.maximum, np.fmin: np.minimum}
_FIRST = {"max": -np.inf, "absmax": 0, "min": np.inf}
"""Initial values: the result for a row that contains only NaN."""


def reduce(c: Statements, call: tirx.Call, loc: str) -> Step:
    src, dst = region(c, call.args[0], loc), region(c, call.args[1], loc)
    kind, axis = str(call.args[2].value), int(call.args[3])
    clear = c.compile(call.args[4], loc).value
    if kind not in COMBINE:
        raise unsupported(f"T.reduce of type {kind}", loc)
    combine, dtype = COMBINE[kind], numpy_dtype(call.args[0].args[0].buffer.dtype)
    if dtype.itemsize == 2 and call.annotations and call.annotations.get("nan_propagate"):
        combine = _PROPAGATES.get(combine, combine)
    first = {"initial": _FIRST[kind]} if kind in _FIRST and is_float(dtype) else {}

    def run(frame: Frame):
        frame.block.order.threads.barrier_all()
        values, poison = src.read(frame, "T.reduce")
        wide = values.astype(accumulation_dtype(values.dtype), copy=False)
        wide = np.abs(wide) if kind.startswith("abs") else wide
        reduced = combine.reduce(wide, axis=axis, **first)
        bad = None if poison is None else poison.any(axis=axis)
        note_contracted(frame, src.name, values, axis, keepdims=False)
        if not clear(frame):
            before, bad_before = dst.read(frame, "T.reduce")
            note_operand(frame, dst.name, before.reshape(reduced.shape))
            reduced = combine(before.reshape(reduced.shape).astype(reduced.dtype), reduced)
            bad = union_of_poison(
                bad, None if bad_before is None else bad_before.reshape(reduced.shape)
            )
        dst.write(frame, reduced, bad, "T.reduce")

    return c.preempted(run, call)


def scan(c: Statements, call: tirx.Call, loc: str) -> Step:
    src, dst = region(c, call.args[0], loc), region(c, call.args[1], loc)
    axis, reverse = int(call.args[2]), bool(call.args[3].value)
    name = call.op.name.rsplit(".", 1)[-1]
    accumulate = {"cumsum": np.add, "cummax": np.fmax}[name].accumulate

    def run(frame: Frame):
        frame.block.order.threads.barrier_all()
        values, poison = src.read(frame, f"T.{name}")
        wide = values.astype(accumulation_dtype(values.dtype), copy=False)
        if reverse:
            wide = np.flip(wide, axis)
        scanned = accumulate(wide, axis=axis)
        note_contracted(frame, src.name, values, axis)
        if reverse:
            scanned = np.flip(scanned, axis)
        bad = None if poison is None else np.broadcast_to(
            poison.any(axis=axis, keepdims=True), scanned.shape
        )  # fmt: skip
        dst.write(frame, scanned, bad, f"T.{name}")

    return c.preempted(run, call)


def transpose(c: Statements, call: tirx.Call, loc: str) -> Step:
    src, dst = region(c, call.args[0], loc), region(c, call.args[1], loc)

    def run(frame: Frame):
        values, poison = src.read(frame, "T.transpose")
        bad = None if poison is None else poison.swapaxes(-1, -2)
        note_operand(frame, src.name, values.swapaxes(-1, -2))
        dst.write(frame, values.swapaxes(-1, -2), bad, "T.transpose")

    return c.preempted(run, call)


_ATOMICS = {"atomicadd": np.add, "atomicmax": np.maximum, "atomicmin": np.minimum}


def atomic(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile the tile forms of T.atomic_add, T.atomic_max and T.atomic_min."""
    name = call.op.name.rsplit(".", 1)[-1]
    dst = region(c, call.args[1], loc)
    from_tile = getattr(getattr(call.args[0], "op", None), "name", "") == "tl.region"
    src = region(c, call.args[0], loc) if from_tile else None
    value = None if from_tile else c.compile(call.args[0], loc)
    bulk = (
        bool(int(dict(call.annotations.items()).get("use_tma", 0))) if call.annotations else False
    )
    op = f"T.atomic_{name.removeprefix('atomic')}"
    # PTX guarantees atomic TMA reductions within one GPU. NVLink preserves it between GPUs.
    scope = SYS if bulk or call.args[1].args[0].buffer.data in c.symmetric else GPU
    fragment = src if src is not None and src.scope == "local.fragment" else None

    def run(frame: Frame):
        values, poison = (
            src.read(frame, op) if src else
            (value.value(frame), value.poison(frame) if value.poison else None)
        )  # fmt: skip
        if src:
            note_operand(frame, src.name, values)
        if poison is not None and np.any(poison):
            raise uninitialized(f"{op} to {dst.name} of", frame.block, loc)
        dst.update(frame, _ATOMICS[name], values, op, bulk, scope, fragment)

    return c.preempted(run, call)


def register(c: Statements) -> None:
    """Register TileLang's tile operations."""
    prefix = "tl.tileop."
    for name in ("copy", "async_copy", "tma_copy"):
        c.steps[prefix + name] = copy
    for name in ("gemm", "wgmma_gemm"):
        c.steps[prefix + name] = gemm
    c.steps[prefix + "im2col"] = c.steps[prefix + "c2d_im2col"] = im2col
    c.steps[prefix + "fill"] = fill
    c.steps[prefix + "reduce"] = reduce
    c.steps[prefix + "transpose"] = transpose
    c.steps[prefix + "cumsum"] = c.steps[prefix + "cummax"] = scan
    for name in _ATOMICS:
        c.steps[prefix + name] = atomic
