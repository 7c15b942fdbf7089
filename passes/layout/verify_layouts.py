"""Refuse fragments for which TileLang has too few registers, or reads too many."""

from __future__ import annotations

from collections.abc import Iterator

from tilelang.layout import Fragment
from tvm import DataType, ir, tirx
from tvm.arith import Analyzer

from ...builtins.errors import LanguageError
from ..ir.accesses import touches_in
from ..ir.walk import children_of, is_parallel, location, nodes_in, op_name, variables_in

_WHOLE = {"tl.tileop.copy": "T.copy", "tl.tileop.reduce": "T.reduce"}
"""Operators that access all registers of a fragment in some cases."""


def verify_layouts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse fragments whose layouts do not fit their shapes.

    TileLang infers the layout of a fragment from a ``T.Parallel`` loop or a ``T.copy`` that
    accesses it. If this statement accesses a part of the elements, the layout may have registers
    for this part only: it has a smaller shape, or places the other elements in threads that the
    block does not have. TileLang then drops these elements from all statements without an error.

    A fragment that receives the first rows or columns of another one gets the layout of the latter,
    with registers that nothing writes. ``T.Parallel`` omits them, but a reduction combines them,
    and a copy by matrix instructions, of elements of 16 bits, stores them after the tile.

    Raises:
        LanguageError: names the fragment and its shape, and the line of a statement that accesses a
            part of it, or the registers of no element.

    Before: ``x = T.alloc_fragment((256,), ...)`` with a layout of 64 elements, the extent of
    ``for i in T.Parallel(64): x[i] += 1``
    After:  LanguageError; legal programs stay unchanged
    """
    for block in nodes_in(func.body, tirx.SBlock):
        for buffer, layout in dict(block.annotations.get("layout_map", {})).items():
            if not isinstance(layout, Fragment):
                continue
            shape = tuple(map(int, buffer.shape))
            if _is_larger(layout, buffer):
                _refuse_whole_accesses(func.body, buffer, shape)
            if not _is_complete(layout, buffer):
                raise LanguageError(
                    f"{buffer.name} of shape {shape}: TileLang stores only a part of its elements "
                    "in registers, because a statement accesses only a part; expected T.Parallel "
                    "over all elements with a condition, such as if i < n, or a fragment of the "
                    f"size of the part{_place(func.body, buffer)}"
                )
    return func


def _is_complete(layout: Fragment, buffer: tirx.Buffer) -> bool:
    """Return whether ``layout`` has a register of the block for each element of ``buffer``."""
    shape, analyzer = layout.get_input_shape(), Analyzer()
    if any(int(stored) < int(extent) for stored, extent in zip(shape, buffer.shape, strict=False)):
        return False
    axes = layout.get_forward_vars()[-len(shape) :]  # without the number of the replica
    extents = dict(zip(axes, shape, strict=True))
    for var in variables_in(layout.forward_thread):
        analyzer.bind(var, ir.Range(0, extents.get(var, layout.replicate_size)))
    bound = analyzer.const_int_bound(layout.forward_thread)
    threads = layout.thread_range
    return threads is None or 0 <= bound.min_value <= bound.max_value < int(threads.extent)


def _is_larger(layout: Fragment, buffer: tirx.Buffer) -> bool:
    """Return whether ``layout`` has registers for more elements than ``buffer`` has."""
    extents = zip(layout.get_input_shape(), buffer.shape, strict=False)
    return any(int(stored) > int(extent) for stored, extent in extents)


def _refuse_whole_accesses(body: tirx.Stmt, buffer: tirx.Buffer, shape: tuple[int, ...]) -> None:
    """Refuse statements that access all registers of ``buffer``."""
    for stmt in _tile_statements(body):
        name = _WHOLE.get(op_name(getattr(stmt, "value", None)))
        accessed = {b.data: b for _, b, _ in touches_in(stmt)} if name else {}
        if buffer.data in accessed and (
            name == "T.reduce" or any(map(_moves_matrices, accessed.values()))
        ):
            raise LanguageError(
                f"{buffer.name} of shape {shape}: TileLang gives it all registers of the fragment "
                f"whose first elements it receives, and {name} accesses all of them; expected that "
                "part of the other fragment, such as total[:, :64], or a fragment of the same "
                f"shape{location(stmt)}"
            )


def _moves_matrices(buffer: tirx.Buffer) -> bool:
    """Return whether stmatrix or ldmatrix may move elements of ``buffer``."""
    return buffer.scope().startswith("shared") and DataType(str(buffer.dtype)).bits == 16


def _place(body: tirx.Stmt, buffer: tirx.Buffer) -> str:
    """Return the place of the first statement that accesses a part of ``buffer``."""
    for stmt in _tile_statements(body):
        if _accesses_part(stmt, buffer):
            return location(stmt)
    return ""


def _tile_statements(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """Yield the parallel loops and the operations on tiles in ``stmt``."""
    if isinstance(stmt, tirx.Evaluate) or is_parallel(stmt):
        yield stmt
        return
    for child in children_of(stmt):
        yield from _tile_statements(child)


def _accesses_part(stmt: tirx.Stmt, buffer: tirx.Buffer) -> bool:
    """Return whether an access in ``stmt`` omits elements of ``buffer``, apart from conditions."""
    analyzer = Analyzer()
    for loop in nodes_in(stmt, tirx.For):
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
    for node, accessed, _ in touches_in(stmt):
        if accessed.data.same_as(buffer.data):
            is_region = isinstance(node, tirx.Call)
            sizes = node.args[2:] if is_region else [_size(i, analyzer) for i in node.indices]
            if any(int(s) < int(e) for s, e in zip(sizes, buffer.shape, strict=False)):
                return True
    return False


def _size(index: tirx.PrimExpr, analyzer: Analyzer) -> int:
    """Return the number of values between the bounds of ``index``."""
    bound = analyzer.const_int_bound(index)
    return bound.max_value - bound.min_value + 1
