"""Divide by sizes before the loops that do not change the quotient."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import structural_equal, structural_hash
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import bound_in, calls_in, flatten, has_loads, nodes_in, op_name, variables_in

_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
_EXPRESSIONS = (
    tirx.Add, tirx.Sub, tirx.Mul, *_DIVISIONS, tirx.Min, tirx.Max, tirx.Cast, tirx.EQ, tirx.NE,
    tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or, tirx.Not,
)  # fmt: skip


@dataclass
class _Loop:
    """A loop around the current expression.

    Attributes:
        changed: variables that have another value in each iteration.
        before: statements that have to precede it.
        values: what these statements compute, and from where to load it, by its hash.
    """

    changed: set[tirx.Var]
    before: list[tirx.Stmt] = field(default_factory=list)
    values: dict[int, list[tuple[tirx.PrimExpr, tirx.PrimExpr]]] = field(default_factory=dict)

    def loaded(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return a load of ``value``, which is stored before the loop. TVM would replace a bound
        variable by its value again."""
        known = self.values.setdefault(structural_hash(value), [])
        for other, load in known:
            if structural_equal(other, value):
                return load
        variable = tirx.decl_buffer((1,), value.dtype, "hoisted", scope="local.var")
        self.before += [tirx.AllocBuffer(variable), tirx.BufferStore(variable, value, [0])]
        known.append((value, tirx.BufferLoad(variable, [0])))
        return known[-1][1]


def hoist_divisions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compute what contains divisions by sizes, which are arguments, before the outermost loop that
    does not change it.

    nvcc leaves such divisions in the loop. A warp that loads operands then divides in each step of
    the inner dimension, which takes longer than the step of the product.

    Before: ``for k in range(n): load(A[tile // size * 128, k * 64])``
    After:  ``hoisted = tile // size * 128; for k in range(n): load(A[hoisted, k * 64])``
    """
    if not _divides(func.body):
        return func
    loops: list[_Loop] = []

    def enter(node: tirx.PrimExpr | tirx.For) -> tirx.PrimExpr | None:
        if isinstance(node, tirx.For):
            loops.append(_Loop(bound_in(node)))
            return None
        if not loops or not _divides(node) or not _is_pure(node):
            return None
        variables = variables_in(node)
        inner = (n for n, loop in enumerate(loops, 1) if not loop.changed.isdisjoint(variables))
        depth = max(inner, default=0)
        return loops[depth].loaded(node) if depth < len(loops) else None

    def leave(node: tirx.PrimExpr | tirx.For) -> tirx.Stmt | None:
        before = loops.pop().before if isinstance(node, tirx.For) else []
        return flatten([*before, node]) if before else None

    kinds = ["tirx.For", *(f"tirx.{kind.__name__}" for kind in _EXPRESSIONS)]
    return func.with_body(ir_transform(func.body, enter, leave, kinds))


def _divides(node: tirx.PrimExpr | tirx.Stmt) -> bool:
    """Return whether a divisor is not constant."""
    return any(not isinstance(n.b, tirx.IntImm) for n in nodes_in(node, *_DIVISIONS))


def _is_pure(expr: tirx.PrimExpr) -> bool:
    """Return whether ``expr`` only computes with integers and variables."""
    is_scalar = str(expr.dtype).startswith(("int", "uint", "bool")) and "x" not in str(expr.dtype)
    return is_scalar and not has_loads(expr) and not calls_in(expr, op_name)
