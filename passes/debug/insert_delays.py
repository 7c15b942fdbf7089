"""Delay signals and waits randomly, to expose missing synchronization."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.debug import delay as delay_builtin
from ...builtins.implicit import CONTEXT
from ...builtins.spec import builtin_of, declaration_of
from ..ir.memory_order import releases
from ..ir.pipelined_loops import is_pipelined
from ..ir.walk import flatten, rewrite_children
from ..sync.infer.options import options_of


def insert_delays(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a random sleep before each signal and after each wait, if ``tileweave.delays`` is set.

    A wait that is a statement of its own in ``T.Pipelined`` has no sleep, because TileLang would
    assign the sleep, and the loads after it, to the consumers.

    Before: ``T.tileweave.signal(...)``
    After:  ``T.tileweave.delay(seed, 1); T.tileweave.signal(...)``
    """
    seed = options_of(func).delays
    if seed is None:
        return func
    count = 0

    def delay() -> tirx.Stmt:
        nonlocal count
        count += 1
        context = tirx.call_intrin("int64", tvm.ir.Op.get(CONTEXT))
        operands = tirx.IntImm("int32", seed), tirx.IntImm("int32", count), context
        op = declaration_of(delay_builtin).op
        return tirx.Evaluate(tirx.call_intrin("handle", op, *operands))

    def insert_in_pipelined(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            return rewrite_children(stmt, insert_in_pipelined)
        spec = builtin_of(getattr(stmt, "value", None))
        return stmt if spec is not None and spec.waits else insert(stmt)

    def insert(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.For) and is_pipelined(stmt):
            return rewrite_children(stmt, insert_in_pipelined)
        spec = builtin_of(getattr(stmt, "value", None))
        if spec is not None and isinstance(stmt, tirx.Evaluate):
            if spec.waits:
                return flatten([stmt, delay()])
            if releases(stmt.value):
                return flatten([delay(), stmt])
        return rewrite_children(stmt, insert)

    return func.with_body(insert(func.body))
