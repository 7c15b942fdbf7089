"""Make data that a wait acquired visible to the TMA."""

from __future__ import annotations

from tvm import tirx

from ...builtins.memory import fence_proxy_async
from ...builtins.spec import declaration_of
from ..ir.memory_order import acquires
from ..ir.walk import calls_in, flatten, is_async_load, is_async_store, rewrite_children


def fence_after_wait(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put one ``fence.proxy.async`` after each acquire that a TMA or bulk access may follow.

    The acquire orders the generic proxy; the TMA reads and writes by the async proxy. The TMA must
    see the published data, and must not overwrite data that a peer has yet to read. Each wait gets
    one fence, and pipeline stages get none: a fence in each stage slows a GEMM by several percent.
    Barriers acquire as waits do.

    Before: ``T.tileweave.wait_ge(...); ... T.tma_load(...)``
    After:  ``T.tileweave.wait_ge(...); T.tileweave.fence_proxy_async(); ... T.tma_load(...)``
    """

    def fence(stmt: tirx.Stmt, follows: bool) -> tuple[tirx.Stmt, bool]:
        """Return the statement with its fences, and whether it or a later statement has a bulk
        access."""
        if isinstance(stmt, tirx.SeqStmt):
            out = []
            for inner in reversed(stmt.seq):
                new, follows = fence(inner, follows)
                out.append(new)
            return flatten(out[::-1]), follows
        before = follows or _is_bulk(stmt)
        if isinstance(stmt, (tirx.Evaluate, tirx.Bind, tirx.BufferStore)):
            return flatten([stmt, _fence()]) if follows and _acquires(stmt) else stmt, before
        inside = before if isinstance(stmt, (tirx.For, tirx.While)) else follows
        in_condition = isinstance(stmt, (tirx.IfThenElse, tirx.While)) and _acquires(stmt.condition)

        def case(inner: tirx.Stmt) -> tirx.Stmt:
            new, needed = fence(inner, inside)
            if isinstance(stmt, tirx.While):
                needed = _is_bulk(inner)
            return flatten([_fence(), new]) if in_condition and needed else new

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
