"""Values of the variables around the statements of a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ..ir.walk import bound_in, children_of, nodes_in, variables_in
from ..sync.regions.space import NotEvaluable
from .points import Points

MARK = "tileweave.tile_statement"
"""Attribute around a statement, with its number."""
_COUNT = 512
_TRIED, _DIFFERENT = 64, 3
"""``_DIFFERENT`` samples with different places in tiles are chosen from ``_TRIED``."""
_SCALES = (1, 2, 4, 16, 256, 65536)
"""Upper bounds of the values of variables without a known range."""
_ASSUMPTION = "tl.assume"
_X = "threadIdx.x"


@dataclass(frozen=True)
class Statement:
    """A marked statement.

    Attributes:
        body: the statement.
        conditions: conditions that hold when it runs.
        thread: variable of the first axis of the threads of its kernel.
        threads: extent of this axis.
    """

    body: tirx.Stmt
    conditions: tuple[tirx.PrimExpr, ...]
    thread: tirx.Var | None
    threads: int


def marked_statements(func: tirx.PrimFunc) -> dict[int, tirx.Stmt]:
    """Return the marked statements of ``func`` by their numbers."""
    attributes = nodes_in(func.body, tirx.AttrStmt)
    return {int(a.value): a.body for a in attributes if a.attr_key == MARK}


class Samples(Points):
    """Random values of all variables of a function, within their ranges.

    Attributes:
        statements: the marked statements, by number.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        super().__init__({}, _COUNT, _no_load)
        self._random = np.random.default_rng(0)
        self._exact: set[tirx.Var] = set()
        self._assumptions: list[tirx.PrimExpr] = []
        self.statements: dict[int, Statement] = {}
        self._threads: tuple[tirx.Var | None, int] = None, 1
        self._visit(func.body, ())

    def choose(self, statement: Statement, regions: Sequence[tirx.Call]) -> list[int]:
        """Return the numbers of samples for which ``statement`` runs.

        They differ in the places that it accesses in tiles, and ``regions`` are inside of their
        tensors. One more sample has a region outside, if ranges of loops and blocks allow it.
        """
        holds = np.ones(_COUNT, bool)
        for condition in (*self._assumptions, *statement.conditions):
            if statement.thread is None or statement.thread not in variables_in(condition):
                holds &= self._value_or(condition, 1).astype(bool)
        inside = holds.copy()
        for region in regions:
            start, _, *extents = region.args
            for index, extent, size in zip(start.indices, extents, start.buffer.shape, strict=True):
                first = self._value_or(index, 0)
                last = first + self._value_or(extent, 1)
                inside &= (first >= 0) & (last <= self._value_or(size, np.iinfo(np.int64).max))
        variables = self._tile_variables(statement.body)
        different: dict[tuple[int, ...], int] = {}
        for number in np.flatnonzero(inside)[:_TRIED].tolist():
            key = tuple(int(self.at_all(var)[number]) for var in variables)
            different.setdefault(key, number)
        numbers = list(different.values())[:_DIFFERENT]
        if all(self._is_exact(index) for region in regions for index in region.args[0].indices):
            numbers += np.flatnonzero(holds & ~inside)[:1].tolist()
        return numbers

    def _tile_variables(self, stmt: tirx.Stmt) -> list[tirx.Var]:
        """Return the variables outside of ``stmt`` that decide which elements of tiles it uses."""
        loads = nodes_in(stmt, tirx.BufferLoad, tirx.BufferStore)
        indices = [i for a in loads if a.buffer.scope() != "global" for i in a.indices]
        indices += [branch.condition for branch in nodes_in(stmt, tirx.IfThenElse)]
        inner = bound_in(stmt)
        return [
            var
            for var in dict.fromkeys(v for index in indices for v in variables_in(index))
            if var not in inner and str(var.dtype) != "handle" and self.knows(var)
        ]

    def values(self, number: int) -> dict[tirx.Var, np.ndarray]:
        """Return the values of all variables in one sample."""
        return {
            var: np.broadcast_to(values, _COUNT)[number : number + 1]
            for var, values in self._evaluated.items()
        }

    def _value_or(self, expr: Any, default: int) -> np.ndarray:
        try:
            return self.at_all(expr)
        except NotEvaluable:
            return np.full(_COUNT, default)

    def evaluate(self, expr: Any) -> Any:
        """Return the values of ``expr``; those of variables without a known range are random."""
        if isinstance(expr, tirx.Var) and not self.knows(expr):
            if str(expr.dtype) == "handle":
                raise NotEvaluable(expr)
            self._evaluated[expr] = self._any_numbers()
        return super().evaluate(expr)

    def _any_numbers(self) -> np.ndarray:
        scales = self._random.choice(_SCALES, _COUNT)
        return self._random.integers(0, 1 << 30, _COUNT) % scales

    def _visit(self, stmt: tirx.Stmt, conditions: tuple[tirx.PrimExpr, ...]) -> None:
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == MARK:
            self.statements[int(stmt.value)] = Statement(stmt.body, conditions, *self._threads)
            return
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == _ASSUMPTION:
            self._assumptions.append(stmt.node)
            self._exact.update(variables_in(stmt.node))
        elif isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            var = stmt.node.var
            if stmt.node.thread_tag == _X:
                self._threads = var, int(stmt.value)
            else:
                self._bind_range(var, tirx.IntImm(var.dtype, 0), stmt.value)
        elif isinstance(stmt, tirx.For):
            self._bind_range(stmt.loop_var, stmt.min, stmt.extent)
        elif isinstance(stmt, tirx.Bind):
            self._bind(stmt)
        elif isinstance(stmt, tirx.IfThenElse):
            self._visit(stmt.then_case, (*conditions, stmt.condition))
            if stmt.else_case is not None:
                self._visit(stmt.else_case, (*conditions, tirx.Not(stmt.condition)))
            return
        for inner in children_of(stmt):
            self._visit(inner, conditions)

    def _bind_range(self, var: tirx.Var, low: tirx.PrimExpr, extent: tirx.PrimExpr) -> None:
        try:
            first, size = self.evaluate(low), self.evaluate(extent)
        except NotEvaluable:
            return
        if self._is_exact(low) and self._is_exact(extent):
            self._exact.add(var)
        numbers = self._random.integers(0, 1 << 30, _COUNT)
        self._evaluated[var] = first + numbers % np.maximum(size, 1)

    def _bind(self, stmt: tirx.Bind) -> None:
        if str(stmt.var.dtype) == "handle":
            return
        try:
            self._evaluated[stmt.var] = self.evaluate(stmt.value)
        except NotEvaluable:
            self._evaluated[stmt.var] = self._any_numbers()
            return
        if self._is_exact(stmt.value):
            self._exact.add(stmt.var)

    def _is_exact(self, expr: tirx.PrimExpr) -> bool:
        return all(var in self._exact for var in variables_in(expr))


def _no_load(load: tirx.BufferLoad, points: Points) -> np.ndarray:
    raise NotEvaluable(load)
