"""Evaluation of index expressions for all ranks, blocks and loop iterations at once.

The box of an access is exact: NumPy computes its indices for every rank of the group and every
iteration of the loops around it. So any integer expression is supported, swizzles included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from tvm import tirx

from ....builtins.ranks import RANK
from ...ir.integer_ops import ARITHMETIC, BITWISE, COMPARISONS, DIVISIONS
from ...ir.walk import op_name


@dataclass(frozen=True, eq=False)
class Loop:
    """A block axis, a thread axis or a loop: a variable and its range."""

    var: tirx.Var
    min: tirx.PrimExpr
    extent: tirx.PrimExpr


class NotEvaluable(Exception):
    """An expression depends on a value that is known only at run time."""

    def __init__(self, node: Any) -> None:
        super().__init__(str(node))
        self.node = node


_BINARY = {**ARITHMETIC, **COMPARISONS, tirx.And: np.logical_and, tirx.Or: np.logical_or}
_CALLS = {
    **BITWISE, "tirx.abs": np.abs, "tirx.likely": lambda a: a, "tirx.if_then_else": np.where,
}  # fmt: skip


def _operation_of(expr: Any) -> tuple[Callable[..., Any] | None, Sequence[Any]]:
    """Return the function that computes ``expr`` from the values of its operands, and these; None
    if there is no such function."""
    operation = _BINARY.get(type(expr))
    if operation is not None:
        return (_divided(operation) if isinstance(expr, DIVISIONS) else operation), (expr.a, expr.b)
    if isinstance(expr, tirx.Cast) and str(expr.dtype).startswith(("int", "uint", "bool")):
        return np.asarray, (expr.value,)
    if isinstance(expr, tirx.Not):
        return np.logical_not, (expr.a,)
    if isinstance(expr, tirx.Select):
        return np.where, (expr.condition, expr.true_value, expr.false_value)
    name = op_name(expr)
    return _CALLS.get(name), expr.args if name in _CALLS else ()


def _divided(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a division that divides by 1 instead of 0."""
    return lambda a, b: operation(a, np.where(b == 0, 1, b))


class IterationSpace:
    """Iteration space of a statement on all ranks: one axis for the rank and one for each loop.

    Values are arrays that broadcast against ``shape``. An axis that a value does not depend on has
    extent 1.

    Args:
        loops: outermost first; the range of a loop may depend on the loops before it.
        values: values of the variables that the program binds.
        sizes: values of symbolic extents.
        allow_unknown_ranges: whether to accept a loop of unknown range. It counts as one iteration,
            and the value of its variable is unknown.

    Attributes:
        runtime_loops: numbers of the loops of unknown range.
        skipped: for each loop, the iterations of the outer loops in which it has no iteration.

    Raises:
        NotEvaluable: the range of a loop is known only at run time.
    """

    def __init__(
        self,
        world_size: int,
        loops: Sequence[Loop],
        values: Mapping[tirx.Var, tirx.PrimExpr],
        sizes: Mapping[tirx.Var, int] = MappingProxyType({}),
        *,
        allow_unknown_ranges: bool = False,
    ) -> None:
        self._axes = len(loops) + 1
        self._values = values
        self._evaluated: dict[tirx.Var, np.ndarray] = {v: np.int64(n) for v, n in sizes.items()}
        self.rank = self._along(0, np.arange(world_size))
        self.inside: np.ndarray = np.ones((1,) * self._axes, np.bool_)
        """Mask of the points of ``shape`` that are iterations."""
        self.runtime_loops: list[int] = []
        self.skipped: list[np.ndarray] = []
        self._iterations: dict[tirx.Var, np.ndarray] = {}
        for number, loop in enumerate(loops):
            try:
                low, extent = self.evaluate(loop.min), np.asarray(self.evaluate(loop.extent))
            except NotEvaluable:
                if not allow_unknown_ranges:
                    raise
                self.runtime_loops.append(number)
                self.skipped.append(np.zeros_like(self.inside))
                self._iterations[loop.var] = self.evaluate(0)
            else:
                self._add_axis(loop, low, extent)
        self.shape = (world_size, *(self._iterations[loop.var].size for loop in loops))

    def _add_axis(self, loop: Loop, low: np.ndarray, extent: np.ndarray) -> None:
        """Add the iterations of the next loop, which has a known range."""
        self.skipped.append(self.inside & (extent <= 0))
        # NumPy needs at least one point on each axis, even if the loop has no iteration.
        count = max(1, int(extent.max(initial=0)))
        iterations = self._along(len(self.skipped), np.arange(count))
        if extent.size > 1 or np.any(extent <= 0):
            self.inside = self.inside & (iterations < extent)
        self._evaluated[loop.var], self._iterations[loop.var] = low + iterations, iterations

    def _along(self, axis: int, values: np.ndarray) -> np.ndarray:
        shape = [1] * self._axes
        shape[axis] = -1
        return values.astype(np.int64).reshape(shape)

    def iteration_of(self, loop: Loop) -> np.ndarray:
        """Return the iteration number of ``loop``, counted from 0, at every point."""
        return self._iterations[loop.var]

    def evaluate(self, expr: Any) -> Any:
        """Return the value of ``expr`` in every iteration.

        Raises:
            NotEvaluable: ``expr`` depends on memory or on a call.
        """
        if isinstance(expr, (tirx.IntImm, int)):
            return np.int64(int(expr)).reshape((1,) * self._axes)
        if isinstance(expr, tirx.Var):
            if expr not in self._evaluated:
                if expr not in self._values:
                    raise NotEvaluable(expr)
                self._evaluated[expr] = self.evaluate(self._values[expr])
            return self._evaluated[expr]
        if op_name(expr) == RANK:
            return self.rank
        operation, operands = _operation_of(expr)
        if operation is None:
            raise NotEvaluable(expr)
        return operation(*(self.evaluate(operand) for operand in operands))

    def bound(self, expr: Any) -> Any:
        """Return the expression that the program binds to a variable; any other ``expr`` itself."""
        while isinstance(expr, tirx.Var) and expr in self._values and expr not in self._iterations:
            expr = self._values[expr]
        return expr

    def unknown_part(self, expr: Any) -> Any:
        """Return the part of ``expr`` that is known only at run time; None if there is none."""
        if isinstance(expr, tirx.Var):
            if expr in self._evaluated:
                return None
            return self.unknown_part(self._values[expr]) if expr in self._values else expr
        if isinstance(expr, (tirx.IntImm, int)) or op_name(expr) == RANK:
            return None
        operation, operands = _operation_of(expr)
        if operation is None:
            return expr
        return next((u for o in operands if (u := self.unknown_part(o)) is not None), None)

    def block_number(self, grid: Sequence[Loop]) -> np.ndarray:
        """Return the block number, in launch order."""
        number = self.evaluate(0)
        for loop in reversed(grid):
            number = number * int(self.evaluate(loop.extent).max()) + self.evaluate(loop.var)
        return number
