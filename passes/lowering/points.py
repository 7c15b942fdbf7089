"""Evaluation of expressions at all iterations of a statement, one array element for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from tvm import tirx

from ..ir.operators import ONLY_IF
from ..ir.walk import op_name
from ..sync.regions.space import IterationSpace

ELECT = "tl.tl_shuffle_elect"
"""TileLang's condition that holds for one thread of a group."""


class Points(IterationSpace):
    """Values of variables at the points where a statement runs.

    Args:
        values: arrays of ``count`` values, or of one value that is equal at all points.
        load: returns the value of an element of memory at these points.
        thread: variable of the thread index, if the points differ in it.
    """

    def __init__(
        self,
        values: dict[tirx.Var, np.ndarray],
        count: int,
        load: Callable[[tirx.BufferLoad, Points], np.ndarray],
        thread: tirx.Var | None = None,
    ) -> None:
        super().__init__(1, (), {})
        self._evaluated, self.count, self._load, self.thread = values, count, load, thread

    def evaluate(self, expr: Any) -> Any:
        """Return the value of ``expr`` at all points, or one value that they share.

        Raises:
            NotEvaluable: ``expr`` depends on a call.
        """
        if isinstance(expr, tirx.BufferLoad):
            return self._load(expr, self)
        if op_name(expr) == ONLY_IF:
            return self.evaluate(expr.args[1])
        if op_name(expr) == ELECT and self.thread is not None:
            threads = self.evaluate(self.thread)
            return threads == threads.min(initial=threads[0]) if self.count else threads < 0
        return super().evaluate(expr)

    def at_all(self, expr: Any) -> np.ndarray:
        """Return the value of ``expr`` at each point."""
        return np.broadcast_to(self.evaluate(expr), self.count)

    def knows(self, var: tirx.Var) -> bool:
        """Return whether ``var`` has a value."""
        return var in self._evaluated

    def bound(self, var: tirx.Var, values: np.ndarray) -> Points:
        """Return these points with a value of another variable."""
        return Points({**self._evaluated, var: values}, self.count, self._load, self.thread)

    def bound_all(self, variables: Iterable[tirx.Var], value: int) -> Points:
        """Return these points with ``value`` for each of ``variables``."""
        values = {var: np.full(1, value) for var in variables}
        return Points({**self._evaluated, **values}, self.count, self._load, self.thread)

    def where(self, mask: np.ndarray) -> Points:
        """Return the points for which ``mask`` holds."""
        mask = np.broadcast_to(mask, self.count)
        if mask.all():
            return self
        kept = {v: a if a.size == 1 else a[mask] for v, a in self._evaluated.items()}
        return Points(kept, int(mask.sum()), self._load, self.thread)

    def repeat(self, extent: int) -> Points:
        """Return each point ``extent`` times in succession."""
        kept = {v: a if a.size == 1 else np.repeat(a, extent) for v, a in self._evaluated.items()}
        return Points(kept, self.count * extent, self._load, self.thread)

    def iterate(self, loop: tirx.For) -> Points:
        """Return the points of all iterations of ``loop``, in their order at each point."""
        low, extents = self.at_all(loop.min), self.at_all(loop.extent)
        extent = max(0, int(extents.max(initial=0)))
        numbers = np.tile(np.arange(extent), self.count)
        inner = self.repeat(extent).bound(loop.loop_var, np.repeat(low, extent) + numbers)
        return inner.where(numbers < np.repeat(extents, extent))
