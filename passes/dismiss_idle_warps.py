"""A warp that loads nothing does not follow the barriers of those that do."""

from __future__ import annotations

from tvm import tirx

from ..builtins.declare import builtin_of
from .keep_to_block import SCOPE
from .memory_order import writes
from .walk import calls_in, flatten, op_name, rewrite_children

_WARP = 32
_FOLLOWED = frozenset(
    {"tl.mbarrier_wait_parity", "tl.fence_proxy_async", "tileweave.fence_proxy_async"}
)
"""What TileLang and our passes let every producer thread do."""


def dismiss_idle_warps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let only the warp that issues a producer's TMA loads run the producer's code.

    TileLang lets all producer warps wait for free stages, and one thread load. A stage's barrier
    tells two phases apart, no more. A warp that comes late, since it saw a flag later than the
    loading one, may find its phase over and the next one begun, and then waits for ever: nothing
    holds the loading warp back for it. The idle warps have nothing to do there, so they leave.
    Producers of which every thread loads or arrives somewhere hold each other; they stay as they
    are.

    Before: ``if tx < 128: set_max_nreg(24); for k in ...: mbarrier_wait_parity(...); if elect(128):
    tma_load(...)``
    After:  ``if tx < 128: set_max_nreg(24); if tx % 128 < 32: for k in ...: ...``
    """
    thread: list[tirx.Var] = []

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == SCOPE:
            return rewrite_children(stmt, lambda s: specialised(s, int(stmt.node[0])))
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            if stmt.node.thread_tag == "threadIdx.x":
                thread[:] = [stmt.node.var]
        return rewrite_children(stmt, visit)

    def specialised(stmt: tirx.Stmt, producers: int) -> tirx.Stmt:
        if isinstance(stmt, tirx.IfThenElse) and _is_below(stmt.condition, thread[0], producers):
            cases = iter([_dismissed(stmt.then_case, thread[0]), stmt.else_case])
            return rewrite_children(stmt, lambda _: next(cases))
        return rewrite_children(stmt, lambda s: specialised(s, producers))

    return func.with_body(visit(func.body))


def _is_below(condition: tirx.PrimExpr, thread: tirx.Var, count: int) -> bool:
    below = isinstance(condition, tirx.LT) and condition.a.same_as(thread)
    return below and isinstance(condition.b, tirx.IntImm) and int(condition.b) == count


def _dismissed(producer: tirx.Stmt, thread: tirx.Var) -> tirx.Stmt:
    groups = {int(c.args[0]) for c in _elections(producer)}
    if len(groups) != 1 or not _is_followed(producer):
        return producer
    (group,) = groups
    stmts = list(producer.seq) if isinstance(producer, tirx.SeqStmt) else [producer]
    start = next(i for i, s in enumerate(stmts) if not _sets_registers(s))
    busy = tirx.IfThenElse(thread % group < _WARP, flatten(stmts[start:]), None)
    return flatten([*stmts[:start], busy])


def _is_followed(stmt: tirx.Stmt) -> bool:
    """Whether nothing but what one elected thread does needs any thread of the producer."""
    if isinstance(stmt, tirx.IfThenElse) and _elections(stmt.condition):
        return stmt.else_case is None
    if isinstance(stmt, tirx.BufferStore):
        return stmt.buffer.scope().startswith("local")
    if isinstance(stmt, tirx.Evaluate):
        return _sets_registers(stmt) or all(_follows(c) for c in calls_in(stmt, _has_effect))
    followed = True

    def check(inner: tirx.Stmt) -> tirx.Stmt:
        nonlocal followed
        followed = followed and _is_followed(inner)
        return inner

    rewrite_children(stmt, check)
    return followed


def _follows(call: tirx.Call) -> bool:
    return op_name(call) in _FOLLOWED or (builtin_of(call) is not None and not writes(call))


def _has_effect(call: tirx.Call) -> bool:
    effect = call.op.get_attr("TCallEffectKind") if hasattr(call.op, "get_attr") else None
    return effect is None or effect.value >= tirx.CallEffectKind.UpdateState.value


def _elections(node) -> list[tirx.Call]:
    return calls_in(node, lambda c: op_name(c) == "tl.tl_shuffle_elect")


def _sets_registers(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) in (
        "tl.set_max_nreg",
        "tl.no_set_max_nreg",
    )
