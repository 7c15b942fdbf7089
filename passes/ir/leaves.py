"""The statements of a program that do something, in order, and how often a block gets there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilelang.ir import get_stmt_span
from tvm import tirx

from ...builtins.spec import Pointer, builtin_of
from .walk import builtins_in, op_name, rewrite_children


@dataclass(frozen=True, eq=False)
class Leaf:
    """A statement without others inside, or a condition that calls a builtin.

    Attributes:
        stmt: it, or the statement whose condition it is.
        node: what it evaluates.
        times: how often a block runs it at most; None where that is not known.
    """

    stmt: tirx.Stmt
    node: Any
    times: int | None

    @property
    def builtins(self) -> list[tirx.Call]:
        return builtins_in(self.node)

    @property
    def place(self) -> tuple[str, int]:
        """File and line; empty where TileLang has lost them."""
        span = get_stmt_span(self.stmt)
        return (str(span.source_name.name), int(span.line)) if span is not None else ("", 0)


def leaves_of(body: tirx.Stmt) -> list[Leaf]:
    """Every leaf of ``body``, in the order of the program."""
    found: list[Leaf] = []

    def walk(stmt: tirx.Stmt, times: int | None) -> tirx.Stmt:
        if isinstance(stmt, (tirx.Evaluate, tirx.Bind, tirx.BufferStore)):
            found.append(Leaf(stmt, stmt, times))
            return stmt
        if isinstance(stmt, (tirx.IfThenElse, tirx.While)) and builtins_in(stmt.condition):
            found.append(Leaf(stmt, stmt.condition, times))
        inside = times if times is None else _times(stmt, times)
        return rewrite_children(stmt, lambda s: walk(s, inside))

    walk(body, 1)
    return found


def _times(stmt: tirx.Stmt, times: int) -> int | None:
    if isinstance(stmt, tirx.While):
        return None
    if not isinstance(stmt, tirx.For) or stmt.thread_binding is not None:
        return times
    if stmt.kind == tirx.ForKind.PARALLEL:
        return times
    return times * int(stmt.extent) if isinstance(stmt.extent, tirx.IntImm) else None


def leaves_with_builtins(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """The statements inside ``stmt`` that call a builtin which does something to memory."""
    return (leaf.stmt for leaf in leaves_of(stmt) if any(map(tensor_of, leaf.builtins)))


def tensor_of(call: tirx.Call) -> str:
    """Name of the tensor in global memory that a builtin gets first, or an empty string."""
    for (_, kind), pointer in zip(builtin_of(call).operands, call.args, strict=False):
        if isinstance(kind, Pointer) and kind.space == "global":
            if op_name(pointer) == "tl.access_ptr":
                return str(pointer.args[0].buffer.name)
            if op_name(pointer) == "tirx.tvm_access_ptr":
                return str(pointer.args[1].name)
    return ""
