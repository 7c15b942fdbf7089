"""Asynchronous copies: TMA, bulk copies, and ``cp.async``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.spec import BUILTINS, builtin_of
from ...passes.ir.operators import COMPLETE
from ..frontend.accesses import of_threads, uniform
from ..frontend.block_ops import commit_stores, complete_bulk_stores, wait_stores
from ..frontend.functions import REDUCTIONS
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.memory import Access, Tensor
from ..memory.order import GPU, SYS
from ..memory.values import numpy_dtype
from ..report.errors import SimulationError, uninitialized, unsupported
from .barriers import require_visible
from .block import COPIES, SOURCES, DeviceBlock
from .lowering import Im2colMap, TensorMap
from .operand_layouts import swizzled
from .proxies import ProxyView, explain_missing_fence
from .shared import Chunks, Source
from .statements import DeviceStatements, shared_address, split_flat


class Box:
    """Elements of a tensor that one TMA operation copies.

    Args:
        map: the descriptor.
        coordinates: expressions, innermost axis first.
    """

    def __init__(
        self, c: DeviceStatements, map: TensorMap, coordinates: list[Any], loc: str
    ) -> None:
        self.name = map.tensor
        data = next(data for data, name in c.globals.items() if name == map.tensor)
        self.dtype = numpy_dtype(c.declared[data].dtype)
        self._symmetric = data in c.symmetric
        self._map, self._loc = map, loc
        self._start = c.indices(coordinates, map.tensor, loc)
        self._shape = c.indices(map.shape, map.tensor, loc)
        self._strides = c.indices(map.strides, map.tensor, loc)
        self.count = math.prod(map.box)

    def tensor(self, frame: Frame) -> Tensor:
        return frame.block.tensors[self.name]

    def key(self, frame: Frame) -> tuple[tuple, np.ndarray]:
        """Return the index of the elements inside the tensor, and their mask in the box, whose
        innermost axis varies fastest."""
        tensor = self.tensor(frame)
        start, shape, strides = (
            [uniform(value, frame, self._loc) for value in values(frame)]
            for values in (self._start, self._shape, self._strides)
        )
        strides = [self.dtype.itemsize, *strides]
        if (parts := self._parts(tensor, start, shape, strides)) is not None:
            return parts, np.ones(self.count, np.bool_)
        in_bounds: Any = True
        offset: Any = 0
        for index, extent, stride in zip(self._indices(start, shape), shape, strides, strict=True):
            in_bounds = in_bounds & (index >= 0) & (index < extent)
            offset = offset + index * stride
        in_bounds = np.broadcast_to(in_bounds, offset.shape).reshape(-1)
        flat = offset.reshape(-1)[in_bounds] // self.dtype.itemsize
        itemsize = self.dtype.itemsize if self._symmetric else 0
        return tuple(split_flat(flat, tensor.shape, itemsize)), in_bounds

    def _parts(
        self, tensor: Tensor, start: list[int], shape: list[int], strides: list[int]
    ) -> tuple[slice, ...] | None:
        """Return the box as slices; None if its elements must be accessed one by one."""
        parts = [slice(n, n + size) for n, size in zip(start, self._map.box, strict=True)]
        is_inside = all(0 <= p.start and p.stop <= n for p, n in zip(parts, shape, strict=True))
        layout = tensor.data.shape, tensor.data.strides
        is_packed = layout == (tuple(shape[::-1]), tuple(strides[::-1]))
        is_read = not (tensor.written or tensor.symmetric)
        return tuple(parts[::-1]) if is_inside and is_packed and is_read else None

    def _indices(self, start: list[int], shape: list[int]) -> list[np.ndarray]:
        """Return the index of each element of the box along each axis, innermost axis first."""
        rank = len(self._map.box)
        return [
            first + np.arange(size).reshape([size if a == axis else 1 for a in range(rank)][::-1])
            for axis, (first, size) in enumerate(zip(start, self._map.box, strict=True))
        ]

    def chunks(self, start: int, count: int) -> Chunks:
        """Return the bytes of ``count`` elements in shared memory, from ``start`` on."""
        return _chunks(start, count * self.dtype.itemsize, self._map.swizzle)


class Windows(Box):
    """Elements of images that one TMA operation copies in im2col mode: those at one place of each
    window. The coordinates are followed by the column and row of that place."""

    _map: Im2colMap

    def _parts(self, *_: Any) -> None:
        return None

    def _indices(self, start: list[int], shape: list[int]) -> list[np.ndarray]:
        channel, *first, image, across, down = start
        channels, windows = self._map.box
        places = [
            range(low, extent + high, step)
            for low, high, extent, step in zip(
                self._map.lower, self._map.upper, shape[1:3], self._map.steps, strict=True
            )
        ]
        wide, tall = map(len, places)
        x, y = ((i - p.start) // p.step for i, p in zip(first, places, strict=True))
        window = x + wide * (y + tall * image) + np.arange(windows)[:, None]
        x, y = window % wide, window // wide % tall
        return [
            channel + np.arange(channels)[None],
            places[0].start + x * places[0].step + across,
            places[1].start + y * places[1].step + down,
            window // (wide * tall),
        ]


class Run:
    """Consecutive elements of a tensor that one bulk copy moves.

    Args:
        node: pointer to the first element.
        size: expression of the number of elements, or of bytes if ``in_bytes``.
    """

    def __init__(
        self, c: DeviceStatements, node: Any, size: Any, op: str, loc: str, in_bytes: bool
    ) -> None:
        buffer, indices = c.pointee(node, loc)
        if buffer.data not in c.globals:
            raise unsupported(f"{op} of {buffer.name}, which is not in global memory,", loc)
        self.name, self.dtype = c.globals[buffer.data], numpy_dtype(buffer.dtype)
        self._symmetric = buffer.data in c.symmetric
        self._first, self._size = c.indices(indices, op, loc), c.indices([size], op, loc)
        self._unit, self._loc = self.dtype.itemsize if in_bytes else 1, loc

    def tensor(self, frame: Frame) -> Tensor:
        return frame.block.tensors[self.name]

    def key(self, frame: Frame) -> tuple[tuple, np.ndarray]:
        """Return the index of the elements, and a mask that is all true."""
        first = uniform(self._first(frame)[0], frame, self._loc)
        count = uniform(self._size(frame)[0], frame, self._loc) // self._unit
        flat = first + np.arange(count)
        itemsize = self.dtype.itemsize if self._symmetric else 0
        return tuple(split_flat(flat, self.tensor(frame).shape, itemsize)), np.ones(count, bool)

    def chunks(self, start: int, count: int) -> Chunks:
        """Return the bytes of ``count`` elements in shared memory, from ``start`` on."""
        return _chunks(start, count * self.dtype.itemsize, 0)


@lru_cache(maxsize=1024)
def _chunks(start: int, size: int, swizzle: int) -> Chunks:
    """Return the bytes of a copy in shared memory, whose rows may be swizzled."""
    width = math.gcd(start, size, 16)
    return Chunks(swizzled(start + np.arange(0, size, width), swizzle) // width, width)


def _issues(frame: Frame, address: Any) -> Iterator[tuple[int, int]]:
    """Yield thread group and shared-memory address of each thread that issues a copy."""
    threads = frame.mask.threads
    for thread, at in zip(threads, of_threads(address(frame), frame), strict=True):
        yield int(frame.mask.group_of[thread]), int(at)


def _require_bounds(frame: Frame, region: Any, key: tuple, loc: str) -> None:
    shape = region.tensor(frame).shape
    for axis, (index, extent) in enumerate(zip(key, shape, strict=True)):
        if (
            isinstance(index, np.ndarray)
            and len(index)
            and not (0 <= index.min() and index.max() < extent)
        ):
            raise SimulationError(
                "bounds",
                f"{region.name} of shape {shape}: elements {index.min()} to {index.max()} along "
                f"axis {axis}, by {frame.block.place}\n --> {loc}",
            )


def _require_aligned(region: Box | Run, name: str, start: int, source: Source) -> None:
    """Refuse an address in shared memory that the hardware cannot use.

    Raises:
        SimulationError: it is no multiple of 128 bytes for a tensor copy, of 16 for a bulk copy.
    """
    multiple = 128 if isinstance(region, Box) else 16
    if start % multiple:
        raise SimulationError(
            "alignment",
            f"{source.op} at byte {start} of {name}; expected a multiple of {multiple}\n"
            f" --> {source.loc}",
        )


def _load(
    region: Box | Run, target: Any, barrier: Any, op: str, loc: str, expects: bool = False
) -> Step:
    """Compile an asynchronous load from global to shared memory that completes on an mbarrier.

    Args:
        expects: whether it also expects its bytes.
    """
    memory, address = target
    source = Source(op, loc, "a wait at its mbarrier")

    def run(frame: Frame):
        block: DeviceBlock = frame.block
        full, tensor = barrier(frame), region.tensor(frame)
        require_visible(frame, full, loc)
        for g, start in _issues(frame, address):
            _require_aligned(region, block.shared[memory].name, start, source)
            key, in_bounds = region.key(frame)
            _require_bounds(frame, region, key, loc)
            agent, time, view = block.order.load_actor((g,), full.number)
            proxied = ProxyView(view, block.agents.clocks[g], block.order.layout)
            access = Access(agent, time, proxied, 0, op, loc, block.epoch)
            with explain_missing_fence(view, block):
                values, bad = tensor.read(key, access)
            rows = np.zeros(len(in_bounds), region.dtype)
            rows[in_bounds] = np.asarray(values).reshape(-1)
            poison = None
            if bad is not None:
                poison = np.zeros(len(in_bounds), np.bool_)
                poison[in_bounds] = np.asarray(bad).reshape(-1)
            chunks = region.chunks(start, len(in_bounds)).rows(None)
            writers = {g: (agent - block.order.base, time)}
            block.shared[memory].write_async(chunks, rows, poison, np.array([g]), writers, source)
            full.issued = time
            full.bytes -= 0 if expects else rows.nbytes
            full.settle()

    return _preempted(run)


def _preempted(run: Any) -> Step:
    """Return a step before which other blocks may run."""

    def step(frame: Frame):
        yield None
        run(frame)

    return Step(step, True)


def _store(region: Box | Run, origin: Any, ufunc: Any, op: str, loc: str) -> Step:
    """Compile an asynchronous store, or reduction, from shared to global memory."""
    memory, address = origin
    source = Source(op, loc, "a wait for the group of this store")

    def run(frame: Frame):
        block: DeviceBlock = frame.block
        tensor = region.tensor(frame)
        for g, start in _issues(frame, address):
            _require_aligned(region, block.shared[memory].name, start, source)
            key, in_bounds = region.key(frame)
            _require_bounds(frame, region, key, loc)
            chunks = region.chunks(start, len(in_bounds)).rows(None)
            reader, read_at = block.next_load(block.loads_of(SOURCES, g))
            block.sources[g].open = read_at
            shared = block.shared[memory]
            shared.read_async(chunks, np.array([g]), [(reader, read_at)], source)
            values, bad = shared.values(chunks, region.dtype, source)
            values = values.reshape(-1)[in_bounds]
            poison = None if bad is None else bad.reshape(-1)[in_bounds]
            if poison is not None and not poison.any():
                poison = None
            if poison is not None and (ufunc is not None or not tensor.symmetric):
                raise uninitialized(f"{op} to {tensor.name} of", block, loc)
            agent, time, view = block.order.bulk_actor((g,))
            block.bulk[g].open = time
            scope = 0 if ufunc is None else SYS if tensor.symmetric else GPU
            access = Access(agent, time, view, scope, op, loc, block.epoch)
            if ufunc is not None:
                tensor.update(key, ufunc, values, access)
            else:
                tensor.write(key, values, access, poison)

    return _preempted(run)


def tma_load(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``tma_load(descriptor, mbarrier, destination, coordinates ..., hint)``, or
    ``tma_load(destination, source, mbarrier, bytes, hint)``."""
    if isinstance(call.args[0], tirx.Var):
        region: Box | Run = Box(c, c.maps[call.args[0]], list(call.args[3:-1]), loc)
        barrier, target = call.args[1], call.args[2]
    else:
        region = Run(c, call.args[1], call.args[3], "TMA load", loc, in_bytes=True)
        barrier, target = call.args[2], call.args[0]
    shared = shared_address(c, target, "TMA load", loc)
    return _load(region, shared, c.mbarrier(barrier, loc), "TMA load", loc)


