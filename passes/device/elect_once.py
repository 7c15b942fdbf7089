"""Let one thread issue an operation of the TMA, where ``elect.sync`` does not choose one."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ..ir.shared_memory.values import WARP
from ..ir.walk import TMA_LOADS, TMA_STORES, arrows, line_of, nodes_in, op_name, with_span_of

_ELECT = "tl.tl_shuffle_elect"
_ISSUED = TMA_LOADS | TMA_STORES | {"tirx.ptx_init_barrier_thread_count"}


def elect_once(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace TileLang's choice of a thread where ``elect.sync`` does not choose one.

    TileLang divides tiles among the threads of the first axis, and chooses a thread by
    ``threadIdx.x`` alone. In a block of 32 x 4 threads, four threads issue each TMA operation: a
    reduction is added four times, and a load arrives at its mbarrier four times.

    ``elect.sync`` has a result for the lanes of a whole warp. Under a condition such as
    ``tx == 128`` one lane reaches it, which issues the operation.

    Before: ``if tl_shuffle_elect(32): tma_store(...)``, 32 x 4 threads;
    ``if tx == 128: if tl_shuffle_elect(1): tma_load(...)``
    After:  ``if tx == 0 and ty == 0 and tz == 0: tma_store(...)``;
    ``if tx == 128: tma_load(...)``

    Raises:
        LanguageError: several lanes, and not whole warps, reach the operation.
    """
    threads: dict[str, tuple[tirx.Var, int]] = {}
    for attr in nodes_in(func.body, tirx.AttrStmt):
        if attr.attr_key == "thread_extent" and attr.node.thread_tag.startswith("threadIdx"):
            threads[attr.node.thread_tag] = attr.node.var, int(attr.value)
    thread, extent = threads.pop("threadIdx.x", (None, 1))
    parts: list[tuple[tirx.IfThenElse, int]] = []
    has_axes = any(size > 1 for _, size in threads.values())

    def change(stmt: tirx.IfThenElse) -> tirx.Stmt | None:
        if not _issues(stmt.then_case):
            return None
        chosen = stmt.condition
        group = int(chosen.args[0]) if op_name(chosen) == _ELECT else 0
        if not has_axes:
            if 1 < group < min(WARP, extent):
                parts.append((stmt, group))
            return stmt.then_case if group == 1 else None
        if op_name(chosen) == _ELECT:
            chosen = thread % group == 0 if 0 < group < extent else thread == 0
        elif not (isinstance(chosen, tirx.EQ) and chosen.a.same_as(thread)):
            return None
        for _, (variable, _) in sorted(threads.items()):
            chosen = tirx.And(chosen, variable == 0)
        return with_span_of(stmt, tirx.IfThenElse(chosen, stmt.then_case, stmt.else_case))

    body = ir_transform(func.body, None, change, ["tirx.IfThenElse"])
    for stmt, group in parts:
        lines = arrows(("", line_of(inner)) for inner in nodes_in(stmt, tirx.Stmt))
        raise LanguageError(
            f"T.copy by the TMA: {group} threads, a part of a warp, reach it; expected one thread, "
            f"or whole warps{lines}"
        )
    return func.with_body(body)


def _issues(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` only issues operations: it has no store and no other condition."""
    others = nodes_in(stmt, tirx.BufferStore, tirx.IfThenElse)
    return not others and any(op_name(call) in _ISSUED for call in nodes_in(stmt, tirx.Call))
