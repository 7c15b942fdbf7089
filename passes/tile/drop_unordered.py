"""Remove the marks of ``W.unordered`` before TileLang compiles the program."""

from __future__ import annotations

from tvm import tirx

from ...builtins.memory import UNORDERED
from ..ir.operators import is_mark
from ..ir.walk import rewrite_children, uses_op


def drop_unordered(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Remove the marks, which TileLang does not know.

    Before: ``T.tileweave.unordered(S[peer, 0], "why"); T.copy(S[peer, 0], tile)``
    After:  ``T.copy(S[peer, 0], tile)``
    """
    if not uses_op(func.body, UNORDERED):
        return func

    def drop(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            stmts = [drop(s) for s in stmt.seq if not is_mark(s)]
            return (
                tirx.SeqStmt(stmts) if len(stmts) > 1 else stmts[0] if stmts else tirx.Evaluate(0)
            )
        return tirx.Evaluate(0) if is_mark(stmt) else rewrite_children(stmt, drop)

    return func.with_body(drop(func.body))
