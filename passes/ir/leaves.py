"""Statements of a program without inner statements, in order, and how often a block runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ...builtins.spec import Pointer, builtin_of
from .spans import get_stmt_span
from .walk import builtins_in, is_leaf, op_name, rewrite_children


@dataclass(frozen=True, eq=False)
class Leaf:
    """A statement without inner statements, or a condition that calls a builtin.

    Attributes:
        stmt: the statement, or the statement with the condition.
        node: the statement or condition that is evaluated.
        times: maximum number of executions by a block, or None if it is unknown.
    """

    stmt: tirx.Stmt
    node: Any
    times: int | None

    @property
    def builtins(self) -> list[tirx.Call]:
        return builtins_in(self.node)

    @property
    def loc(self) -> tuple[str, int]:
        """File and line; ``("", 0)`` if TileLang has lost them."""
        span = get_stmt_span(self.stmt)
        return (str(span.source_name.name), int(span.line)) if span is not None else ("", 0)


def leaves_of(body: tirx.Stmt) -> list[Leaf]:
    """Return the leaves of ``body`` in program order."""
    leaves: list[Leaf] = []

    def walk(stmt: tirx.Stmt, times: int | None) -> tirx.Stmt:
        if is_leaf(stmt):
            leaves.append(Leaf(stmt, stmt, times))
            return stmt
        if isinstance(stmt, (tirx.IfThenElse, tirx.While)) and builtins_in(stmt.condition):
            leaves.append(Leaf(stmt, stmt.condition, times))
        inner_times = times if times is None else _times(stmt, times)
        return rewrite_children(stmt, lambda s: walk(s, inner_times))

    walk(body, 1)
    return leaves


def _times(stmt: tirx.Stmt, times: int) -> int | None:
    if isinstance(stmt, tirx.While):
        return None
    if not isinstance(stmt, tirx.For) or stmt.thread_binding is not None:
        return times
    if stmt.kind == tirx.ForKind.PARALLEL:
        return times
    return times * int(stmt.extent) if isinstance(stmt.extent, tirx.IntImm) else None


def leaves_with_builtins(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """Yield the statements inside ``stmt`` that call a builtin on global memory."""
    return (leaf.stmt for leaf in leaves_of(stmt) if any(map(tensor_of, leaf.builtins)))


def tensor_of(call: tirx.Call) -> str:
    """Return the name of the first tensor in global memory that a builtin accesses, or ""."""
    for (_, kind), pointer in zip(builtin_of(call).operands, call.args, strict=False):
        if isinstance(kind, Pointer) and kind.space == "global":
            if op_name(pointer) == "tl.access_ptr":
                return str(pointer.args[0].buffer.name)
            if op_name(pointer) == "tirx.tvm_access_ptr":
                return str(pointer.args[1].name)
    return ""
