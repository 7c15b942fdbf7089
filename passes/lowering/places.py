"""Places in memory of the elements of tiles, before and after TileLang lowers tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tilelang.layout import Fragment, Layout
from tvm import DataType, tirx

from ...builtins.symmetric import packed_strides
from ..ir.walk import nodes_in, variables_in
from .points import Points

FRAGMENT = "local.fragment"
NOWHERE = -1
"""Place of a register that has no element."""
_ALLOCATION = 0x4F1B_BCDC_BFA5_3E0B
"""Odd number that keeps the places of different allocations apart; sums may wrap."""


class Unknown(Exception):
    """A statement uses what the comparison of its forms does not know."""


@dataclass(frozen=True)
class Registers:
    """Registers of a fragment.

    Attributes:
        first: for each register of each thread, that of the first copy of its element, or
            ``NOWHERE``.
        count: registers of a thread.
        thread: number of the first thread.
    """

    first: np.ndarray
    count: int
    thread: int


class Places:
    """Places of elements, as integers that are equal before and after lowering.

    A place in global or shared memory is a number of bits from the start of its allocation. That of
    a register has its thread and its number.

    Args:
        tiles: a function with the layouts of all tiles.
        lowered: the same function after its tiles have been lowered to elements.
    """

    def __init__(self, tiles: tirx.PrimFunc, lowered: tirx.PrimFunc) -> None:
        self._layouts = {_key(buffer): layout for buffer, layout in _layouts_of(tiles)}
        old, new = map(_allocations, (tiles, lowered))
        self._numbers: dict[tirx.Var, int] = {}
        counter = itertools.count(1)
        for buffer in (*tiles.buffer_map.values(), *lowered.buffer_map.values(), *old.values()):
            self._numbers.setdefault(buffer.data, next(counter))
        self._registers: dict[tirx.Var, Registers | None] = {}
        for name, buffer in old.items():
            if name in new:
                self._numbers[new[name].data] = self._numbers[buffer.data]
                if buffer.scope() == FRAGMENT:
                    self._registers[new[name].data] = self._registers_of(buffer.data)

    def is_variable(self, buffer: tirx.Buffer) -> bool:
        """Return whether ``buffer`` is private to a thread, and no fragment."""
        is_fragment = buffer.scope() == FRAGMENT or buffer.data in self._registers
        return buffer.scope().startswith("local") and not is_fragment

    def is_fragment(self, buffer: tirx.Buffer) -> bool:
        """Return whether ``buffer`` has the registers of a lowered fragment."""
        return buffer.data in self._registers

    def of_tile(
        self, buffer: tirx.Buffer, indices: Sequence[np.ndarray], points: Points
    ) -> list[np.ndarray]:
        """Return the places of each copy of elements of a tile, by their indices."""
        layout = self._layouts.get(_key(buffer))
        if buffer.scope() == FRAGMENT:
            if not isinstance(layout, Fragment):
                raise Unknown(f"the layout of {buffer.name}")
            count = math.prod(map(int, layout.get_output_shape()))
            return [
                self._place(buffer.data, thread * count + register)
                for thread, register in _copies(layout, indices)
            ]
        if layout is None:
            return [self.in_memory(buffer, indices, points)]
        flat = _flat(layout, indices)
        return [self.at_bit(buffer.data, flat * bits_of(buffer.dtype))]

    def of_register(
        self, data: tirx.Var, register: np.ndarray, threads: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of registers of a lowered fragment, and of the first copies of their
        elements, or ``NOWHERE``."""
        registers = self._registers[data]
        if registers is None:
            raise Unknown(f"the layout of {data.name}")
        flat = (threads - registers.thread) * registers.count + register
        is_inside = (register >= 0) & (register < registers.count)
        is_inside = is_inside & (flat >= 0) & (flat < len(registers.first))
        first = np.where(is_inside, registers.first[np.where(is_inside, flat, 0)], NOWHERE)
        known = first != NOWHERE
        return (
            np.where(known, self._place(data, flat), NOWHERE),
            np.where(known, self._place(data, first), NOWHERE),
        )

    def in_memory(
        self, buffer: tirx.Buffer, indices: Sequence[np.ndarray], points: Points
    ) -> np.ndarray:
        """Return places in global or shared memory by the strides of ``buffer``."""
        return self.at_bit(buffer.data, flat_index(buffer, indices, points) * bits_of(buffer.dtype))

    def at_bit(self, data: tirx.Var, bit: np.ndarray) -> np.ndarray:
        """Return places by their distance from the start of global or shared memory."""
        return self._place(data, bit)

    def _place(self, data: tirx.Var, offset: np.ndarray) -> np.ndarray:
        if data not in self._numbers:
            raise Unknown(f"the memory of {data.name}")
        with np.errstate(over="ignore"):
            return np.asarray(offset, np.int64) + np.int64(self._numbers[data]) * _ALLOCATION

    def _registers_of(self, data: tirx.Var) -> Registers | None:
        """Return the registers of a fragment; None if it has several layouts."""
        layouts = {k: v for k, v in self._layouts.items() if k[0].same_as(data)}
        if len(layouts) != 1:
            return None
        (((_, shape), layout),) = layouts.items()
        count = math.prod(map(int, layout.get_output_shape()))
        indices = [i.reshape(-1) for i in np.indices(shape)]
        copies = [thread * count + register for thread, register in _copies(layout, indices)]
        if min(int(c.min(initial=0)) for c in copies) < 0:
            return None
        first = np.full(1 + max(int(c.max(initial=0)) for c in copies), NOWHERE)
        for copy in reversed(copies):
            first[copy] = copies[0]
        bounds = layout.thread_range
        return Registers(first, count, 0 if bounds is None else int(bounds.min))


