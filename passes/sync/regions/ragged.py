"""Accesses to ragged tensors: each counts as an access to a whole tile of rows of its segment.

The row in a segment may be data-dependent, and so may the segment of a write, except its source.

Axis 0 of an access is the rank axis. Axes 1 to ``axes`` select a segment, the last of them by its
source. Axis ``1 + axes`` is the row, and the columns begin at axis ``2 + axes``. ``Footprints`` do
not count the rank axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from ....builtins.errors import LanguageError
from ...ir.uniformity import Divergence
from ...ir.walk import format_expr, variables_in
from .accesses import Access, Program, RaggedRows
from .data_dependent import Region, iteration_space, modular_set
from .footprints import Footprints, region_footprints
from .granules import elements_of
from .space import IterationSpace, NotEvaluable
from .symbols import Symbols
from .tensor_accesses import TensorAccesses


def announcement_reads(counts: tirx.Buffer, accesses: Iterable[Access], axes: int) -> list[Access]:
    """Return the reads of announcements ``counts`` that come with the reads among ``accesses``: a
    wait for rows needs the announced total."""
    return [
        dataclasses.replace(
            read, tensor=counts, starts=(*read.starts[: 1 + axes], _int(0)),
            extents=(*read.extents[: 1 + axes], counts.shape[1 + axes]),
        )
        for read in accesses if read.kind == "read"
    ]  # fmt: skip


def _verify_segments(footprints: Footprints, axes: int) -> None:
    """Refuse an access to several segments at once, or a write to the segment of another rank."""
    access, mask = footprints.access, footprints.mask
    for size in footprints.size[:axes]:
        if np.any((size != 1) & mask):
            raise LanguageError(
                f"{access.text}, which accesses several segments at once; expected one segment at "
                f"a time{access.location}"
            )
    if access.kind == "write" and np.any((footprints.low[axes - 1] != footprints.rank) & mask):
        index = format_expr(access.starts[axes])
        raise LanguageError(
            f"{access.text}, which has source index {index}; expected W.rank(), because only the "
            f"source writes a segment{access.location}"
        )


def access_to_rows(access: Access, axes: int, program: Program, world_size: int) -> Access:
    """Return an access to a ragged tensor as an access to whole rows.

    Args:
        axes: number of axes that select a segment.

    Raises:
        LanguageError: it adds to the tensor, or the elements that it stores are not known.
    """
    if access.kind == "add":
        raise LanguageError(
            f"{access.text}, a ragged tensor; expected writes, each row once{access.location}"
        )
    stored = (0, 0)
    if access.kind == "write":
        stored = _stored_elements(access, axes, program, world_size)
    columns = [_int(n) for n in access.tensor.shape[2 + axes :]]
    start, extent, row = _rows_of(access, 1 + axes, program, world_size)
    if access.kind == "write" and row is not None and int(extent) > 1:
        _require_uncut(access, start, int(extent), int(access.tensor.shape[1 + axes]), program)
    return dataclasses.replace(
        access, ragged=RaggedRows(*stored, 1 + axes, row),
        starts=(*access.starts[: 1 + axes], start, *(_int(0) for _ in columns)),
        extents=(*access.extents[: 1 + axes], extent, *columns),
    )  # fmt: skip


def _rows_of(
    access: Access, axis: int, program: Program, world_size: int
) -> tuple[tirx.PrimExpr, tirx.PrimExpr, tirx.PrimExpr | None]:
    """Return the first row of an access, the number of rows, and ``RaggedRows.row``.

    If the first row is data-dependent, the box contains the rows of all iterations of the inner
    loops. It contains the whole segment if the first row may differ between the threads.
    """
    start, extent = access.starts[axis], access.extents[axis]
    space = iteration_space(access, program, world_size)
    if space.unknown_part(start) is None:
        return start, extent, None
    try:
        distance = space.evaluate(_distance(start, access, space, program))
        rows = int(distance.max() - distance.min()) + int(space.evaluate(extent).max())
    except NotEvaluable:
        return _int(0), access.tensor.shape[axis], None
    low = int(distance.min())
    row, start = (
        substitute(index, access.first_iteration) + low
        for index in (access.written_index(axis), program.inline_bindings(start))
    )
    return start, _int(rows), row


def _require_uncut(
    access: Access, start: tirx.PrimExpr, rows: int, capacity: int, program: Program
) -> None:
    """Refuse a write of several rows that the capacity may cut, because its signal counts all of
    them."""
    step, first = modular_set(program.inline_bindings(start))
    last = first if step == 0 else first + (capacity - 1 - first) // step * step
    if last + rows > capacity:
        raise LanguageError(
            f"{access.text}, which stores {rows} rows, and data decides whether all of them are "
            f"below row {capacity}, the capacity; expected a first row that is a multiple of "
            f"{rows}, and a multiple of {rows} as capacity, or one row at a time{access.location}"
        )


def access_to_tile(access: Access, axes: int, tile: int, symbols: Symbols) -> Access:
    """Return an access to whole rows as an access to the tile of rows that contains them."""
    axis, ragged = 1 + axes, access.ragged
    assert ragged is not None
    row = ragged.row
    starts, extents = list(access.starts), list(access.extents)

    def first_of_tile(index: tirx.PrimExpr) -> tirx.PrimExpr:
        return symbols.simplify(tirx.floordiv(index, tile) * tile, access)

    if tile >= int(access.tensor.shape[axis]):
        starts[axis], extents[axis], row = _int(0), access.tensor.shape[axis], None
    else:
        starts[axis], extents[axis] = first_of_tile(starts[axis]), _int(tile)
    if row is not None:
        first = first_of_tile(row)
        leaves_loops = any(
            loop.var in variables_in(row) and loop.var not in variables_in(first)
            for loop in access.loops
        )
        row = first if leaves_loops else row
    return dataclasses.replace(
        access, starts=tuple(starts), extents=tuple(extents),
        ragged=dataclasses.replace(ragged, row=row),
    )  # fmt: skip


def _stored_elements(
    access: Access, axes: int, program: Program, world_size: int
) -> tuple[int, int]:
    """Return the numbers of elements and of rows that a write stores each time that the block
    reaches it.

    Raises:
        LanguageError: the number varies or is data-dependent, or only some threads reach the write.
    """
    _verify_reached_by_block(access, program)
    space = iteration_space(access, program, world_size)
    inner_conditions = access.conditions[access.branches :]
    try:
        if any(number >= len(access.loops) for number in space.runtime_loops):
            raise NotEvaluable(access.inner[space.runtime_loops[-1] - len(access.loops)].extent)
        for known in (*access.extents, *inner_conditions):
            space.evaluate(known)
        for axis in range(2 + axes, len(access.starts)):
            _require_inside(access, axis, space, program)
        starts = [_known_index(start, access, space, program) for start in access.starts]
        region = Region(tuple(starts), access.extents, inner_conditions, is_certain=False)
        footprints = region_footprints(access, region, program, world_size)
    except NotEvaluable as error:
        raise LanguageError(
            f"{access.text}, and the number of elements that it stores depends on "
            f"{format_expr(error.node)}, which is known only at run time; expected one row for all "
            "threads, columns that are inside of the row for all data, and conditions on data "
            f"around the whole operation{access.location}"
        ) from None
    counts = np.unique(footprints.active(elements_of(footprints))[0])
    if len(counts) > 1:
        raise LanguageError(
            f"{access.text}, which stores {counts[0]} to {counts[-1]} elements in a segment; "
            f"expected an equal number each time{access.location}"
        )
    rows = footprints.active(footprints.size[axes])[0].max(initial=0)
    return int(counts.max(initial=0)), int(rows)


def _verify_reached_by_block(access: Access, program: Program) -> None:
    """Refuse a write in a branch or loop that depends on the thread by more than its index: each
    thread there would signal the rows of the whole block."""
    bounds = [e for loop in access.loops for e in (loop.min, loop.extent)]
    for expr in (*access.conditions[: access.branches], *bounds):
        whole = program.inline_bindings(expr)
        if program.thread_control.divergence_of(whole) is Divergence.DIVERGENT:
            raise LanguageError(
                f"{access.text}, under {format_expr(expr)}, which differs between threads; "
                "expected conditions and loops that are the same for the whole block, or a "
                f"condition on T.get_thread_binding(){access.location}"
            )


def _require_inside(access: Access, axis: int, space: IterationSpace, program: Program) -> None:
    """Refuse data-dependent columns, unless no data moves them past the end of a row. There
    ``T.copy`` stores fewer elements, and the signal would count all.

    Raises:
        NotEvaluable: the data-dependent part.
    """
    start = access.starts[axis]
    if (unknown := space.unknown_part(start)) is None:
        return
    analyzer = tvm.arith.Analyzer()
    for loop in (*access.loops, *access.inner):
        analyzer.bind(loop.var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    bound = analyzer.const_int_bound(program.inline_bindings(start))
    size = int(space.evaluate(access.extents[axis]).max())
    if bound.min_value < 0 or bound.max_value + size > int(access.tensor.shape[axis]):
        raise NotEvaluable(unknown)


def _known_index(
    index: tirx.PrimExpr, access: Access, space: IterationSpace, program: Program
) -> tirx.PrimExpr:
    """Return ``index`` or, if a part of it is data-dependent, its distance from the lowest value.

    Raises:
        NotEvaluable: such a part may differ between the threads.
    """
    if space.unknown_part(index) is None:
        return index
    distance = _distance(index, access, space, program)
    return distance - int(space.evaluate(distance).min())


def _distance(
    index: tirx.PrimExpr, access: Access, space: IterationSpace, program: Program
) -> tirx.PrimExpr:
    """Return the distance of a data-dependent ``index`` from its value in the first iteration of
    the inner loops.

    Raises:
        NotEvaluable: such a part may differ between the threads.
    """
    index = program.inline_bindings(index)
    while (unknown := space.unknown_part(index)) is not None:
        if program.thread_control.divergence_of(unknown) is not Divergence.UNIFORM:
            raise NotEvaluable(unknown)
        index = _replace_by_zero(index, unknown)
    return index - substitute(index, access.first_iteration)


def _replace_by_zero(expr: tirx.PrimExpr, unknown: tirx.PrimExpr) -> tirx.PrimExpr:
    def zero(node):
        return tirx.const(0, unknown.dtype) if node.same_as(unknown) else None

    kinds = ["tirx.BufferLoad", "tirx.Call", "tirx.Var"]
    return ir_transform(tirx.Evaluate(expr), None, zero, kinds).value


def _int(value: int | tirx.PrimExpr) -> tirx.IntImm:
    return tirx.IntImm("int32", int(value))


def verify_announcements(rows: TensorAccesses) -> None:
    """Refuse accesses to the segments of ``rows`` that are wrong or that no rank announces.

    Raises:
        LanguageError: names the access and its line.
    """
    axes, shape = rows.segments, (rows.world_size, *rows.grid.shape[: rows.segments])
    counts = [rows.counts] if rows.counts is not None else []
    for accesses in (rows, *counts):
        for footprints in accesses.in_kernel("read", "write"):
            _verify_segments(footprints, axes)
    announced = [_segments_of(f, shape) for c in counts for f in c.in_kernel("write")]
    for footprints in rows.in_kernel("write"):
        missing = np.setdiff1d(_segments_of(footprints, shape), np.concatenate([[], *announced]))
        if missing.size:
            segment = ", ".join(str(int(i)) for i in np.unravel_index(int(missing[0]), shape))
            access = footprints.access
            raise LanguageError(
                f"{access.text}: rows of segment {rows.tensor.name}[{segment}] may be written, but "
                f"no rank announces it in this launch; expected W.announce for it, also of 0"
                f"{access.location}"
            )


def _segments_of(footprints: Footprints, shape: Sequence[int]) -> np.ndarray:
    """Return the numbers of the segments that an access touches, in row-major order of ``shape``,
    whose first axis is the owner."""
    index = footprints.distinct(footprints.owner, *footprints.low[: len(shape) - 1])
    return np.unique(np.ravel_multi_index(index, shape))
