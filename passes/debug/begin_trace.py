"""Mark the begin of each block of a kernel whose events are recorded."""

from __future__ import annotations

from tvm import tirx

from ..ir.events import record_call
from ..ir.walk import flatten, rewrite_children
from ..sync.infer.options import options_of


def begin_trace(func: tirx.PrimFunc) -> tirx.PrimFunc:
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
