"""Conditions around statements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tilelang import tvm
from tvm import tirx

from .walk import has_loads, rewrite_children

_Conditions = Callable[[tirx.Stmt], list[tirx.PrimExpr] | tirx.Stmt]


def guard_statements(
    body: tirx.Stmt, conditions_of: _Conditions, check: Callable[[tirx.Stmt], None]
) -> tirx.Stmt:
    """Guard each statement by those of its conditions that do not already hold.

    Args:
        conditions_of: returns the conditions of a statement, or the statement that replaces it and
            the statements inside it.
        check: raises an error if a statement must not have a guard.
    """
    analyzer = tvm.arith.Analyzer()

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            analyzer.bind(stmt.node.var, tvm.ir.Range(0, stmt.value))
        if isinstance(stmt, tirx.Bind) and not has_loads(stmt.value):
            analyzer.bind(stmt.var, stmt.value)
        conditions = conditions_of(stmt)
        if isinstance(conditions, tirx.Stmt):
            return conditions
        missing = [c for c in conditions if not analyzer.can_prove(c)]
        if missing:
            check(stmt)
            return tirx.IfThenElse(functools.reduce(tirx.And, missing), stmt, None)
        if isinstance(stmt, tirx.IfThenElse):
            return visit_branches(stmt)
        return rewrite_children(stmt, visit)

    def visit_branches(stmt: tirx.IfThenElse) -> tirx.Stmt:
        with analyzer.constraint_scope(stmt.condition):
            then_case = visit(stmt.then_case)
        else_case = None
        if stmt.else_case is not None:
            with analyzer.constraint_scope(tirx.Not(stmt.condition)):
                else_case = visit(stmt.else_case)
        cases = iter([then_case, else_case])
        return rewrite_children(stmt, lambda _: next(cases))

    return visit(body)


def needs_result(stmt: tirx.Stmt) -> bool:
    """Return whether code outside of a guard around ``stmt`` uses the result of a call in it."""
    return not isinstance(stmt, tirx.Evaluate) and not (
        isinstance(stmt, tirx.BufferStore) and stmt.buffer.scope() == "global"
    )


def first_thread(threads: list[tirx.Var]) -> tirx.PrimExpr:
    """Return the condition that holds in the thread with index 0 on every axis."""
    return this_thread(threads, [0] * len(threads))


def this_thread(
    threads: Sequence[tirx.Var], indices: Sequence[int | tirx.PrimExpr]
) -> tirx.PrimExpr:
    """Return the condition that holds in the thread with these indices on the axes ``threads``."""
    equal = [thread == index for thread, index in zip(threads, indices, strict=True)]
    return functools.reduce(tirx.And, equal)
