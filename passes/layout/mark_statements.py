"""Give numbers to tile statements, by which their lowered form is found."""

from __future__ import annotations

import itertools

from tvm import tirx

from ..ir.pipelined_loops import COPIES
from ..ir.walk import is_parallel, op_name, rewrite_children
from ..lowering.samples import MARK

_OPERATIONS = (*COPIES, "tl.tileop.fill")
_LAYOUT = "parallel_loop_layout"


def mark_statements(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give numbers to the copies, fills and parallel loops of ``func``, which TileLang keeps.

    Before: ``T.copy(tile, S[peer, 0, 0])``
    After:  the same under an attribute with its number, which ``verify_lowering`` removes
    """
    numbers = itertools.count()

    def mark(stmt: tirx.Stmt) -> tirx.Stmt:
        is_loop = is_parallel(stmt) and _LAYOUT in stmt.annotations
        is_operation = isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) in _OPERATIONS
        if is_loop or is_operation:
            return tirx.AttrStmt(tirx.StringImm(""), MARK, next(numbers), stmt)
        return rewrite_children(stmt, mark)

    return func.with_body(mark(func.body))
