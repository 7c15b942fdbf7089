"""Index expressions over the rank, block indices and loops, valid anywhere in a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ....builtins.ranks import RANK
from ...ir.walk import calls_in, has_effect, has_loads, with_rank
from .accesses import Access, Program
from .space import Loop

if TYPE_CHECKING:
    from .footprints import Footprints


class Symbols:
    """Places and simplifies expressions of one program.

    Attributes:
        program: the program.
        rank_call: the expression ``W.rank()``.
    """

    def __init__(self, program: Program, world_size: int) -> None:
        self.program = program
        self.rank_call = tirx.call_intrin("int32", tvm.ir.Op.get(RANK))
        self._rank_var = tirx.Var("rank", "int32")
        self._world_size = world_size

    def box_start(self, footprints: Footprints, axis: int, loops: Sequence[Loop]) -> tirx.PrimExpr:
        """Return where the box of an access begins on an axis, for a statement outside ``loops``.

        Args:
            axis: 0 is the rank axis.
        """
        if axis in footprints.runtime_axes:
            return footprints.runtime_axes[axis]
        start = self.in_first_iteration(footprints.access.starts[axis], loops)
        return start + shift if (shift := footprints.shift(axis)) else start

    def in_first_iteration(self, expr: tirx.PrimExpr, loops: Iterable[Loop]) -> tirx.PrimExpr:
        """Return ``expr`` in the first iteration of ``loops``, for a statement outside of them.

        Variables that the program binds outside of the loops are kept: expressions in which all are
        replaced can be long, and have another form for each size.
        """
        loops, program = list(loops), self.program
        exited = {loop.var for loop in loops}
        inner = {v for v, around in program.bound_in.items() if around & exited}
        expr = program.inline_bindings(expr, inner | program.registers)
        for loop in reversed(loops):
            low = program.inline_bindings(loop.min, inner | program.registers)
            expr = substitute(expr, {loop.var: low})
        return expr

    def without_bindings(self, expr: tirx.PrimExpr, access: Access) -> tirx.PrimExpr:
        """Return ``expr`` without variables that the program binds, to compare it with others.
        Variables that are read from memory stay: two of them may have different values."""
        pure = {v for v, value in self.program.values.items() if _is_pure(value)}
        return self.simplify(self.program.inline_bindings(expr, pure), access)

    def inserted(self, expr: tirx.PrimExpr, access: Access) -> tirx.PrimExpr:
        """Return ``expr`` as it is inserted: simplified, unless the form must not depend on the
        sizes."""
        return expr if self.program.is_shared else self.simplify(expr, access)

    def simplify(self, expr: tirx.PrimExpr, access: Access) -> tirx.PrimExpr:
        """Simplify ``expr`` by the ranges of the rank and of the loops around ``access``."""
        analyzer = tvm.arith.Analyzer()
        analyzer.bind(self._rank_var, tvm.ir.Range(0, self._world_size))
        for loop in access.loops:
            low, extent = (
                with_rank(self.program.inline_bindings(bound), self._rank_var)
                for bound in (loop.min, loop.extent)
            )
            analyzer.bind(loop.var, tvm.ir.Range.from_min_extent(low, extent))
        simple = analyzer.simplify(with_rank(expr, self._rank_var))
        return substitute(simple, {self._rank_var: self.rank_call})


def quotient(expr: tirx.PrimExpr, divisor: int) -> tirx.PrimExpr:
    """Return ``expr // divisor``, in one form for all divisors."""
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(expr.dtype, int(expr) // divisor)
    return tirx.FloorDiv(expr, tirx.IntImm(expr.dtype, divisor))


def product(expr: tirx.PrimExpr, factor: int) -> tirx.PrimExpr:
    """Return ``expr * factor``, in one form for all factors."""
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(expr.dtype, int(expr) * factor)
    return tirx.Mul(expr, tirx.IntImm(expr.dtype, factor))


def remainder(expr: tirx.PrimExpr, divisor: int) -> tirx.PrimExpr:
    """Return ``expr % divisor``, in one form for all divisors."""
    return tirx.FloorMod(expr, tirx.IntImm(expr.dtype, divisor))


def _is_pure(expr: tirx.PrimExpr) -> bool:
    """Return whether ``expr`` has the same value each time."""
    return not has_loads(expr) and not calls_in(expr, has_effect)
