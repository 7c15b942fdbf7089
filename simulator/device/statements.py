"""Compiler of the statements of a device function to steps over a frame.

A device function has flat buffers: registers of each thread, shared memory by byte address, and
tensors in global memory by flat element. Values that differ between threads are arrays over the
threads of the block, as at tile level.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ...passes.ir.walk import op_name
from ..frontend.accesses import lanes_of, of_threads, uniform
from ..frontend.expressions import Expr, Value, unraveled
from ..frontend.numbers import require_numbers
from ..frontend.statements import THREAD_AXES, RowsOfThreads, Statements
from ..machine.block import Frame, Tile
from ..machine.steps import Step
from ..memory.values import convert, numpy_dtype
from ..report.errors import unsupported
from .block import TransactionBarrier
from .lowering import HEAP_STRIDE, TensorMap
from .shared import SharedMemory, Source

_BLOCK_AXES = {"blockIdx.x": 0, "blockIdx.y": 1, "blockIdx.z": 2}


@dataclass(frozen=True)
class SharedPlace:
    """A place in shared memory.

    Attributes:
        memory: slot of the allocation.
        offset: byte offset in it.
    """

    memory: int
    offset: int


class DeviceStatements(Statements):
    """Compiler of device functions."""

    widens = guards = False

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[tirx.Var, SharedPlace] = {}
        """Pointers to shared memory."""
        self._tiles_at: dict[int, list[tuple[int, str]]] = {}
        """Byte offset and name of each tile in shared memory, by slot of the allocation."""
        self._allocations = itertools.count()
        self.buffers: dict[tirx.Var, tirx.Buffer] = {}
        """Declared buffers, by their pointer."""
        self.block_axes: dict[int, int] = {}
        """Slot of the block index of each axis."""
        self.block_extents: dict[int, Any] = {}
        """Extent of each axis, which may depend on scalars."""
        self.threads = [1, 1, 1]
        self.maps: dict[tirx.Var, TensorMap] = {}
        """TMA descriptors, by parameter."""

    def _on_AttrStmt(self, stmt: Any, loc: str) -> Step:
        if stmt.attr_key != "thread_extent":
            return self.statement(stmt.body, loc)
        tag, var = stmt.node.thread_tag, stmt.node.var
        if tag in _BLOCK_AXES:
            axis = _BLOCK_AXES[tag]
            self.block_axes[axis] = self.new_slot(var)
            self.block_extents[axis] = self.indices([stmt.value], "the grid", loc)
            return self.statement(stmt.body, loc)
        axis = THREAD_AXES[tag]
        self.threads[axis] = int(stmt.value)
        bind = self._bind_thread(var, axis)
        body = self.statement(stmt.body, loc)

        def run(frame: Frame):
            bind.run(frame)
            yield from body.run(frame) if body.waits else iter((body.run(frame),))

        return Step(run, True)

    def _on_For(self, stmt: Any, loc: str) -> Step:
        if stmt.kind == tirx.ForKind.PARALLEL:  # CUDA has a loop of each thread
            stmt = tirx.For(
                stmt.loop_var, stmt.min, stmt.extent, tirx.ForKind.SERIAL, stmt.body, None,
                stmt.annotations, stmt.step,
            )  # fmt: skip
        return super()._on_For(stmt, loc)

    def _on_AllocBuffer(self, stmt: Any, loc: str) -> Step:
        buffer, scope = stmt.buffer, stmt.buffer.scope()
        count = math.prod(int(n) for n in buffer.shape)
        self.buffers[buffer.data] = buffer
        if scope == "shared.barrier":
            return self._barriers(buffer, count)
        if scope.startswith("shared"):
            slot = next(self._allocations)
            self.shared[buffer.data] = SharedPlace(slot, 0)
            name, size = buffer.name, count * numpy_dtype(buffer.dtype).itemsize
            tiles = self._tiles_at[slot] = []

            def allocate(frame: Frame):
                block = frame.block
                if slot not in block.shared:
                    block.shared[slot] = SharedMemory(
                        name, size, tiles, block.agents, block.machine.memory
                    )

            return Step(allocate)
        if not scope.startswith("local"):
            raise unsupported(f"{buffer.name} in {scope} memory", loc)
        slot = self.tiles.setdefault(buffer.data, len(self.tiles))
        lanes = buffer.dtype.lanes
        shape, dtype = (count, lanes) if lanes > 1 else (count,), numpy_dtype(buffer.dtype)
        self.made[slot] = shape, dtype

        def registers(frame: Frame):
            tile = frame.block.tiles.get(slot)
            if tile is None:
                tile = frame.block.tiles[slot] = Tile(buffer.name, shape, dtype, "local")
                tile.spread(len(frame.mask.on))
            elif scope == "local":  # each iteration of a loop has registers of its own
                tile.set_poison((frame.mask.on,), True)

        return Step(registers)

    def _barriers(self, buffer: tirx.Buffer, count: int) -> Step:
        slot = self.barriers.setdefault(buffer.data, len(self.barriers))
        first = self.mbarriers + 1
        self.mbarriers += count

        def allocate(frame: Frame):
            mbarriers = [TransactionBarrier(first + i, f"{buffer.name}[{i}]") for i in range(count)]
            frame.block.barriers.setdefault(slot, mbarriers)

        return Step(allocate)

    def _on_DeclBuffer(self, stmt: Any, loc: str) -> Step:
        self.buffers[stmt.buffer.data] = stmt.buffer
        return Step(lambda frame: None)

    def _on_Bind(self, stmt: Any, loc: str) -> Step:
        if str(stmt.var.dtype) != "handle" or op_name(stmt.value) == "tirx.reinterpret":
            return super()._on_Bind(stmt, loc)
        value, offset = stmt.value, 0
        while isinstance(value, tirx.Call) and value.op.name == "tirx.handle_add_byte_offset":
            value, offset = value.args[0], offset + int(value.args[1])
        place = self.shared.get(value)
        if place is None:
            raise unsupported(f"the pointer {stmt.var}", loc)
        self.shared[stmt.var] = SharedPlace(place.memory, place.offset + offset)
        self._tiles_at[place.memory].append((place.offset + offset, stmt.var.name))
        return Step(lambda frame: None)

    def is_of_each_thread(self, stmt: Any) -> bool:
        return not isinstance(stmt, tirx.Bind)

    def pointee(self, node: Any, loc: str) -> tuple[Any, list[Any]]:
        """Return data pointer, element type and first element of a pointer operand."""
        name = getattr(node.op, "name", "")
        if name == "tirx.tvm_access_ptr":
            kind, data, offset = node.args[0], node.args[1], node.args[2]
            return self._named(data, str(kind.dtype)), [offset]
        if name == "tirx.address_of":
            load = node.args[0]
            return load.buffer, list(load.indices)
        if name == "tirx.handle_add_byte_offset" and isinstance(node.args[1], tirx.IntImm):
            buffer, (*outer, last) = self.pointee(node.args[0], loc)
            elements, rest = divmod(int(node.args[1]), numpy_dtype(buffer.dtype).itemsize)
            if rest == 0:
                return buffer, [*outer, last + elements]
        raise unsupported(f"the pointer {node}", loc)

    def mbarrier(self, load: Any, loc: str) -> Callable[[Frame], TransactionBarrier]:
        slot = self.barriers[load.buffer.data]
        index = self.indices(load.indices, load.buffer.name, loc)
        return lambda frame: frame.block.barriers[slot][uniform(index(frame)[0], frame, loc)]

    def rows_of_matrices(self, node: Any, op: str, loc: str) -> RowsOfThreads:
        memory, address = shared_address(self, node, op, loc)
        source = Source(op, loc)

        def load(frame: Frame, threads: np.ndarray):
            addresses = np.broadcast_to(address(frame), frame.mask.on.shape)[threads]
            groups = frame.mask.group_of[threads]
            shared = frame.block.shared[memory]
            return shared.load(addresses, 16, np.dtype(np.uint16), groups, source)

        return load

    def _named(self, data: tirx.Var, dtype: str) -> tirx.Buffer:
        """Return the buffer of a pointer with elements of this type."""
        buffer = self.buffers.get(data)
        if buffer is None or str(buffer.dtype) != dtype:
            scope = "shared.dyn" if data in self.shared else "global"
            buffer = tirx.decl_buffer((1,), dtype, data.name, data=data, scope=scope)
        return buffer

    def in_whole(self, buffer: tirx.Buffer, values: Value, loc: str) -> Value:
        """Convert the flat index of a buffer to the indices of its tensor."""
        if buffer.data in self.tiles:
            self.require_type(buffer, loc)
            lanes = self.made[self.tiles[buffer.data]][0][1:]
            if not lanes:
                return values
            return lambda frame: [np.asarray(values(frame)[0])[..., None], np.arange(*lanes)]
        name = self.globals[buffer.data]
        dtype = numpy_dtype(self.declared[buffer.data].dtype)
        stored = np.dtype(np.int8) if dtype == np.bool_ else dtype
        if numpy_dtype(buffer.dtype) != stored:
            raise unsupported(f"{buffer.name}, a view of another type,", loc)
        symmetric = buffer.data in self.symmetric

        def indices(frame: Frame):
            shape = frame.block.tensors[name].shape
            (flat,) = values(frame)
            return split_flat(flat, shape, dtype.itemsize if symmetric else 0)

        return indices

    def _BufferLoad(self, load: Any, loc: str) -> Expr:
        place = self.shared.get(load.buffer.data)
        if place is None:
            return super()._BufferLoad(load, loc)
        addresses = self.addresses(place, load.buffer, load.indices, loc)
        dtype, node = numpy_dtype(load.buffer.dtype), self.node()
        lanes, source = load.dtype.lanes, Source(f"load of {load.buffer.name}", loc)

        def value(frame: Frame):
            values, frame.cache[node] = load_shared(
                frame, place.memory, addresses(frame), lanes, dtype, source
            )
            return values

        return Expr(value, lambda frame: frame.cache.get(node))

    def address(self, place: SharedPlace, buffer: tirx.Buffer, indices: Any, loc: str) -> Value:
        """Compile the byte address of an access whose lanes are consecutive."""
        if _begin(indices[0]).dtype.lanes > 1:
            raise unsupported(f"a vector of {buffer.name} with gaps", loc)
        addresses = self.addresses(place, buffer, indices, loc)
        return lambda frame: addresses(frame)[0]

    def addresses(self, place: SharedPlace, buffer: tirx.Buffer, indices: Any, loc: str) -> Value:
        """Compile the byte addresses of an access: of its first lane if lanes are consecutive,
        otherwise of each lane."""
        itemsize = numpy_dtype(buffer.dtype).itemsize
        index = _begin(indices[0])
        lanes, places = index.dtype.lanes, self.indices([index], buffer.name, loc)

        def value(frame: Frame):
            address = places(frame)[0] * itemsize + place.offset
            return [address] if lanes == 1 else [address[..., lane] for lane in range(lanes)]

        return value

    def _on_BufferStore(self, stmt: Any, loc: str) -> Step:
        buffer, place = stmt.buffer, self.shared.get(stmt.buffer.data)
        if place is None:
            return super()._on_BufferStore(stmt, loc)
        expr = self.compile(stmt.value, loc)
        value, poison = expr.value, expr.poison or (lambda frame: None)
        address = self.address(place, buffer, stmt.indices, loc)
        dtype = numpy_dtype(buffer.dtype)
        lanes, source = stmt.value.dtype.lanes, Source(f"store to {buffer.name}", loc)

        def run(frame: Frame):
            stored, at = convert(value(frame), dtype), address(frame)
            active = lanes_of(stored, frame)
            require_numbers(frame, buffer.name, [at // dtype.itemsize], stored, active, loc)
            store_shared(frame, place.memory, at, lanes, stored, poison(frame), source)

        return self.preempted(run, stmt)


def _begin(index: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the index of the first lane if lanes are consecutive, otherwise that of all lanes."""
    return index.base if isinstance(index, tirx.Ramp) and int(index.stride) == 1 else index


