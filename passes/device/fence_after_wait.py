"""Make data that a wait acquired visible to the TMA."""

from __future__ import annotations

from tvm import tirx

from ...builtins.memory import fence_proxy_async
from ...builtins.spec import declaration_of
from ..ir.memory_order import acquires
from ..ir.walk import calls_in, flatten, is_async_load, is_async_store, is_leaf, rewrite_children


def fence_after_wait(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert one ``fence.proxy.async`` after each acquire that a TMA or bulk access may follow.

    The acquire orders the generic proxy, but the TMA reads and writes by the async proxy. The TMA
    must see the published data, and must not overwrite data that a peer still reads. Each wait has
    one fence. Pipeline stages have none, because a fence in each stage slows down a GEMM by several
    percent. Barriers acquire like waits.

    Before: ``T.tileweave.wait_ge(...); ... T.tma_load(...)``
    After:  ``T.tileweave.wait_ge(...); T.tileweave.fence_proxy_async(); ... T.tma_load(...)``
    """

    def fence(stmt: tirx.Stmt, follows: bool) -> tuple[tirx.Stmt, bool]:
        """Insert fences; return also whether ``stmt`` or a later statement has a bulk access."""
        if isinstance(stmt, tirx.SeqStmt):
            out = []
            for inner in reversed(stmt.seq):
                new, follows = fence(inner, follows)
                out.append(new)
            return flatten(out[::-1]), follows
        before = follows or _is_bulk(stmt)
        if is_leaf(stmt):
            return flatten([stmt, _fence()]) if follows and _acquires(stmt) else stmt, before
        inner_follows = before if isinstance(stmt, (tirx.For, tirx.While)) else follows
        in_condition = isinstance(stmt, (tirx.IfThenElse, tirx.While)) and _acquires(stmt.condition)

        def case(inner: tirx.Stmt) -> tirx.Stmt:
            new, has_bulk = fence(inner, inner_follows)
            if isinstance(stmt, tirx.While):
                has_bulk = _is_bulk(inner)
            return flatten([_fence(), new]) if in_condition and has_bulk else new

        new = rewrite_children(stmt, case)
        leaves = isinstance(stmt, tirx.While) or getattr(stmt, "else_case", None) is None
        return flatten([new, _fence()]) if in_condition and leaves and follows else new, before

    return func.with_body(fence(func.body, False)[0])


def _is_bulk(stmt: tirx.Stmt) -> bool:
    return bool(calls_in(stmt, lambda call: is_async_load(call) or is_async_store(call)))


def _acquires(node) -> bool:
    return bool(calls_in(node, acquires))


def _fence() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("handle", declaration_of(fence_proxy_async).op))
