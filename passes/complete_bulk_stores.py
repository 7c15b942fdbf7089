"""Bulk stores are complete, not merely read, before what they wrote is published."""

from __future__ import annotations

from tvm import tirx

from ..builtins.declare import builtin_of
from .walk import calls_in, flatten, op_name, rewrite_children

_STORES = frozenset(
    {"tl.tma_store", "tl.tma_store_scatter4", "tl.tma_store_cluster", "tl.tma_reduce"}
)
_PLACEHOLDER = "tileweave.complete_bulk_stores"


def complete_bulk_stores(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep the placeholders of ``order_releases`` that a TMA or bulk store reaches, drop the
    others.

    TileLang ends a store with a wait for the *read* of shared memory, after which the data may
    still be on its way to the peer. What stays leaves as a full ``cp.async.bulk.wait_group 0``, by
    all threads, the issuing one among them, before the block barrier of the release.

    Before: ``T.tma_store(...); T.tma_store_wait(0, read=True); T.tileweave.complete_bulk_stores()``
    After:  the same; without the store, the placeholder is gone
    """
    keep: set[tirx.Stmt] = set()

    def follow(stmt: tirx.Stmt, pending: bool) -> bool:
        """Whether a store may be under way after ``stmt``, given whether one may be before it."""
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                pending = follow(inner, pending)
            return pending
        if isinstance(stmt, tirx.IfThenElse):
            then = follow(stmt.then_case, pending)
            other = follow(stmt.else_case, pending) if stmt.else_case is not None else pending
            return then or other
        if isinstance(stmt, (tirx.For, tirx.While)):
            once = follow(stmt.body, pending)
            return follow(stmt.body, once or pending) or pending
        if isinstance(stmt, tirx.SBlockRealize):
            return follow(stmt.block.body, pending)
        if isinstance(stmt, tirx.AttrStmt):
            return follow(stmt.body, pending)
        if isinstance(stmt, tirx.Evaluate):
            if op_name(stmt.value) == _PLACEHOLDER:
                if pending:
                    keep.add(stmt)
                return False
            return _after_call(stmt.value, pending)
        return pending

    def resolve(stmt: tirx.Stmt) -> tirx.Stmt:
        if (
            isinstance(stmt, tirx.Evaluate)
            and op_name(stmt.value) == _PLACEHOLDER
            and stmt not in keep
        ):
            return tirx.Evaluate(tirx.IntImm("int32", 0))
        if isinstance(stmt, tirx.SeqStmt):
            new = [resolve(s) for s in stmt.seq]
            return flatten([s for s in new if not _is_nothing(s)] or new[:1])
        return rewrite_children(stmt, resolve)

    follow(func.body, False)
    return func.with_body(resolve(func.body))


def _after_call(expr: tirx.PrimExpr, pending: bool) -> bool:
    for call in calls_in(expr, lambda c: True):
        name = op_name(call)
        spec = builtin_of(call)
        if name in _STORES or (spec is not None and spec.name in ("bulk_store", "bulk_reduce")):
            pending = True
        elif name == "tl.tma_store_wait" and int(call.args[0]) == 0 and not bool(call.args[1]):
            pending = False
    return pending


def _is_nothing(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)
