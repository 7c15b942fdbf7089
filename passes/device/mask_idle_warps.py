"""Let producer warps that load nothing skip the producer's code, where they could deadlock."""

from __future__ import annotations

import itertools

from tvm import tirx

from ...builtins.memory import fence_proxy_async
from ...builtins.spec import builtin_of, declaration_of
from ..ir.accesses import is_private
from ..ir.block_barrier import is_barrier
from ..ir.memory_order import writes
from ..ir.walk import (
    MBARRIER_WAIT,
    calls_in,
    flatten,
    has_effect,
    nodes_in,
    op_name,
    rewrite_children,
    statements_of,
)
from ..ir.warp_roles import is_specialized, roles_of

_WARP = 32
_FOLLOWED = frozenset(
    {MBARRIER_WAIT, "tl.fence_proxy_async", declaration_of(fence_proxy_async).op_name}
)
"""Operations that TileLang and the passes let every producer thread execute."""
_REGISTERS = frozenset({"tl.set_max_nreg", "tl.no_set_max_nreg"})


def mask_idle_warps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let only the warp that issues a producer's TMA loads run the producer's code.

    In TileLang all producer warps wait for free stages, and one thread loads. The barrier of a
    stage distinguishes only two phases. A warp that observes a flag later than the loading warp may
    miss a whole phase. It then deadlocks, because the loading warp does not wait for it. The idle
    warps have no work there, so they skip the code between the barriers of the block. Producers in
    which every thread loads or arrives do wait for each other; they are not changed.

    Before: ``if tx < 128: set_max_nreg(24); for k in ...: mbarrier_wait_parity(...); if elect(128):
    tma_load(...)``
    After:  ``if tx < 128: set_max_nreg(24); if tx % 128 < 32: for k in ...: ...``
    """
    roles = roles_of(func)
    if roles is None:
        return func

    def mask(split: tirx.IfThenElse) -> tirx.Stmt:
        cases = iter([_without_idle_warps(split.then_case, roles.thread), split.else_case])
        return rewrite_children(split, lambda _: next(cases))

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if is_specialized(stmt):
            return roles.rewrite_splits(stmt, mask)
        return rewrite_children(stmt, visit)

    return func.with_body(visit(func.body))


def _without_idle_warps(producer: tirx.Stmt, thread: tirx.Var) -> tirx.Stmt:
    stmts = statements_of(producer)
    # All warps of a warp group must release registers together.
    first = len(list(itertools.takewhile(_sets_registers, stmts)))
    parts = [(b, list(p)) for b, p in itertools.groupby(stmts[first:], is_barrier)]
    work = [s for is_of_barriers, part in parts if not is_of_barriers for s in part]
    groups = {int(c.args[0]) for s in work for c in _elections(s)}
    if len(groups) != 1 or not all(_is_idle(_without_elected(s)) for s in work):
        return producer
    is_busy = thread % groups.pop() < _WARP
    for is_of_barriers, part in parts:
        part[:] = part if is_of_barriers else [tirx.IfThenElse(is_busy, flatten(part), None)]
    return flatten([*stmts[:first], *(s for _, part in parts for s in part)])


def _sets_registers(stmt: tirx.Stmt) -> bool:
    return op_name(getattr(stmt, "value", None)) in _REGISTERS


def _without_elected(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return ``stmt`` without the statements of an elected thread."""
    if isinstance(stmt, tirx.IfThenElse) and _elections(stmt.condition) and stmt.else_case is None:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return rewrite_children(stmt, _without_elected)


def _is_idle(stmt: tirx.Stmt) -> bool:
    """Return whether only the executing thread needs the effects of ``stmt``."""
    return all(is_private(store.buffer) for store in nodes_in(stmt, tirx.BufferStore)) and all(
        op_name(call) in _FOLLOWED or (builtin_of(call) is not None and not writes(call))
        for call in calls_in(stmt, has_effect)
    )


def _elections(node: tirx.Stmt | tirx.PrimExpr) -> list[tirx.Call]:
    return calls_in(node, lambda c: op_name(c) == "tl.tl_shuffle_elect")
