"""What has an effect is done once: not where TileLang evaluates an expression several times."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit

from ..builtins.declare import builtin_of
from ..builtins.errors import LanguageError
from .walk import effects_in, location, rewrite_children


def verify_indices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse builtins in an index or in the bound of a loop.

    TileLang repeats these expressions as it needs them, in bounds checks, offsets and copies of the
    loop. The rank and the world size are values and may stand anywhere.

    Before: ``A[T.tileweave.atom_add(...)] = 1``
    After:  LanguageError; everything else stays as it is
    """

    def check(stmt: tirx.Stmt) -> tirx.Stmt:
        rewrite_children(stmt, check)  # inner statements first: theirs is the line to name
        if isinstance(stmt, tirx.For):
            _refuse([stmt.min, stmt.extent], "in the bound of a loop", stmt)
        indices: list[tirx.PrimExpr] = []

        def visit(node) -> None:
            if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
                indices.extend(node.indices)

        post_order_visit(stmt, visit)
        _refuse(indices, "in an index", stmt)
        return stmt

    check(func.body)
    return func


def _refuse(expressions: list[tirx.PrimExpr], where: str, stmt: tirx.Stmt) -> None:
    for call in (c for e in expressions for c in effects_in(e)):
        raise LanguageError(
            f"{builtin_of(call).name}: stands {where}, which may be evaluated more than once; "
            f"expected its value in a variable first{location(stmt)}"
        )
