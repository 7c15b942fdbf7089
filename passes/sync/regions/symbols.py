"""Index expressions over the rank, block indices and loops, valid anywhere in a kernel."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ....builtins.ranks import RANK
from ...ir.walk import op_name, variables_in, with_rank
from .accesses import Access, Program
from .space import Loop

if TYPE_CHECKING:
    from .footprints import Footprints


class Symbols:
    """Inlines and simplifies expressions of one program."""

    def __init__(self, program: Program, world_size: int) -> None:
        self._values, self._registers = program.values, program.registers
        self._rank = tirx.Var("rank", "int32")
        self._world_size = world_size
        self._rank_call = tirx.call_intrin("int32", tvm.ir.Op.get(RANK))

    @property
    def rank(self) -> tirx.PrimExpr:
        """The expression ``W.rank()``."""
        return self._rank_call

    def inlined(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return ``expr`` with each variable that the program binds replaced by its value."""
        return self._without(expr, self._values)

    def start(
        self, footprints: Footprints, axis: int, loops: Sequence[Loop], *, in_place: bool = False
    ) -> tirx.PrimExpr:
        """Return where the box of an access begins on an axis, for a statement outside ``loops``.

        Args:
            axis: 0 is the rank axis.
            in_place: whether the expression may use variables that the program binds.
        """
        if axis in footprints.runtime_axes:
            return footprints.runtime_axes[axis]
        resolved = self.in_place if in_place else self.at_start
        start = resolved(footprints.access.starts[axis], loops)
        return start + shift if (shift := footprints.shift(axis)) else start

    def in_place(self, expr: tirx.PrimExpr, loops: Iterable[Loop]) -> tirx.PrimExpr:
        """Return ``at_start(expr, loops)``; without loops, keep the variables that are bound.

        Expressions whose variables are inlined can be long.
        """
        if loops := list(loops):
            return self.at_start(expr, loops)
        return self._without(expr, self._registers)

    def _without(self, expr: tirx.PrimExpr, variables: Container[tirx.Var]) -> tirx.PrimExpr:
        bound = {
            v: self._values[v]
            for v in variables_in(expr)
            if v in variables
            and v in self._values
            and op_name(self._values[v]) != "tl.launch_thread_idx"
        }
        if not bound:
            return expr
        return self._without(substitute(expr, bound), variables)

    def at_start(self, expr: tirx.PrimExpr, loops: Iterable[Loop]) -> tirx.PrimExpr:
        """Return ``expr`` in the first iteration of ``loops``."""
        expr = self.inlined(expr)
        for loop in reversed(list(loops)):
            expr = substitute(expr, {loop.var: self.inlined(loop.min)})
        return expr

    def simplified(self, expr: tirx.PrimExpr, access: Access) -> tirx.PrimExpr:
        """Simplify ``expr`` by the ranges of the rank and of the loops around ``access``."""
        analyzer = tvm.arith.Analyzer()
        analyzer.bind(self._rank, tvm.ir.Range(0, self._world_size))
        for loop in access.loops:
            low, extent = (
                with_rank(self.inlined(loop.min), self._rank),
                with_rank(self.inlined(loop.extent), self._rank),
            )
            analyzer.bind(loop.var, tvm.ir.Range.from_min_extent(low, extent))
        simple = analyzer.simplify(with_rank(expr, self._rank))
        return substitute(simple, {self._rank: self._rank_call})