def split_flat(flat: Any, shape: tuple[int, ...], itemsize: int) -> list[Any]:
    """Return the indices of flat elements.

    Args:
        itemsize: bytes of an element of a symmetric tensor, whose first axis has the stride of the
            heap; 0 for other tensors.
    """
    inner = shape
    rank = None
    if itemsize:
        inner = shape[1:]
        rank, flat = flat // (HEAP_STRIDE // itemsize), flat % (HEAP_STRIDE // itemsize)
    out = unraveled(flat, inner)
    return out if rank is None else [rank, *out]


def to_threads(values: np.ndarray, frame: Frame) -> Any:
    """Return the values of the active threads as an expression's value."""
    if frame.mask.single is not None:
        return values[0][()]
    if frame.mask.full:
        return values
    out = np.zeros(frame.mask.on.shape + values.shape[1:], values.dtype)
    out[frame.mask.threads] = values
    return out


def load_shared(
    frame: Frame, memory: int, addresses: list[Any], lanes: int, dtype: np.dtype, source: Source
) -> tuple[Any, Any]:
    """Return values and poison of loads from shared memory by the active threads.

    Each address is that of equally many of the lanes.
    """
    shared = frame.block.shared[memory]
    groups = frame.mask.group_of[frame.mask.threads]
    width = lanes // len(addresses) * dtype.itemsize
    loads = [shared.load(of_threads(a, frame), width, dtype, groups, source) for a in addresses]
    values = np.concatenate([v for v, _ in loads], axis=1)
    bad = None
    if any(b is not None for _, b in loads):
        bad = np.concatenate([np.zeros(v.shape, bool) if b is None else b for v, b in loads], 1)
    if lanes == 1:
        values, bad = values[:, 0], None if bad is None else bad[:, 0]
    return to_threads(values, frame), None if bad is None else to_threads(bad, frame)


def store_shared(
    frame: Frame, memory: int, address: Any, lanes: int, values: Any, poison: Any, source: Source
) -> None:
    """Store to shared memory by the active threads."""
    shared = frame.block.shared[memory]
    threads = frame.mask.threads
    rows = of_threads(values, frame, lanes).reshape(len(threads), lanes)
    if poison is not None:
        poison = of_threads(poison, frame, lanes if np.ndim(poison) > 1 else 1)
    shared.store(of_threads(address, frame), rows, poison, frame.mask.group_of[threads], source)


def shared_address(c: DeviceStatements, node: Any, op: str, loc: str) -> tuple[int, Value]:
    """Return slot of the memory, and a function from a frame to the byte address of an operand."""
    buffer, indices = c.pointee(node, loc)
    place = c.shared.get(buffer.data)
    if place is None:
        raise unsupported(f"{op} of {buffer.name}, which is not in shared memory,", loc)
    return place.memory, c.address(place, buffer, indices, loc)
