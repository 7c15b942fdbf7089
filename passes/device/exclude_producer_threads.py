"""Exclude added producer threads from builtins that write, outside of the specialized part."""

from __future__ import annotations

import functools

from tilelang import tvm
from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.memory_order import writes
from ..ir.origin import name_of
from ..ir.walk import has_loads, location, rewrite_children
from ..tile.number_builtins import calls_of, mark_of


def exclude_producer_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard builtins that write by the indices of the program's threads.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, all threads run the same code, and the program's threads are the
    first ones. After it, they are the threads after the producers. TileLang guards its own loops,
    also ``T.Parallel``, but not other builtins. The mark of a call identifies the program's thread
    that executes it. Waits and loads by additional threads are harmless. A builtin with a result is
    refused, because the excluded threads would miss the result.

    Before: ``T.tileweave.red_add(..., 7, tx, 256); T.attr([128, 256], "kWarpSpecializationScope",
    0): ...``
    After:  ``if tx < 256: T.tileweave.red_add(..., 7, tx, 256); ...``
    """
    analyzer = tvm.arith.Analyzer()

    def keep(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            analyzer.bind(stmt.node.var, tvm.ir.Range(0, stmt.value))
        if isinstance(stmt, tirx.Bind) and not has_loads(stmt.value):
            analyzer.bind(stmt.var, stmt.value)
        guard = guard_of(stmt)
        if guard is not None:
            return tirx.IfThenElse(guard, stmt, None)
        if isinstance(stmt, tirx.IfThenElse):
            return keep_branches(stmt)
        return rewrite_children(stmt, keep)

    def keep_branches(stmt: tirx.IfThenElse) -> tirx.Stmt:
        with analyzer.constraint_scope(stmt.condition):
            then_case = keep(stmt.then_case)
        else_case = None
        if stmt.else_case is not None:
            with analyzer.constraint_scope(tirx.Not(stmt.condition)):
                else_case = keep(stmt.else_case)
        cases = iter([then_case, else_case])
        return rewrite_children(stmt, lambda _: next(cases))

    def guard_of(stmt: tirx.Stmt) -> tirx.PrimExpr | None:
        """Return the condition that restricts ``stmt`` to the program's threads, or None."""
        for call in filter(writes, calls_of(stmt)):
            mark = mark_of(call)
            is_of_thread = mark is not None and mark.threads
            bounds = [mark.thread >= 0, mark.thread < mark.threads] if is_of_thread else []
            missing = [condition for condition in bounds if not analyzer.can_prove(condition)]
            if missing and _needs_result(stmt):
                raise LanguageError(
                    f"{name_of(call)}: its result is used outside of warp specialization, where "
                    f"more than the program's {mark.threads} threads run; expected a call under a "
                    "condition on the thread index, such as "
                    f"if T.get_thread_binding() == 0{location(stmt)}"
                )
            if missing:
                return functools.reduce(tirx.And, missing)
        return None

    return func.with_body(keep(func.body))


def _needs_result(stmt: tirx.Stmt) -> bool:
    """Return whether code outside of a guard around ``stmt`` uses its result."""
    return not isinstance(stmt, tirx.Evaluate) and not (
        isinstance(stmt, tirx.BufferStore) and stmt.buffer.scope() == "global"
    )
