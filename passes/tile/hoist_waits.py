"""Move the waits of a pipelined loop before its computation, next to the loads they guard."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.spec import builtin_of
from ..ir.accesses import REGIONS, accesses_of, name_of
from ..ir.operators import hold
from ..ir.pipelined_loops import COPIES, KEPT_BY, guards_in, guards_loads, is_pipelined, loads_in
from ..ir.walk import (
    calls_in,
    effects_in,
    flatten,
    has_effect,
    location,
    op_name,
    rewrite_children,
    with_annotation,
)


def hoist_waits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move the waits and loads of a pipelined loop before statements that are independent of them.

    Warp specialization assigns the statements before the first use of a loaded tile to the producer
    if all of them are waits. A ``T.clear`` of an accumulator there keeps the waits with the
    consumers. So statements that only compute, on other memory, are moved after the waits and the
    loads. An operator that reads the first tile marks the start of the consumers' part. A loop that
    the program schedules itself stays unchanged, because the schedule counts its statements.

    Before: ``for k in T.Pipelined(n): T.clear(s); wait; T.copy(A, tile); T.fill(m, 0); gemm``
    After:  ``for k in T.Pipelined(n): wait; T.copy(A, tile); hold(tile); T.clear(s); T.fill(m, 0);
    gemm``
    """

    def hoist(stmt: tirx.Stmt) -> tirx.Stmt:
        stmt = rewrite_children(stmt, hoist)
        if not isinstance(stmt, tirx.For) or not is_pipelined(stmt):
            return stmt
        if "tl_pipeline_stage" in stmt.annotations:
            return stmt
        return rewrite_children(stmt, _hoist_in)

    return func.with_body(hoist(func.body))


def _hoist_in(body: tirx.Stmt) -> tirx.Stmt:
    """Rewrite the body of a pipelined loop, or of the only condition in it."""
    if isinstance(body, tirx.IfThenElse) and body.else_case is None:
        return rewrite_children(body, _hoist_in)
    if not isinstance(body, tirx.SeqStmt) or not any(map(guards_in, body.seq)):
        return body
    stmts = list(body.seq)
    last = max(i for i, s in enumerate(stmts) if guards_in(s))
    if not all(map(_precedes, stmts[:last])):
        stmts = _waits_first(stmts)
    return flatten(_with_hold(stmts))


def _precedes(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is a wait, a load or a value, which may precede the computation."""
    is_value = isinstance(stmt, tirx.Bind) and not effects_in(stmt)
    return bool(guards_in(stmt)) or bool(loads_in(stmt)) or is_value


def _computes(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` only computes on the block's own memory."""
    accesses = accesses_of(stmt)
    calls = calls_in(stmt, lambda c: has_effect(c) and op_name(c) not in REGIONS)
    return (
        all(op_name(c).startswith("tl.tileop.") for c in calls)
        and all(b.scope() != "global" for b in (accesses.reads | accesses.writes).values())
        and not _precedes(stmt)
    )


def _waits_first(stmts: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """Move statements that compute after the waits and loads that are independent of them."""
    out: list[tirx.Stmt] = []
    for stmt in stmts:
        index = len(out)
        if _precedes(stmt):
            while index and _computes(out[index - 1]) and _independent(out[index - 1], stmt):
                index -= 1
        if guards_in(stmt) and not all(map(_precedes, out[:index])):
            stmt = _with_reason(stmt, next(s for s in reversed(out[:index]) if not _precedes(s)))
        out.insert(index, stmt)
    return out


def _independent(first: tirx.Stmt, second: tirx.Stmt) -> bool:
    a, b = accesses_of(first), accesses_of(second)
    return {*b.reads, *b.writes}.isdisjoint(a.writes) and b.writes.keys().isdisjoint(a.reads)


def _with_reason(wait: tirx.Stmt, obstacle: tirx.Stmt) -> tirx.Stmt:
    """Annotate ``wait`` with the statement that it cannot pass."""
    alternative = _alternative_to(obstacle)
    text = tirx.StringImm(f"{name_of(obstacle)}\n{alternative}{location(obstacle)}")

    def mark(call: tirx.Call) -> tirx.Call | None:
        return with_annotation(call, KEPT_BY, text) if guards_loads(call) else None

    return ir_transform(wait, None, mark, ["tirx.Call"])


def _alternative_to(obstacle: tirx.Stmt) -> str:
    """Return what a program may have in place of a statement before the waits of its iteration."""
    name, specs = name_of(obstacle), [builtin_of(call) for call in effects_in(obstacle)]
    if any(spec.announces for spec in specs):
        # After the loads, it would be too late for readers that the loads may wait for.
        return f"{name} before T.Pipelined, or T.serial"
    after = f"{name} after the loads"
    return f"{after}, or T.gemm(clear_accum=True)" if name == "T.fill" else after


def _with_hold(stmts: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """Insert a use of the first loaded tile after the waits and loads.

    None is necessary if the next statement uses the tile.
    """
    target = next((t for s in stmts for t in _targets(s)), None)
    first = next((i for i, s in enumerate(stmts) if not _precedes(s)), None)
    if target is None or first is None or target.data in accesses_of(stmts[first]).reads:
        return stmts
    use = hold(tirx.BufferLoad(target, [0] * len(target.shape)))
    return [*stmts[:first], use, *stmts[first:]]


def _targets(stmt: tirx.Stmt) -> list[tirx.Buffer]:
    """Return the shared tiles that loads of ``stmt`` fill."""
    if not loads_in(stmt):
        return []
    return [c.args[1].args[0].buffer for c in calls_in(stmt, lambda c: op_name(c) in COPIES)]