def tma_load_im2col(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``tma_load_im2col(descriptor, mbarrier, destination, coordinates ..., offsets ..., hint)``"""
    windows = Windows(c, c.maps[call.args[0]], list(call.args[3:-1]), loc)
    shared = shared_address(c, call.args[2], "TMA load", loc)
    return _load(windows, shared, c.mbarrier(call.args[1], loc), "TMA load", loc)


def tma_store(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``tma_store(descriptor, source, coordinates ..., adds, hint)``, or
    ``tma_store(destination, source, bytes, adds, hint)``."""
    ufunc = np.add if int(call.args[-2]) else None
    op = "TMA store" if ufunc is None else "TMA addition"
    if isinstance(call.args[0], tirx.Var):
        region: Box | Run = Box(c, c.maps[call.args[0]], list(call.args[2:-2]), loc)
    else:
        region = Run(c, call.args[0], call.args[2], op, loc, in_bytes=True)
    return _store(region, shared_address(c, call.args[1], op, loc), ufunc, op, loc)


def bulk_load(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    op = builtin_of(call).text
    region = Run(c, call.args[1], call.args[2], op, loc, in_bytes=False)
    barrier = c.mbarrier(call.args[3].args[0], loc)
    target = shared_address(c, call.args[0], op, loc)
    return _load(region, target, barrier, op, loc, expects=True)


def bulk_store(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    spec = builtin_of(call)
    region = Run(c, call.args[0], call.args[2], spec.text, loc, in_bytes=False)
    ufunc = REDUCTIONS[call.args[4].value] if spec.has_qualifier("op") else None
    origin = shared_address(c, call.args[1], spec.text, loc)
    return _store(region, origin, ufunc, spec.text, loc)


def cp_async(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``cp_async(destination, source, elements, [predicate])``: each thread copies."""
    op = "cp.async"
    source = Source(op, loc, "T.ptx_wait_group (cp.async.wait_group)")
    memory, address = shared_address(c, call.args[0], op, loc)
    buffer, indices = c.pointee(call.args[1], loc)
    first = c.in_whole(buffer, c.indices(indices, op, loc), loc)
    name, dtype, count = c.globals[buffer.data], numpy_dtype(buffer.dtype), int(call.args[2])
    predicate = c.compile(call.args[3], loc).value if len(call.args) > 3 else None

    def run(frame: Frame):
        block: DeviceBlock = frame.block
        tensor, threads = block.tensors[name], frame.mask.threads
        starts = [of_threads(i, frame) for i in first(frame)]
        active = np.ones(len(threads), np.bool_)
        if predicate is not None:
            active = np.asarray(of_threads(predicate(frame), frame), np.bool_)
        targets = of_threads(address(frame), frame)
        groups = frame.mask.group_of[threads]
        rows = np.zeros((len(threads), count), dtype)
        poison = np.zeros(rows.shape, np.bool_)
        key = [np.repeat(i[:, None], count, axis=1) for i in starts]
        key[-1] = key[-1] + np.arange(count)
        writers = {}
        for g in frame.mask.overlapping:
            agent, time, view = block.order.load_actor((g,), block.loads_of(COPIES, g))
            block.copies[g].open = time
            writers[g] = agent - block.order.base, time
            read = active & (groups == g)
            if read.any():
                access = Access(agent, time, view, 0, op, loc, block.epoch)
                rows[read], bad = tensor.read(tuple(k[read] for k in key), access)
                if bad is not None:
                    poison[read] = bad
        chunks = Chunks.at(targets, count * dtype.itemsize)
        shared = block.shared[memory]
        shared.write_async(chunks, rows, poison, groups, writers, source, generic=True)

    return _preempted(run)


def commit_copies(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    def run(frame: Frame):
        for g in frame.mask.overlapping:
            frame.block.copies[g].commit()

    return Step(run)


def wait_copies(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    max_pending = int(call.args[0])

    def run(frame: Frame):
        block: DeviceBlock = frame.block
        for g in frame.mask.overlapping:
            if g in block.copies:
                block.order.complete_loads(
                    (g,), block.loads_of(COPIES, g), block.copies[g].wait(max_pending)
                )

    return Step(run)


def register(c: DeviceStatements) -> None:
    """Register the asynchronous copies."""
    for spec in BUILTINS.values():
        if spec.is_async_load:
            c.steps[spec.op_name] = bulk_load
        elif spec.is_async_store:
            c.steps[spec.op_name] = bulk_store
    c.steps |= {
        COMPLETE: complete_bulk_stores,
        "tl.tma_load": tma_load,
        "tl.tma_load_im2col": tma_load_im2col,
        "tl.tma_store": tma_store,
        "tl.tma_store_arrive": commit_stores,
        "tl.tma_store_wait": wait_stores,
        "tl.ptx_cp_async": cp_async,
        "tirx.ptx_commit_group": commit_copies,
        "tirx.ptx_wait_group": wait_copies,
    }
