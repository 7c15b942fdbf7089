"""Marks of builtin calls, which identify them and their threads after TileLang's pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.spec import builtin_of
from .memory_order import releases, writes
from .thread_sets import ThreadSet
from .walk import effects_in, is_leaf, rewrite_children, with_span_of

_OPERANDS = 3


@dataclass(frozen=True)
class Mark:
    """Operands that ``number_builtins`` appends to a call.

    Attributes:
        number: number of the call in the tile program; copies that TileLang makes share it.
        thread: index on x of the program's thread that executes the call. If TileLang gives the
            program's threads other indices in a larger block, it also replaces this index. 0 if
            not each thread must execute the call.
        threads: extent on x of the program's block; 0 if not each thread must execute the call, and
            in ``T.Parallel``, which TileLang divides among all threads of the larger block.
    """

    number: int
    thread: tirx.PrimExpr
    threads: int


@dataclass(frozen=True)
class NumberedCall:
    """A builtin call of the tile program.

    Attributes:
        name: name for messages: the builtin, or the access for which it is inserted.
        line: ``file:line``, or "" if it is not known.
        threads: threads that reach it.
    """

    name: str
    line: str
    threads: ThreadSet


def is_required_of_each_thread(call: tirx.Call) -> bool:
    """Return whether every thread that reaches the builtin ``call`` must execute it. A wait or a
    load may be executed by the threads that need it only."""
    return writes(call) or releases(call) or builtin_of(call).level != "thread"


def mark_of(call: tirx.Call) -> Mark | None:
    """Return the mark of a builtin call, if it has one."""
    spec = builtin_of(call)
    if spec is None or len(call.args) != spec.arity + _OPERANDS:
        return None
    number, thread, threads = call.args[-_OPERANDS:]
    return Mark(int(number), thread, int(threads))


def without_mark(call: tirx.Call) -> tirx.Call:
    """Return ``call`` as it was before it was numbered."""
    if mark_of(call) is None:
        return call
    return tirx.Call(call.dtype, call.op, call.args[:-_OPERANDS], call.annotations)


def without_marks(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return ``stmt`` as it was before its calls were numbered."""
    return rewrite_children(with_calls(stmt, without_mark), without_marks)


def calls_of(stmt: tirx.Stmt) -> list[tirx.Call]:
    """Return the builtin calls with an effect that ``stmt`` itself evaluates."""
    if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
        return effects_in(stmt.condition)
    if is_leaf(stmt):
        return effects_in(stmt)
    return []


def with_calls(stmt: tirx.Stmt, replace: Callable[[tirx.Call], tirx.Call]) -> tirx.Stmt:
    """Return ``stmt`` with ``calls_of(stmt)`` replaced; statements inside stay as they are."""
    if not calls_of(stmt):
        return stmt

    def replaced(node: tirx.Call) -> tirx.Call | None:
        return replace(node) if effects_in(node)[-1:] == [node] else None

    if isinstance(stmt, tirx.IfThenElse):
        condition = _replace_calls(stmt.condition, replaced)
        new: tirx.Stmt = tirx.IfThenElse(condition, stmt.then_case, stmt.else_case)
    elif isinstance(stmt, tirx.While):
        new = tirx.While(_replace_calls(stmt.condition, replaced), stmt.body)
    else:
        new = ir_transform(stmt, None, replaced, ["tirx.Call"])
    return with_span_of(stmt, new)


def _replace_calls(expr: tirx.PrimExpr, replace: Callable) -> tirx.PrimExpr:
    return ir_transform(tirx.Evaluate(expr), None, replace, ["tirx.Call"]).value
