"""Let one thread of a block with several axes issue an operation of the TMA."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import TMA_LOADS, TMA_STORES, nodes_in, op_name, with_span_of

_ELECT = "tl.tl_shuffle_elect"
_ISSUED = TMA_LOADS | TMA_STORES | {"tirx.ptx_init_barrier_thread_count"}


def elect_once(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace TileLang's choice of a thread in kernels whose blocks have more than one axis.

    TileLang divides tiles among the threads of the first axis, and chooses a thread by
    ``threadIdx.x`` alone. In a block of 32 x 4 threads, four threads issue each TMA operation: a
    reduction is added four times, and a load arrives at its mbarrier four times.

    Before: ``if tl_shuffle_elect(32): tma_store(...)``, 32 x 4 threads
    After:  ``if tx == 0 and ty == 0 and tz == 0: tma_store(...)``
    """
    threads: dict[str, tuple[tirx.Var, int]] = {}
    for attr in nodes_in(func.body, tirx.AttrStmt):
        if attr.attr_key == "thread_extent" and attr.node.thread_tag.startswith("threadIdx"):
            threads[attr.node.thread_tag] = attr.node.var, int(attr.value)
    thread, extent = threads.pop("threadIdx.x", (None, 1))
    if thread is None or all(size == 1 for _, size in threads.values()):
        return func

    def change(stmt: tirx.IfThenElse) -> tirx.IfThenElse | None:
        if not _issues(stmt.then_case):
            return None
        chosen = stmt.condition
        if op_name(chosen) == _ELECT:
            group = int(chosen.args[0])
            chosen = thread % group == 0 if 0 < group < extent else thread == 0
        elif not (isinstance(chosen, tirx.EQ) and chosen.a.same_as(thread)):
            return None
        for _, (variable, _) in sorted(threads.items()):
            chosen = tirx.And(chosen, variable == 0)
        return with_span_of(stmt, tirx.IfThenElse(chosen, stmt.then_case, stmt.else_case))

    return func.with_body(ir_transform(func.body, None, change, ["tirx.IfThenElse"]))


def _issues(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` only issues operations: it has no store and no other condition."""
    others = nodes_in(stmt, tirx.BufferStore, tirx.IfThenElse)
    return not others and any(op_name(call) in _ISSUED for call in nodes_in(stmt, tirx.Call))
