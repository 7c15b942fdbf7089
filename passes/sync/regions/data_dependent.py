"""Regions of accesses whose indices, loops or conditions are known only at run time.

Such an access counts as an access to all places that it may touch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tilelang import tvm
from tvm import tirx

from ....builtins.spec import builtin_of
from ...ir.accesses import written_tensors
from ...ir.uniformity import Divergence
from ...ir.walk import bound_in, effects_in, variables_and_loads
from .accesses import Access, Program
from .space import IterationSpace, Loop, NotEvaluable


@dataclass(frozen=True)
class Limit:
    """Condition ``index < value`` around an access, with a value that is equal on all ranks.

    Attributes:
        index: what is compared, known at compile time.
        value: a call of a builtin with the role ``uniform``.
    """

    index: tirx.PrimExpr
    value: tirx.Call


@dataclass(frozen=True)
class Region:
    """The part of an access that can be evaluated at compile time.

    Attributes:
        starts, extents, conditions: those of the access, or the part of them that is known.
        places: loops over the places among which the kernel chooses one at run time.
        runtime_axes: for each data-dependent axis (0 is the rank axis), the index that chooses the
            place, as the program writes it at the access.
        runtime_loops: for each loop around the access with an unknown number of iterations, its
            extent as the program writes it; the key is the number of the loop.
        is_certain: whether all these boxes are certainly accessed.
        limit: limit of the access, if it depends on one.
    """

    starts: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]
    conditions: tuple[tirx.PrimExpr, ...]
    places: tuple[Loop, ...] = ()
    runtime_axes: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    runtime_loops: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    is_certain: bool = True
    limit: Limit | None = None


def iteration_space(access: Access, program: Program, world_size: int) -> IterationSpace:
    """Return the iterations of an access, in which loops may have unknown ranges."""
    loops = [*access.loops, *access.inner]
    return IterationSpace(world_size, loops, program.values, allow_unknown_ranges=True)


def limited_region(access: Access, program: Program, world_size: int) -> Region | None:
    """Return the region of an access that depends on one limit and is known otherwise, as if the
    condition were true. Return None for other accesses."""
    space = iteration_space(access, program, world_size)
    branches = [p for c in access.conditions[: access.branches] for p in _parts(c)]
    others = [p for c in access.conditions[access.branches :] for p in _parts(c)]
    unknown = [part for part in branches if space.unknown_part(part) is not None]
    if space.runtime_loops or len(unknown) != 1:
        return None
    limit = limit_of(unknown[0], program)
    if limit is None or space.unknown_part(limit.index) is not None:
        return None
    known = tuple(part for part in (*branches, *others) if part is not unknown[0])
    return Region(access.starts, access.extents, known, is_certain=False, limit=limit)


def limit_of(condition: tirx.PrimExpr, program: Program) -> Limit | None:
    """Return the limit that a condition compares with; None for another condition."""
    if isinstance(condition, tirx.GT):
        index, value = condition.b, condition.a
    elif isinstance(condition, tirx.LT):
        index, value = condition.a, condition.b
    else:
        return None
    value = program.inline_bindings(value)
    spec = builtin_of(value) if isinstance(value, tirx.Call) else None
    return Limit(index, value) if spec is not None and spec.uniform else None


def possible_region(access: Access, program: Program, world_size: int) -> Region:
    """Return all places that a data-dependent access may touch.

    An unknown condition counts as true, and a loop of unknown range as one iteration. An unknown
    index may choose any place along its axis if it is the same for all threads and if the places do
    not overlap. Otherwise the access may touch the whole axis.

    Raises:
        NotEvaluable: it may touch several ranks' copies at once, or the number of blocks is
            not known.
    """
    space = iteration_space(access, program, world_size)
    parts = [part for condition in access.conditions for part in _parts(condition)]
    conditions = tuple(part for part in parts if space.unknown_part(part) is None)
    runtime_loops = {n: _extent_of(access, n) for n in space.runtime_loops if n < len(access.loops)}
    is_certain = len(conditions) == len(parts) and not space.runtime_loops
    region = Region(
        access.starts,
        access.extents,
        conditions,
        runtime_loops=runtime_loops,
        is_certain=is_certain,
    )
    for axis, start in enumerate(access.starts):
        if space.unknown_part(start) is not None:
            region = _extended(region, access, axis, space, program)
    return region


def _extended(
    region: Region, access: Access, axis: int, space: IterationSpace, program: Program
) -> Region:
    """Return ``region`` with all places on ``axis``."""
    start, index = access.starts[axis], access.written_index(axis)
    size, extent = int(access.tensor.shape[axis]), int(space.evaluate(access.extents[axis]).max())
    starts, extents = list(region.starts), list(region.extents)
    step, first = modular_set(program.inline_bindings(start))
    if size > 1 and extent <= step and _is_uniform(access, index, program):
        place = tirx.Var("place", start.dtype)
        count = tirx.IntImm(start.dtype, max(0, -(-(size - first) // step)))
        starts[axis] = place * step + first
        return dataclasses.replace(
            region, starts=tuple(starts), is_certain=False,
            places=(*region.places, Loop(place, tirx.IntImm(start.dtype, 0), count)),
            runtime_axes={**region.runtime_axes, axis: index},
        )  # fmt: skip
    if axis == 0 and size > 1:
        space.evaluate(start)  # raises NotEvaluable with the unknown node
    starts[axis], extents[axis] = tirx.IntImm("int32", 0), tirx.IntImm("int32", size)
    return dataclasses.replace(region, starts=tuple(starts), extents=tuple(extents))


def is_invariant(stmt: tirx.Stmt, expr: tirx.PrimExpr, program: Program) -> bool:
    """Return whether ``expr``, used inside ``stmt``, has the same value before and after ``stmt``.

    Everything that ``expr`` uses must be defined outside of ``stmt``, which must not change it.
    """
    bound = bound_in(stmt)
    changing = written_tensors(stmt) | {a.tensor.data for a in program.accesses}
    return not effects_in(expr) and not any(
        node in bound if isinstance(node, tirx.Var) else node.buffer.data in changing
        for node in variables_and_loads(expr)
    )


def _is_uniform(access: Access, index: tirx.PrimExpr, program: Program) -> bool:
    """Return whether ``index`` has one value for all threads during the whole access."""
    uniform = program.thread_control.divergence_of(index) is Divergence.UNIFORM
    return uniform and is_invariant(access.anchor, index, program)


def _extent_of(access: Access, number: int) -> tirx.PrimExpr:
    """Return the extent of loop ``number`` around an access, as the program writes it."""
    enclosing = access.enclosing[number]
    if enclosing.stmt is None:
        raise NotEvaluable(enclosing.loop.extent)
    return enclosing.stmt.extent


def modular_set(index: tirx.PrimExpr) -> tuple[int, int]:
    """Return ``coeff, base``: ``index`` is always a multiple of ``coeff``, plus ``base``."""
    modular = tvm.arith.Analyzer().modular_set(index)
    return int(modular.coeff), int(modular.base)


def _parts(condition: tirx.PrimExpr) -> Iterator[tirx.PrimExpr]:
    if isinstance(condition, tirx.And):
        yield from _parts(condition.a)
        yield from _parts(condition.b)
    else:
        yield condition