def bits_of(dtype: str) -> int:
    """Return the number of bits of an element."""
    data_type = DataType(str(dtype))
    return data_type.bits * data_type.lanes


def flat_index(buffer: tirx.Buffer, indices: Sequence[np.ndarray], points: Points) -> np.ndarray:
    """Return the number of an element in the allocation of its buffer."""
    strides = buffer.strides or packed_strides(buffer.shape)
    flat = points.evaluate(buffer.elem_offset)
    for index, stride in zip(indices, strides, strict=True):
        flat = flat + index * points.evaluate(stride)
    return flat


def stored_orders(func: tirx.PrimFunc) -> dict[str, np.ndarray]:
    """Return the place of each element of the tensors to which a program gives a layout, by the
    names of the tensors. Elements and places are numbers from the start of the tensor."""
    tensors = {buffer.data: buffer for buffer in func.buffer_map.values()}
    shapes = {data: _key(buffer)[1] for data, buffer in tensors.items()}
    return {
        tensors[data].name: _flat(layout, [i.reshape(-1) for i in np.indices(shapes[data])])
        for data, layout in _layouts_of(func)
        if data in tensors and -1 not in shapes[data]
    }


def _layouts_of(func: tirx.PrimFunc) -> Iterator[tuple[Any, Layout]]:
    """Yield tensors and tiles with their layouts; a program names them by their pointers."""
    for block in nodes_in(func.body, tirx.SBlock):
        yield from dict(block.annotations.get("layout_map", {})).items()


def _allocations(func: tirx.PrimFunc) -> dict[str, tirx.Buffer]:
    """Return the buffers that blocks allocate, by names that are equal before and after."""
    named: dict[str, tirx.Buffer] = {}
    for block in nodes_in(func.body, tirx.SBlock):
        for buffer in block.alloc_buffers:
            numbers = (f"{buffer.name}#{n}" for n in itertools.count())
            named[next(name for name in numbers if name not in named)] = buffer
    return named


def _key(buffer: tirx.Buffer) -> tuple[tirx.Var, tuple[int, ...]]:
    shape = (int(n) if isinstance(n, tirx.IntImm) else -1 for n in buffer.shape)
    return buffer.data, tuple(shape)


def _copies(layout: Fragment, indices: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return thread and register of each copy of elements of a fragment, by their indices."""
    points = _inputs(layout, indices)
    register = _linear(layout, points)
    replicas = [v for v in variables_in(layout.forward_thread) if not points.knows(v)]
    size = int(layout.replicate_size) if replicas else 1
    return [
        (
            np.broadcast_to(
                points.bound_all(replicas, replica).evaluate(layout.forward_thread), points.count
            ),
            register,
        )
        for replica in range(size)
    ]


def _flat(layout: Layout, indices: Sequence[np.ndarray]) -> np.ndarray:
    """Return the number of elements in memory of this layout. A layout of fewer axes is that
    of each element of the outer axes."""
    inner = len(layout.get_input_shape())
    outer, indices = indices[: len(indices) - inner], indices[len(indices) - inner :]
    if len(outer) > 1:
        raise Unknown("a layout of an inner part")
    flat = _linear(layout, _inputs(layout, indices))
    return flat + sum(i * math.prod(map(int, layout.get_output_shape())) for i in outer)


def _inputs(layout: Layout, indices: Sequence[np.ndarray]) -> Points:
    """Return points with the indices as inputs of ``layout``."""
    count = len(layout.get_input_shape())
    if len(indices) != count:
        raise Unknown("a layout of another shape")
    arrays = np.broadcast_arrays(*indices)
    axes = list(layout.get_forward_vars())[-count:]
    return Points(dict(zip(axes, arrays, strict=True)), arrays[0].size, _no_load)


def _no_load(load: tirx.BufferLoad, points: Points) -> np.ndarray:
    raise Unknown(f"a layout that reads {load.buffer.name}")


def _linear(layout: Layout, points: Points) -> np.ndarray:
    """Return the number of an output of ``layout``, the last axis first."""
    flat = np.int64(0)
    for index, extent in zip(layout.index, layout.get_output_shape(), strict=True):
        flat = flat * int(extent) + points.evaluate(index)
    return np.broadcast_to(flat, points.count)
