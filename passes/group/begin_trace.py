"""Mark the begin of each block of a kernel whose events are recorded."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.debug import record
from ...builtins.implicit import CONTEXT, LAUNCH
from ...builtins.spec import declaration_of
from ..ir.walk import flatten, rewrite_children
from ..sync.infer.options import options_of

RECORD = declaration_of(record)


def begin_trace(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Insert a call of ``record`` at the begin of each kernel, if ``tileweave.trace`` is set.

    The call gives the kernel the parameters of all its events, also a kernel without another
    builtin. ``record_events`` inserts the other calls, because TileLang's pipeline would move them.

    Before: ``with T.Kernel(...): ...``
    After:  ``with T.Kernel(...): T.tileweave.record(0, ...); ...``
    """
    if not options_of(func).trace:
        return func

    def insert(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SBlockRealize) and "tl.launch_threads" in stmt.block.annotations:
            return rewrite_children(stmt, lambda body: flatten([record_call(0), body]))
        return rewrite_children(stmt, insert)

    return func.with_body(insert(func.body))


def record_call(
    event: int,
    begin: tirx.PrimExpr | None = None,
    flag: tirx.PrimExpr | None = None,
    seen: tirx.PrimExpr | None = None,
    wanted: tirx.PrimExpr | None = None,
    parameters: list[tirx.PrimExpr] | None = None,
) -> tirx.Stmt:
    """Return a call of ``record``.

    Args:
        parameters: the context and the number of the launch; by default the host binds them.
    """
    zero = tirx.IntImm("int64", 0)
    operands = [
        tirx.IntImm("int32", event),
        zero if begin is None else begin,
        tirx.reinterpret("handle", tirx.IntImm("uint64", 0)) if flag is None else flag,
        zero if seen is None else tirx.Cast("int64", seen),
        zero if wanted is None else tirx.Cast("int64", wanted),
    ]
    if parameters is None:
        parameters = [
            tirx.call_intrin("int64", tvm.ir.Op.get(CONTEXT)),
            tirx.call_intrin("int32", tvm.ir.Op.get(LAUNCH)),
        ]
    return tirx.Evaluate(tirx.call_intrin("handle", RECORD.op, *operands, *parameters))
