"""Accesses to ragged tensors: each counts as an access to its whole segment.

The place of a row in its segment may be data, and so may the segment of a write, except its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from ....builtins.errors import LanguageError
from ...ir.uniformity import Divergence
from ...ir.walk import format_expr
from .accesses import Access, Program
from .data_dependent import Region
from .footprints import Footprints, region_footprints
from .granules import elements_of
from .space import NotEvaluable, Space
from .symbols import Symbols
from .tensor_accesses import TensorAccesses


def segment_accesses(
    accesses: Iterable[Access], axes: int, program: Program, world_size: int
) -> list[Access]:
    """Return accesses to a ragged tensor as accesses to whole segments.

    Args:
        axes: number of axes that select a segment.

    Raises:
        LanguageError: an access adds to the tensor, or the elements that a write stores are not
            known.
    """
    return [_whole_segment(access, axes, program, world_size) for access in accesses]


def announcement_reads(counts: tirx.Buffer, accesses: Iterable[Access], axes: int) -> list[Access]:
    """Return the reads of announcements ``counts`` that come with the reads among ``accesses``: a
    wait for rows needs the announced total."""
    return [
        dataclasses.replace(
            read, tensor=counts, starts=(*read.starts[: 1 + axes], _int(0)),
            extents=(*read.extents[: 1 + axes], _int(2)),
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


def _whole_segment(access: Access, axes: int, program: Program, world_size: int) -> Access:
    if access.kind == "add":
        raise LanguageError(
            f"{access.text}, a ragged tensor; expected writes, each row once{access.location}"
        )
    stored = rows = 0
    if access.kind == "write":
        stored, rows = _stored_elements(access, axes, program, world_size)
    extents = [_int(n) for n in access.tensor.shape[1 + axes :]]
    return dataclasses.replace(
        access, stored=stored, stored_rows=rows,
        starts=(*access.starts[: 1 + axes], *(_int(0) for _ in extents)),
        extents=(*access.extents[: 1 + axes], *extents),
    )  # fmt: skip


def _stored_elements(
    access: Access, axes: int, program: Program, world_size: int
) -> tuple[int, int]:
    """Return the numbers of elements and of rows that a write stores each time that the block
    reaches it.

    Raises:
        LanguageError: the number varies or is data, or only some threads reach the write.
    """
    _verify_reached_by_block(access, program)
    space = Space(world_size, [*access.loops, *access.inner], program.values, partly=True)
    inner_conditions = access.conditions[access.branches :]
    try:
        if any(number >= len(access.loops) for number in space.open):
            raise NotEvaluable(access.inner[space.open[-1] - len(access.loops)].extent)
        for known in (*access.extents, *inner_conditions):
            space.evaluate(known)
        starts = [_without_data(start, access, space, program) for start in access.starts]
        region = Region(tuple(starts), access.extents, inner_conditions, is_certain=False)
        footprints = region_footprints(access, region, program, world_size)
    except NotEvaluable as error:
        raise LanguageError(
            f"{access.text}, and the number of elements that it stores depends on "
            f"{format_expr(error.node)}, which is known only at run time; expected one place for "
            f"all threads, and conditions on data around the whole operation{access.location}"
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
        whole = Symbols(program, 1).inlined(expr)
        if program.thread_control.divergence_of(whole) is Divergence.DIVERGENT:
            raise LanguageError(
                f"{access.text}, under {format_expr(expr)}, which differs between threads; "
                "expected conditions and loops that are the same for the whole block, or a "
                f"condition on T.get_thread_binding(){access.location}"
            )


def _without_data(
    index: tirx.PrimExpr, access: Access, space: Space, program: Program
) -> tirx.PrimExpr:
    """Return ``index``, or its distance from the first place if a part of it is data.

    Raises:
        NotEvaluable: such a part may differ between the threads.
    """
    if _unknown_in(index, space) is None:
        return index
    index = Symbols(program, 1).inlined(index)
    while (unknown := _unknown_in(index, space)) is not None:
        if program.thread_control.divergence_of(unknown) is not Divergence.UNIFORM:
            raise NotEvaluable(unknown)
        index = _replaced(index, unknown)
    distance = index - substitute(index, {loop.var: loop.min for loop in access.inner})
    return distance - int(space.evaluate(distance).min())


def _unknown_in(index: tirx.PrimExpr, space: Space) -> tirx.PrimExpr | None:
    try:
        space.evaluate(index)
    except NotEvaluable as error:
        return error.node
    return None


def _replaced(expr: tirx.PrimExpr, unknown: tirx.PrimExpr) -> tirx.PrimExpr:
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
    assert rows.counts is not None
    axes, shape = rows.segments, rows.grid.shape[: rows.segments]
    for traffic in (rows, rows.counts):
        for footprints in traffic.in_kernel("read", "write"):
            _verify_segments(footprints, axes)
    announced = [_segments_of(b, shape) for b in rows.counts.in_kernel("write")]
    for footprints in rows.in_kernel("write"):
        missing = np.setdiff1d(_segments_of(footprints, shape), np.concatenate([[], *announced]))
        if missing.size:
            size = (rows.world_size, *shape)
            segment = ", ".join(str(int(i)) for i in np.unravel_index(int(missing[0]), size))
            access = footprints.access
            raise LanguageError(
                f"{access.text}: rows of segment {rows.tensor.name}[{segment}] may be written, but "
                f"no rank announces it in this launch; expected W.announce for it, also of 0"
                f"{access.location}"
            )


def _segments_of(footprints: Footprints, shape: Sequence[int]) -> np.ndarray:
    """Return the numbers of the segments that an access touches."""
    owner, *low = footprints.distinct(footprints.owner, *footprints.low[: len(shape)])
    number = owner
    for index, extent in zip(low, shape, strict=True):
        number = number * extent + index
    return np.unique(number)
