"""Move final waits to the producer warps, and let those that load nothing skip their code."""

from __future__ import annotations

import itertools

from tvm import tirx

from ...builtins.memory import fence_proxy_async
from ...builtins.spec import builtin_of, declaration_of
from ..ir.accesses import is_private
from ..ir.block_barrier import is_barrier
from ..ir.marks import without_marks
from ..ir.memory_order import writes
from ..ir.walk import (
    MBARRIER_WAIT,
    builtins_in,
    calls_in,
    flatten,
    has_effect,
    nodes_in,
    op_name,
    rewrite_children,
    statements_of,
    variables_in,
)
from ..ir.warp_roles import WarpRoles, is_specialized, roles_of

_WARP = 32
_FOLLOWED = frozenset(
    {MBARRIER_WAIT, "tl.fence_proxy_async", declaration_of(fence_proxy_async).op_name}
)
"""Operations that TileLang and the passes let every producer thread execute."""
_REGISTERS = frozenset({"tl.set_max_nreg", "tl.no_set_max_nreg"})


def assign_producers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move the waits at the end of the consumers' part to the producers, and let only the warp that
    issues a producer's TMA loads run the producer's code.

    A wait that times out calls a function. In the consumers this call uses registers: wgmma is
    serialized, or register allocation fails. Only the end of the kernel follows these waits, so the
    producer, which has issued all loads, can execute them. A wait of a thread that the program
    selects by its index stays, because the producers have other indices.

    In TileLang all producer warps wait for free stages, and one thread loads. The barrier of a
    stage distinguishes only two phases. A warp that observes a flag later than the loading warp may
    miss a whole phase. It then deadlocks, because the loading warp does not wait for it. The idle
    warps have no work there, so they skip the code between the barriers of the block. Producers in
    which every thread loads or arrives do wait for each other; they are not changed.

    Before: ``if tx < 128: set_max_nreg(24); for k in ...: mbarrier_wait_parity(...); if elect(128):
    tma_load(...); else: multiply; if block == last: wait_reached(...)``
    After:  ``if tx < 128: set_max_nreg(24); if tx % 128 < 32: for k in ...: ...; if block == last:
    wait_reached(...); else: multiply``
    """
    roles = roles_of(func)
    return func if roles is None else func.with_body(_Assignment(roles).visit(func.body, True))


class _Assignment:
    def __init__(self, roles: WarpRoles) -> None:
        self._roles = roles
        self._threads: set[tirx.Var] = set()

    def visit(self, stmt: tirx.Stmt, is_last: bool) -> tirx.Stmt:
        """Change the branches of producers and consumers in ``stmt``.

        Args:
            is_last: whether the kernel ends after ``stmt``.
        """
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            if stmt.node.thread_tag.startswith("threadIdx"):
                self._threads.add(stmt.node.var)
        if is_specialized(stmt):
            return self._roles.rewrite_splits(stmt, lambda split: self._assign(split, is_last))
        is_last = is_last and not isinstance(stmt, (tirx.For, tirx.While))
        last = stmt.seq[-1] if isinstance(stmt, tirx.SeqStmt) else None
        return rewrite_children(
            stmt, lambda s: self.visit(s, is_last and (last is None or s.same_as(last)))
        )

    def _assign(self, split: tirx.IfThenElse, is_last: bool) -> tirx.Stmt:
        consumers = [] if split.else_case is None else statements_of(split.else_case)
        waits = self._final_waits(consumers) if is_last else []
        producer = flatten([split.then_case, *waits]) if waits else split.then_case
        cases = iter([
            _without_idle_warps(producer, self._roles.thread),
            flatten(consumers[: len(consumers) - len(waits)]) if waits else split.else_case,
        ])  # fmt: skip
        return rewrite_children(split, lambda _: next(cases))

    def _final_waits(self, consumers: list[tirx.Stmt]) -> list[tirx.Stmt]:
        """Return the statements at the end of ``consumers`` that only wait, and that the producers
        can execute."""
        fixed = {b.var for stmt in consumers for b in nodes_in(stmt, tirx.Bind)} | self._threads
        waits: list[tirx.Stmt] = []
        for stmt in reversed(consumers[1:]):
            if not _only_waits(stmt) or not fixed.isdisjoint(variables_in(without_marks(stmt))):
                break
            waits.insert(0, stmt)
        return waits


def _only_waits(stmt: tirx.Stmt) -> bool:
    return (
        bool(builtins_in(stmt))
        and not nodes_in(stmt, tirx.BufferStore)
        and all(_is_wait(call) for call in calls_in(stmt, has_effect))
    )


def _is_wait(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    return spec is not None and bool(spec.waits) and not writes(call)


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
