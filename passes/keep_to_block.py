"""What stands before a warp-specialised loop is done by the program's own threads only."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit

from ..builtins.declare import builtin_of
from ..builtins.errors import LanguageError
from .memory_order import writes
from .walk import calls_in, location, rewrite_children

SCOPE = "kWarpSpecializationScope"
"""TileLang's attribute around specialised warps; its node is [producer, consumer] threads."""


def keep_to_block(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard builtins that write, outside the specialised part, by the program's thread count.

    With warp specialisation TileLang launches producer threads on top of the program's. Outside the
    specialised part they run what the program's own run; TileLang guards its own loops, and knows
    nothing of builtins. A wait or a load by more threads does no harm. A result would be missing in
    the threads left out, so a builtin with one is refused.

    Before: ``T.tileweave.red_add(...); T.attr([128, 256], "kWarpSpecializationScope", 0): ...``
    After:  ``if threadIdx.x < 256: T.tileweave.red_add(...); ...``
    """
    threads = _program_threads(func.body)
    if threads is None:
        return func
    analyzer = tvm.arith.Analyzer()
    own: list[tirx.PrimExpr] = []

    def keep(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.AttrStmt):
            if stmt.attr_key == SCOPE:
                return stmt
            if stmt.attr_key == "thread_extent":
                index = stmt.node.var
                analyzer.bind(index, tvm.ir.Range(0, stmt.value))
                if stmt.node.thread_tag == "threadIdx.x":
                    own[:] = [index < threads]
        if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
            refuse_result(stmt.condition, stmt)
        if isinstance(stmt, tirx.IfThenElse):
            return keep_branches(stmt)
        if isinstance(stmt, tirx.Bind) or (
            isinstance(stmt, tirx.BufferStore) and stmt.buffer.scope() != "global"
        ):
            refuse_result(stmt.value, stmt)
        if isinstance(stmt, (tirx.Evaluate, tirx.BufferStore)) and calls_in(stmt, writes):
            return stmt if is_kept() else tirx.IfThenElse(own[0], stmt, None)
        return rewrite_children(stmt, keep)

    def keep_branches(stmt: tirx.IfThenElse) -> tirx.Stmt:
        with analyzer.constraint_scope(stmt.condition):
            then = keep(stmt.then_case)
        other = None
        if stmt.else_case is not None:
            with analyzer.constraint_scope(tirx.Not(stmt.condition)):
                other = keep(stmt.else_case)
        cases = iter([then, other])
        return rewrite_children(stmt, lambda _: next(cases))

    def is_kept() -> bool:
        return analyzer.can_prove(own[0])

    def refuse_result(value: tirx.PrimExpr, stmt: tirx.Stmt) -> None:
        for call in calls_in(value, writes):
            if not is_kept():
                raise LanguageError(
                    f"{builtin_of(call).name}: its result is used before a loop whose warps are "
                    f"specialised, where more than the program's {threads} threads run; expected "
                    "it under a condition on the thread index, such as "
                    f"if T.get_thread_binding() == 0{location(stmt)}"
                )

    return func.with_body(keep(func.body))


def _program_threads(body: tirx.Stmt) -> int | None:
    """Threads along x that the program asked for, or None where no warps are specialised."""
    found: list[int] = []

    def visit(node) -> None:
        if isinstance(node, tirx.AttrStmt) and node.attr_key == SCOPE:
            found.append(int(node.node[1]))

    post_order_visit(body, visit)
    return found[0] if found else None
