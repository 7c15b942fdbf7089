"""Producer and consumer warps of a warp-specialized kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Range

from .walk import nodes_in, rewrite_children, variables_in

SCOPE = "kWarpSpecializationScope"
"""TileLang's attribute around specialized warps; its node is [producer, consumer] threads."""


@dataclass(frozen=True)
class WarpRoles:
    """Roles of the warps of a kernel. The producers are its first threads.

    Attributes:
        thread: the thread index on x.
        producers: number of producer threads.
        analyzer: analyzer with the ranges of the thread and block indices.
    """

    thread: tirx.Var
    producers: tirx.IntImm
    analyzer: Analyzer

    @property
    def is_producer(self) -> tirx.PrimExpr:
        """Condition that the producer threads fulfill."""
        return self.thread < self.producers

    def is_of_consumers(self, condition: tirx.PrimExpr) -> bool:
        """Return whether only threads after the producers fulfill ``condition``."""
        return self._implies(condition, self.thread >= self.producers)

    def is_guarded(self, stmt: tirx.Stmt) -> bool:
        """Return whether TileLang restricts ``stmt`` to the consumers, after a specialized part.

        Its own conditions have >=, those of the program <=, the form to which TVM simplifies them.
        """
        condition = stmt.condition if isinstance(stmt, tirx.IfThenElse) else None
        return isinstance(condition, tirx.GE) and self.is_of_consumers(condition)

    def is_divided(self, stmt: tirx.Stmt) -> bool:
        """Return whether ``stmt`` is a specialized part, or one after it that TileLang restricts to
        the consumers."""
        return is_specialized(stmt) or self.is_guarded(stmt)

    def for_consumers(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Return ``stmt`` of the program for the consumers, whose threads follow the producers."""
        index = {self.thread: self.thread - self.producers}
        return tirx.stmt_functor.substitute(stmt, index)

    def is_split(self, stmt: tirx.Stmt) -> bool:
        """Return whether ``stmt`` is a branch whose cases are producers and consumers, in order."""
        return (
            isinstance(stmt, tirx.IfThenElse)
            and self.thread in variables_in(stmt.condition)
            and self.is_of_consumers(tirx.Not(stmt.condition))
            and self._implies(stmt.condition, self.is_producer)
        )

    def rewrite_splits(
        self, stmt: tirx.Stmt, change: Callable[[tirx.IfThenElse], tirx.Stmt]
    ) -> tirx.Stmt:
        """Replace each branch of producers and consumers in ``stmt`` by ``change`` of it."""

        def visit(inner: tirx.Stmt) -> tirx.Stmt:
            return change(inner) if self.is_split(inner) else rewrite_children(inner, visit)

        return visit(stmt)

    def splits_in(self, stmt: tirx.Stmt) -> list[tirx.IfThenElse]:
        """Return the branches of producers and consumers in ``stmt``."""
        splits: list[tirx.IfThenElse] = []

        def keep(split: tirx.IfThenElse) -> tirx.Stmt:
            splits.append(split)
            return split

        self.rewrite_splits(stmt, keep)
        return splits

    def _implies(self, condition: tirx.PrimExpr, conclusion: tirx.PrimExpr) -> bool:
        with self.analyzer.constraint_scope(condition):
            return self.analyzer.can_prove(conclusion)


def is_specialized(stmt: tirx.Stmt | None) -> bool:
    """Return whether ``stmt`` is a part of the kernel that TileLang specializes by warps."""
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == SCOPE


def roles_of(func: tirx.PrimFunc) -> WarpRoles | None:
    """Return the roles of the warps of a device function; None if they have none."""
    attrs = nodes_in(func.body, tirx.AttrStmt)
    scopes = list(filter(is_specialized, attrs))
    if not scopes:
        return None
    analyzer, thread = Analyzer(), None
    for attr in attrs:
        if attr.attr_key == "thread_extent":
            analyzer.bind(attr.node.var, Range(0, attr.value))
            thread = attr.node.var if attr.node.thread_tag == "threadIdx.x" else thread
    return None if thread is None else WarpRoles(thread, scopes[0].node[0], analyzer)
