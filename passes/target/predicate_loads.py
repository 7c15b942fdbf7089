"""Let the producer of a pipelined loop choose the tensor from which it loads a tile."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tilelang import tvm
from tvm import tirx
from tvm.target import Target

from ...builtins.spec import builtin_of
from ...builtins.symmetric import itemsize, packed_strides
from ..ir.memory_order import writes
from ..ir.operators import ONLY_IF
from ..ir.pipelined_loops import is_pipelined
from ..ir.tma import TMA_MULTIPLE, may_have_producer
from ..ir.walk import effects_in, flatten, has_loads, op_name, rewrite_children, statements_of


def predicate_loads(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Move copies out of a branch of a pipelined loop that only selects the source of a tile.

    TileLang's producer executes only copies that are direct statements of the loop. The consumers
    execute copies in branches, through their registers. So the copies move out of the branch, and
    an operator in an index holds the condition. ``guard_loads`` restores the condition around the
    lowered load. Waits before a copy stay in a branch of their own, which TileLang assigns to the
    producer. A branch stays unchanged if the TMA cannot load all its sources.

    Before: ``if mine: T.copy(A[m, k], tile) else: T.copy(B[m, k], tile)``
    After:  ``T.copy(A[m, only_if(mine, k)], tile); T.copy(B[m, only_if(not mine, k)], tile)``
    """
    if not may_have_producer(target):
        return func

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        # A loop that the program schedules itself is unchanged: its schedule counts statements.
        scheduled = isinstance(stmt, tirx.For) and "tl_pipeline_stage" in stmt.annotations
        if isinstance(stmt, tirx.For) and is_pipelined(stmt) and not scheduled:
            return rewrite_children(stmt, without_branch)
        return rewrite_children(stmt, visit)

    def without_branch(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            return rewrite_children(stmt, without_branch)
        if not isinstance(stmt, tirx.IfThenElse):
            return stmt
        choices = list(_choices(stmt, []))
        if not _fill_one_tile(choices):
            return stmt
        waits = [tirx.IfThenElse(c.holds, flatten(c.waits), None) for c in choices if c.waits]
        return flatten([*waits, *map(_predicated_copy, choices)])

    return func.with_body(visit(func.body))


@dataclass(frozen=True)
class _Choice:
    """One side of a branch: its conditions, and its last statement with the waits before it."""

    conditions: list[tirx.PrimExpr]
    waits: list[tirx.Stmt]
    copy: tirx.Stmt | None

    @property
    def holds(self) -> tirx.PrimExpr:
        return functools.reduce(tirx.And, self.conditions)


def _choices(stmt: tirx.Stmt | None, conditions: list[tirx.PrimExpr]) -> Iterator[_Choice]:
    """Yield the loads among which ``stmt`` selects, each with its conditions."""
    if isinstance(stmt, tirx.IfThenElse):
        yield from _choices(stmt.then_case, [*conditions, stmt.condition])
        yield from _choices(stmt.else_case, [*conditions, tirx.Not(stmt.condition)])
    else:
        *before, last = statements_of(stmt)
        yield _Choice(conditions, before, last)


def _fill_one_tile(choices: list[_Choice]) -> bool:
    """Return whether all of ``choices`` are copies into the same tile that the TMA supports."""
    copies = [c.copy.value for c in choices if isinstance(c.copy, tirx.Evaluate)]
    if len(copies) < len(choices) or not all(map(_is_tma_load, copies)):
        return False
    tiles = [copy.args[1] for copy in copies]
    return (
        all(tvm.ir.structural_equal(tile, tiles[0]) for tile in tiles)
        and all(_is_wait(wait) for c in choices for wait in c.waits)
        and all(_is_fixed(condition) for c in choices for condition in c.conditions)
    )


def _is_tma_load(call: tirx.PrimExpr) -> bool:
    if op_name(call) != "tl.tileop.copy" or call.annotations:  # annotations may disable the TMA
        return False
    (source, _, *extents), (target, *_) = (region.args for region in call.args[:2])
    proved = tvm.arith.Analyzer().can_prove
    buffer, size = source.buffer, itemsize(source.buffer.dtype)
    *outer, last = buffer.strides or packed_strides(buffer.shape)
    aligned = [*(stride * size for stride in outer), extents[-1] * size]
    return (
        buffer.scope() == "global"
        and target.buffer.scope().startswith("shared")
        and target.buffer.dtype == buffer.dtype
        and proved(last == 1)
        and all(proved(n % TMA_MULTIPLE == 0) for n in aligned)
    )


def _is_wait(stmt: tirx.Stmt) -> bool:
    if isinstance(stmt, tirx.IfThenElse):
        inner = stmt.then_case if stmt.else_case is None and _is_fixed(stmt.condition) else None
        return inner is not None and _is_wait(inner)
    call = getattr(stmt, "value", None)
    spec = builtin_of(call)
    return spec is not None and spec.waits and not writes(call)


def _is_fixed(condition: tirx.PrimExpr) -> bool:
    """Return whether ``condition`` reads no memory, so that it can be evaluated elsewhere."""
    return not has_loads(condition) and not effects_in(condition)


def _predicated_copy(choice: _Choice) -> tirx.Stmt:
    call = choice.copy.value
    source, *other_arguments = call.args
    start, *extents = source.args
    index = start.indices[-1]
    conditional = tirx.call_intrin(index.dtype, tvm.ir.Op.get(ONLY_IF), choice.holds, index)
    start = tirx.BufferLoad(start.buffer, [*start.indices[:-1], conditional])
    region = tirx.Call(source.dtype, source.op, [start, *extents])
    arguments = [region, *other_arguments]
    return tirx.Evaluate(tirx.Call(call.dtype, call.op, arguments, call.annotations))
