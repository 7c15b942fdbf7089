"""Insert random delays and the begin of a trace, if options ask for them."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.debug import delay as delay_builtin
from ...builtins.implicit import CONTEXT
from ...builtins.spec import builtin_of, declaration_of
from ..ir.events import record_call
from ..ir.memory_order import releases
from ..ir.pipelined_loops import is_pipelined
from ..ir.walk import flatten, rewrite_children
from ..sync.infer.options import options_of


def instrument(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert the builtins for debugging.

    - With ``tileweave.delays``, a random sleep before each signal and after each wait exposes
      missing synchronization. A wait that is a statement of its own in ``T.Pipelined`` has no
      sleep, because TileLang would assign the sleep, and the loads after it, to the consumers.
    - With ``tileweave.trace``, a call of ``record`` at the begin of each kernel gives the kernel
      the parameters of all its events, also a kernel without another builtin. ``record_events``
      inserts the other calls, because TileLang's pipeline would move them.

    Before: ``with T.Kernel(...): T.tileweave.signal(...)``
    After:  ``with T.Kernel(...): T.tileweave.record(0, ...); T.tileweave.delay(seed, 1);
    T.tileweave.signal(...)``
    """
    options = options_of(func)
    if options.delays is None and not options.trace:
        return func
    return func.with_body(_Instrumentation(options.delays, options.trace).insert(func.body))


class _Instrumentation:
    """Builtins for debugging in one function.

    Attributes:
        seed: seed of the delays; None without delays.
        is_traced: whether kernels begin with a record.
    """

    def __init__(self, seed: int | None, is_traced: bool) -> None:
        self.seed, self.is_traced = seed, is_traced
        self._delays = 0

    def insert(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if self.is_traced and _is_kernel(stmt):
            return rewrite_children(stmt, lambda body: flatten([record_call(0), self.insert(body)]))
        if isinstance(stmt, tirx.For) and is_pipelined(stmt):
            return rewrite_children(stmt, self._insert_in_pipelined)
        spec = builtin_of(getattr(stmt, "value", None))
        if self.seed is not None and spec is not None and isinstance(stmt, tirx.Evaluate):
            if spec.waits:
                return flatten([stmt, self._delay()])
            if releases(stmt.value):
                return flatten([self._delay(), stmt])
        return rewrite_children(stmt, self.insert)

    def _insert_in_pipelined(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            return rewrite_children(stmt, self._insert_in_pipelined)
        spec = builtin_of(getattr(stmt, "value", None))
        return stmt if spec is not None and spec.waits else self.insert(stmt)

    def _delay(self) -> tirx.Stmt:
        self._delays += 1
        context = tirx.call_intrin("int64", tvm.ir.Op.get(CONTEXT))
        numbers = (tirx.IntImm("int32", number) for number in (self.seed, self._delays))
        op = declaration_of(delay_builtin).op
        return tirx.Evaluate(tirx.call_intrin("handle", op, *numbers, context))


def _is_kernel(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.SBlockRealize) and "tl.launch_threads" in stmt.block.annotations
