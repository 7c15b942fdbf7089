"""Data that a wait made visible is visible to the TMA too."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ..builtins.declare import builtin_of
from .walk import calls_in, flatten, op_name, rewrite_children

_LOADS = frozenset(
    {
        "tl.tma_load",
        "tl.tma_load_im2col",
        "tl.tma_load_multicast",
        "tl.tma_load_gather4",
        "tl.tma_load_2sm",
    }
)


def fence_after_wait(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put one ``fence.proxy.async`` after each acquiring wait that a TMA or bulk load may follow.

    The wait orders the generic proxy; the TMA reads by the async proxy. One fence a wait, none a
    stage: a fence in each pipeline stage costs percents of a GEMM.

    Before: ``T.tileweave.wait_ge(...); ... T.tma_load(...)``
    After:  ``T.tileweave.wait_ge(...); T.tileweave.fence_proxy_async(); ... T.tma_load(...)``
    """

    def fence(stmt: tirx.Stmt, loads_after: bool) -> tuple[tirx.Stmt, bool]:
        """The statement with its fences, and whether a load stands in it or after it."""
        if isinstance(stmt, tirx.SeqStmt):
            out = []
            for inner in reversed(stmt.seq):
                new, loads_after = fence(inner, loads_after)
                out.append(new)
            return flatten(out[::-1]), loads_after
        if isinstance(stmt, tirx.Evaluate):
            spec = builtin_of(stmt.value)
            if spec is not None and spec.name.startswith("wait_") and loads_after:
                if spec.word(stmt.value, "sem") == "acquire":
                    return flatten([stmt, _fence()]), loads_after
            return stmt, loads_after or _loads(stmt)
        if isinstance(stmt, (tirx.For, tirx.While)):
            loads_after = loads_after or _loads(stmt)
        inside = loads_after or _loads(stmt)
        return rewrite_children(stmt, lambda s: fence(s, loads_after)[0]), inside

    return func.with_body(fence(func.body, False)[0])


def _loads(stmt: tirx.Stmt) -> bool:
    def is_load(call: tirx.Call) -> bool:
        spec = builtin_of(call)
        return op_name(call) in _LOADS or (spec is not None and spec.name == "bulk_load")

    return bool(calls_in(stmt, is_load))


def _fence() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("handle", tvm.ir.Op.get("tileweave.fence_proxy_async")))
