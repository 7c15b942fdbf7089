"""Alignment of vectors in a tensor, as far as the indices are known."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from ...builtins.ranks import RANK
from .walk import is_leaf, op_name, rewrite_children


class Starts:
    """Follows the values of variables in program order, to find vectors that are misaligned."""

    def __init__(self, world_size: int) -> None:
        self._analyzer, self._rank = tvm.arith.Analyzer(), tirx.Var("rank", "int32")
        self._values: dict[tirx.Var, tirx.PrimExpr] = {}
        self._extents: dict[tirx.Var, int] = {self._rank: world_size}
        self._mins: dict[tirx.Var, int] = {self._rank: 0}
        self._is_conditional = False

    def visit(self, stmt: tirx.Stmt, check: Callable[[tirx.Stmt], None]) -> tirx.Stmt:
        """Call ``check`` for each statement in ``stmt`` when the variables before it are known."""
        if is_leaf(stmt):
            check(stmt)
        if isinstance(stmt, tirx.Bind):
            self._values[stmt.var] = self._resolve(stmt.value)
        if isinstance(stmt, tirx.For):
            if isinstance(stmt.min, tirx.IntImm) and isinstance(stmt.extent, tirx.IntImm):
                self._mins[stmt.loop_var] = int(stmt.min)
                self._extents[stmt.loop_var] = int(stmt.extent)
        before = self._is_conditional
        self._is_conditional |= isinstance(stmt, (tirx.IfThenElse, tirx.While))
        rewrite_children(stmt, lambda s: self.visit(s, check))
        self._is_conditional = before
        return stmt

    def is_misaligned(self, index: tirx.PrimExpr, lanes: int) -> bool:
        """Return whether ``index`` is certainly no multiple of ``lanes`` for a value of its
        variables. Conditions may exclude single values, but not all."""
        index = self._analyzer.simplify(self._resolve(index))
        modular = self._analyzer.modular_set(index)
        if int(modular.base) % gcd(int(modular.coeff), lanes):
            return True
        variables = list(self._extents)
        factors = tvm.arith.detect_linear_equation(index, variables)
        if self._is_conditional or not all(isinstance(f, tirx.IntImm) for f in factors):
            return False
        *factors, first = (int(f) for f in factors or [0])
        used = [(f, v) for f, v in zip(factors, variables, strict=False) if f]
        first += sum(f * self._mins[v] for f, v in used)
        return bool(first % lanes) or any(f % lanes and self._extents[v] > 1 for f, v in used)

    def _resolve(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return ``value`` without variables that the program binds, and with one of the rank."""
        value = substitute(value, self._values)
        return ir_transform(
            tirx.Evaluate(value),
            None,
            lambda call: self._rank if op_name(call) == RANK else None,
            ["tirx.Call"],
        ).value
