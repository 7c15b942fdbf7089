"""Copies between a tensor of words and other memory, as loops over elements or vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilelang import tvm
from tvm import tirx

from ...ir.walk import op_name
from ..regions.symbols import Symbols

WORD_COPY = "T.copy"
"""The tile operator that threads may execute instead of the TMA."""


@dataclass(frozen=True)
class Side:
    """Source or destination of a copy."""

    start: tirx.BufferLoad
    extents: tuple[tirx.PrimExpr, ...]

    @property
    def buffer(self) -> tirx.Buffer:
        return self.start.buffer

    @property
    def axes(self) -> list[int]:
        """Axes along which the copy has several elements."""
        return [axis for axis, extent in enumerate(self.extents) if not _equals(extent, 1)]

    def at(self, offsets: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """Return the indices at these offsets, one for each of ``axes``."""
        indices = list(self.start.indices)
        for axis, offset in zip(self.axes, offsets, strict=True):
            indices[axis] = indices[axis] + offset
        return indices


def sides_of(call: tirx.Call) -> tuple[Side, Side]:
    """Return source and destination of a ``T.copy``."""
    source, target = (Side(r.args[0], tuple(r.args[2:])) for r in call.args[:2])
    return source, target


def is_elementwise(call: tirx.PrimExpr) -> bool:
    """Return whether threads can run a copy element by element: both sides are boxes of equal
    constant extents."""
    if not all(op_name(r) == "tl.region" for r in call.args[:2]):
        return False
    extents = [[side.extents[axis] for axis in side.axes] for side in sides_of(call)]
    constant = all(isinstance(e, tirx.IntImm) for of_side in extents for e in of_side)
    return constant and list(map(int, extents[0])) == list(map(int, extents[1]))


def is_vectorizable(call: tirx.PrimExpr, words: tirx.Buffer, lanes: int, symbols: Symbols) -> bool:
    """Return whether a copy can move ``lanes`` consecutive elements at once: both sides are
    contiguous and aligned, and no layout divides the elements of the other side among threads.

    Args:
        words: the buffer on the side of the words.
    """
    source, target = sides_of(call)
    other = target if source.buffer.data.same_as(words.data) else source
    converts = source.buffer.dtype != target.buffer.dtype
    is_fragment = other.buffer.scope() == "local.fragment"
    is_within_tensor = source.buffer.data.same_as(target.buffer.data)
    if converts or is_fragment or is_within_tensor:
        return False
    return all(_is_aligned(side, lanes, symbols) for side in (source, target))


def _is_aligned(side: Side, lanes: int, symbols: Symbols) -> bool:
    last = len(side.extents) - 1
    if last not in side.axes:
        return False
    *outer, step = side.buffer.strides or (tirx.IntImm("int32", 1),)
    multiples = [
        side.extents[last], side.buffer.shape[last],
        symbols.program.inline_bindings(side.start.indices[last]), side.buffer.elem_offset, *outer,
    ]  # fmt: skip
    return _equals(step, 1) and all(_is_multiple(n, lanes) for n in multiples)


def _is_multiple(number: tirx.PrimExpr, lanes: int) -> bool:
    remainder = tirx.floormod(number, tirx.const(lanes, number.dtype))
    return tvm.arith.Analyzer().can_prove(tirx.EQ(remainder, tirx.const(0, number.dtype)))


def parallel(side: Side, lanes: int, body: Callable[[list[tirx.PrimExpr]], tirx.Stmt]) -> tirx.Stmt:
    """Return a T.Parallel over the elements of a side, ``lanes`` at a time along the last axis.

    Args:
        body: offsets along the axes of the side -> the statement.
    """
    extents = [int(side.extents[axis]) for axis in side.axes]
    variables = [tirx.Var(f"i{axis}", "int32") for axis in range(len(extents))]
    offsets: list[tirx.PrimExpr] = list(variables)
    if lanes > 1:
        extents[-1] //= lanes
        offsets[-1] = offsets[-1] * lanes
    stmt = body(offsets)
    for variable, extent in reversed(list(zip(variables, extents, strict=True))):
        stmt = tirx.For(variable, 0, extent, tirx.ForKind.PARALLEL, stmt)
    return stmt


def consecutive(indices: list[tirx.PrimExpr], lanes: int) -> list[tirx.PrimExpr]:
    """Return the indices of ``lanes`` elements from ``indices`` on, along the last axis."""
    return [*indices[:-1], tirx.Ramp(indices[-1], 1, lanes)] if lanes > 1 else indices


def _equals(extent: tirx.PrimExpr, value: int) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == value
