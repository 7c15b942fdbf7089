"""Refuse builtins with effects in expressions that TileLang evaluates several times."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.arith import Analyzer

from ...builtins.errors import LanguageError
from ..ir.memory_order import writes
from ..ir.origin import hint_of, name_of
from ..ir.walk import effects_in, location, nodes_in, rewrite_children

_BINARY = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min,
    tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE,
)  # fmt: skip


def verify_indices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse builtins with effects in expressions that TileLang repeats or merges.

    TileLang repeats indices and loop bounds in bounds checks, offsets and copies of the loop, and
    the operands of quotients that may be negative. It may merge two equal calls into one value. It
    runs an iteration of a parallel loop that fills a fragment in each thread that holds the
    element. The rank and the world size are values, which are legal everywhere.

    Before: ``A[T.tileweave.atom_add(...)] = 1``
    After:  LanguageError; legal programs stay unchanged
    """

    def check(stmt: tirx.Stmt) -> tirx.Stmt:
        rewrite_children(stmt, check)  # inner statements first, because their lines are exact
        if isinstance(stmt, tirx.For):
            _refuse([stmt.min, stmt.extent], "in the bound of a loop", stmt)
            _refuse_replicas(stmt)
        if not any(effects_in(part) for part in _own_parts(stmt)):
            return stmt
        for node in nodes_in(stmt, tirx.PrimExpr, tirx.BufferStore):
            if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
                _refuse(node.indices, "in an index", stmt)
            elif isinstance(node, tirx.Select):
                _refuse([node], "in an operand of a selection such as T.abs", stmt)
            elif isinstance(node, (tirx.FloorDiv, tirx.FloorMod)) and _may_be_negative(node):
                where = "in a quotient or remainder of values that TVM cannot prove positive"
                _refuse([node], where, stmt)
            elif isinstance(node, _BINARY):
                _refuse(_on_both_sides(node), "on both sides of an operator", stmt)
        return stmt

    check(func.body)
    return func


def _refuse_replicas(loop: tirx.For) -> None:
    """Refuse builtins that write memory in a parallel loop that fills a fragment.

    If the fragment has fewer elements than the block has threads, several threads hold an element,
    and each of them executes the iteration.
    """
    if loop.kind != tirx.ForKind.PARALLEL:
        return
    stored = [store.buffer for store in nodes_in(loop.body, tirx.BufferStore)]
    fragments = [buffer.name for buffer in stored if buffer.scope() == "local.fragment"]
    for call in (c for c in effects_in(loop.body) if fragments and writes(c)):
        raise LanguageError(
            f"{name_of(call)}: called in a parallel loop that fills the fragment "
            f"{fragments[0]}, whose elements several threads may hold; expected a separate loop, "
            f"or shared memory{hint_of(call)}{location(loop)}"
        )


def _may_be_negative(node: tirx.FloorDiv | tirx.FloorMod) -> bool:
    """Return whether TVM corrects the quotient for operands below zero, which repeats them.

    To TVM, a difference of unsigned values may be negative.
    """
    analyzer = Analyzer()
    return any(analyzer.const_int_bound(part).min_value < 0 for part in (node.a, node.b))


def _own_parts(stmt: tirx.Stmt) -> list:
    """Return the parts of ``stmt`` that are in no statement inside it, nor in its bounds."""
    if isinstance(stmt, tirx.SeqStmt):
        return []
    if isinstance(stmt, tirx.For):
        return [] if stmt.step is None else [stmt.step]
    if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
        return [stmt.condition]
    return [stmt.value] if isinstance(stmt, tirx.AttrStmt) else [stmt]


def _on_both_sides(node) -> list[tirx.PrimExpr]:
    """Return the calls that occur on both sides of an operator; TileLang does not merge vectors."""
    if tvm.DataType(str(node.a.dtype)).lanes > 1:
        return []
    others = effects_in(node.b)
    return [
        call for call in effects_in(node.a)
        if any(tvm.ir.structural_equal(call, other) for other in others)
    ]  # fmt: skip


def _refuse(expressions: list[tirx.PrimExpr], position: str, stmt: tirx.Stmt) -> None:
    for call in (c for e in expressions for c in effects_in(e)):
        raise LanguageError(
            f"{name_of(call)}: called {position}, which may be evaluated more than once; "
            f"expected a call before, with its value in a variable{location(stmt)}"
        )
