"""Skip waits that a previous iteration already performed."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.ir import structural_equal

from ...builtins.implicit import loc_of
from ...builtins.spec import builtin_of
from ..ir.accesses import written_tensors
from ..ir.walk import bound_in, flatten, rewrite_children, statements_of, variables_and_loads


def skip_repeated_waits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Skip an inferred wait in a loop if the previous iteration waited for the same counter.

    One granule often covers many iterations, and each acquire invalidates L1, from which consumer
    warps also read. Skipping is correct because counters of inferred waits only increase.

    Before: ``for k in range(n): wait_reached(arrived[k // 64], epoch, ...); ...``
    After:  ``waited = -1; for k in range(n): if waited != k // 64: wait_reached(...);
    waited = k // 64; ...``
    """
    handled: set[tirx.Stmt] = set()

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if not isinstance(stmt, tirx.For):
            return rewrite_children(stmt, visit)
        starts, loop = _without_repeated_waits(stmt, handled)
        return flatten([*starts, rewrite_children(loop, visit)])

    return func.with_body(visit(func.body))


def _without_repeated_waits(
    loop: tirx.For, handled: set[tirx.Stmt]
) -> tuple[list[tirx.Stmt], tirx.Stmt]:
    """Return initial statements for ``loop``, and the loop without repeated waits.

    Waits in ``handled`` stay unchanged; the waits that this call changes are added to it.
    """
    changed = bound_in(loop) | written_tensors(loop)
    starts: list[tirx.Stmt] = []

    def skip(stmt: tirx.Stmt) -> tirx.Stmt:
        if not isinstance(stmt, (tirx.SeqStmt, tirx.Evaluate)):
            return rewrite_children(stmt, skip)
        out = []
        for counter, run in _runs(stmt, changed, handled):
            if counter is None or counter.same_as(loop.loop_var):
                out += [s if s is stmt else skip(s) for s in run]
                continue
            handled.update(run)
            waited = tirx.decl_buffer((1,), counter.dtype, "waited", scope="local.var")
            none = tirx.min_value(counter.dtype)  # not the index of a counter
            starts.extend([tirx.AllocBuffer(waited), tirx.BufferStore(waited, none, [0])])
            is_new = tirx.NE(tirx.BufferLoad(waited, [0]), counter)
            run.append(tirx.BufferStore(waited, counter, [0]))
            out.append(tirx.IfThenElse(is_new, flatten(run), None))
        return flatten(out)

    new = rewrite_children(loop, skip)
    return starts, new


def _runs(
    stmt: tirx.Stmt, changed: set[tirx.Var], handled: set[tirx.Stmt]
) -> list[tuple[tirx.PrimExpr | None, list[tirx.Stmt]]]:
    """Split the statements of ``stmt`` into runs of waits for one counter, and other statements.

    Each run of waits has the index of its counter; other runs have None.
    """
    runs: list[tuple[tirx.PrimExpr | None, list[tirx.Stmt]]] = []
    for inner in statements_of(stmt):
        counter = None
        if inner not in handled and _waits_for_one_value(inner, changed):
            counter = _narrow(_changing_part(inner.value.args[0].args[2], changed))
        if runs and structural_equal(runs[-1][0], counter):
            runs[-1][1].append(inner)
        else:
            runs.append((counter, [inner]))
    return runs


def _waits_for_one_value(stmt: tirx.Stmt, changed: set[tirx.Var]) -> bool:
    """Return whether ``stmt`` is an inferred wait for a value that ``changed`` does not change."""
    call = getattr(stmt, "value", None)
    spec = builtin_of(call)
    if spec is None or not spec.waits or not isinstance(stmt, tirx.Evaluate):
        return False
    loc = loc_of(call)
    inferred = loc is not None and loc.inferred
    return inferred and _is_fixed(spec.operand(call, "target"), changed)


def _changing_part(index: tirx.PrimExpr, changed: set[tirx.Var]) -> tirx.PrimExpr:
    """Return ``index`` without the terms that are equal in all iterations."""
    if isinstance(index, tirx.Add):
        for fixed, rest in ((index.a, index.b), (index.b, index.a)):
            if _is_fixed(fixed, changed):
                return _changing_part(rest, changed)
    return index


def _narrow(index: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``index`` in 32 bits if it fits, because a producer has few registers."""
    if isinstance(index, tirx.Cast) and index.value.dtype == "int32":
        return index.value
    bound = tvm.arith.Analyzer().const_int_bound(index)
    fits = -(1 << 31) <= bound.min_value and bound.max_value < 1 << 31
    return tirx.Cast("int32", index) if fits else index


def _is_fixed(expr: tirx.PrimExpr, changed: set[tirx.Var]) -> bool:
    """Return whether ``expr`` reads no variable and no memory that is ``changed``."""
    read = variables_and_loads(expr)
    return changed.isdisjoint(n if isinstance(n, tirx.Var) else n.buffer.data for n in read)
