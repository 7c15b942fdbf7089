"""What a read may touch whose place, rounds or conditions only the running kernel knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tilelang import tvm
from tvm import tirx

from ...ir.uniformity import Divergence
from ...ir.walk import bound_in, effects_in, variables_and_loads, written_tensors
from .accesses import Access, Program, base_of
from .space import Loop, NotEvaluable, Space
from .symbols import Symbols


@dataclass(frozen=True)
class Region:
    """What is evaluated of an access.

    Attributes:
        starts, extents, conditions: of the access, or what is known of them.
        places: loops over the places of which the running kernel chooses one.
        open_axes: by axis, the rank's first, the index that chooses a place, as the program says
            it where the access stands.
        open_loops: by number, the extent of each loop around the access whose rounds are not known,
            as the program says it.
        is_certain: whether it is known which of these boxes are touched.
    """

    starts: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]
    conditions: tuple[tirx.PrimExpr, ...]
    places: tuple[Loop, ...] = ()
    open_axes: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    open_loops: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    is_certain: bool = True

    @classmethod
    def of(cls, access: Access) -> Region:
        """All of it is known."""
        return cls(access.starts, access.extents, access.conditions)


def possible_region(access: Access, program: Program, world_size: int) -> Region:
    """All that a read may touch.

    A condition that is not known holds, a loop of unknown rounds has one. Where an index is not
    known, each place along its axis may be read if the index is the same for all threads and
    chooses among places that do not overlap; else the whole axis is read.

    Raises:
        NotEvaluable: it may touch several ranks' copies at once, or the blocks of a launch are not
            known.
    """
    space = Space(world_size, [*access.loops, *access.inner], program.values, partly=True)
    parts = [part for condition in access.conditions for part in _parts(condition)]
    known = tuple(part for part in parts if _is_known(space, part))
    open_loops = {n: _rounds(access, n) for n in space.open if n < len(access.loops)}
    is_certain = len(known) == len(parts) and not space.open
    region = Region(
        access.starts, access.extents, known, open_loops=open_loops, is_certain=is_certain
    )
    for axis, start in enumerate(access.starts):
        if not _is_known(space, start):
            region = _opened(region, access, axis, space, program)
    return region


def _opened(region: Region, access: Access, axis: int, space: Space, program: Program) -> Region:
    """``region`` with all places on an axis."""
    start, index = access.starts[axis], base_of(access.node.indices[axis])
    size, extent = int(access.tensor.shape[axis]), int(space.of(access.extents[axis]).max())
    starts, extents = list(region.starts), list(region.extents)
    step, first = _steps(Symbols(program, 1).inlined(start))
    if size > 1 and extent <= step and _is_one(access, index, program):
        place = tirx.Var("place", start.dtype)
        count = tirx.IntImm(start.dtype, max(0, -(-(size - first) // step)))
        starts[axis] = place * step + first
        return dataclasses.replace(
            region, starts=tuple(starts), is_certain=False,
            places=(*region.places, Loop(place, tirx.IntImm(start.dtype, 0), count)),
            open_axes={**region.open_axes, axis: index},
        )  # fmt: skip
    if axis == 0 and size > 1:
        space.of(start)  # says what is not known
    starts[axis], extents[axis] = tirx.IntImm("int32", 0), tirx.IntImm("int32", size)
    return dataclasses.replace(region, starts=tuple(starts), extents=tuple(extents))


def stays_in(stmt: tirx.Stmt, expr: tirx.PrimExpr, program: Program) -> bool:
    """Whether ``expr``, as the program says it inside ``stmt``, can be said before it, too, and has
    one value all through it."""
    bound = bound_in(stmt)
    changing = written_tensors(stmt) | {a.tensor.data for a in program.accesses}
    return not effects_in(expr) and not any(
        node in bound if isinstance(node, tirx.Var) else node.buffer.data in changing
        for node in variables_and_loads(expr)
    )


def _is_one(access: Access, index: tirx.PrimExpr, program: Program) -> bool:
    """Whether ``index`` has one value for all threads and all through an access."""
    same = program.thread_control.of(index) is Divergence.UNIFORM
    return same and stays_in(access.anchor, index, program)


def _rounds(access: Access, number: int) -> tirx.PrimExpr:
    """How often the loop of this number around a read goes round, as the program says it."""
    loop = access.around[number]
    if loop is None:
        raise NotEvaluable(access.loops[number].extent)
    return loop.extent


def _steps(index: tirx.PrimExpr) -> tuple[int, int]:
    """Of what ``index`` surely is a multiple, and how much more than that it is."""
    of = tvm.arith.Analyzer().modular_set(index)
    return int(of.coeff), int(of.base)


def _parts(condition: tirx.PrimExpr) -> Iterator[tirx.PrimExpr]:
    if isinstance(condition, tirx.And):
        yield from _parts(condition.a)
        yield from _parts(condition.b)
    else:
        yield condition


def _is_known(space: Space, expr: tirx.PrimExpr) -> bool:
    try:
        space.of(expr)
    except NotEvaluable:
        return False
    return True
