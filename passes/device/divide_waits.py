"""Give each iteration a wait of its own if their numbers of groups differ."""

from __future__ import annotations

from tvm import arith, tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from ..ir.walk import calls_in, flatten, op_name, variables_in, with_span_of

_WAIT = "tirx.ptx_wait_group"


def divide_waits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Divide a wait for ``cp.async`` operations whose number of pending groups depends on the
    iteration.

    The number is a constant of the instruction, and TileLang's code generator fails otherwise.
    TileLang writes such a wait after ``T.Pipelined`` if its number of iterations is unknown.

    Before: ``for k in T.unroll(2): ptx_wait_group(1 - k)``
    After:  ``for k in T.unroll(2): if k == 0: ptx_wait_group(1); if k == 1: ptx_wait_group(0)``
    """

    def in_loop(loop: tirx.For) -> tirx.Stmt | None:
        if not isinstance(loop.min, tirx.IntImm) or not isinstance(loop.extent, tirx.IntImm):
            return None
        numbers = range(int(loop.min), int(loop.min) + int(loop.extent))

        def divide(stmt: tirx.Evaluate) -> tirx.Stmt | None:
            call = stmt.value
            if op_name(call) != _WAIT or loop.loop_var not in variables_in(call):
                return None
            waits = []
            for number in numbers:
                pending = substitute(call.args[0], {loop.loop_var: number})
                wait = tirx.call_intrin("int32", call.op, arith.Analyzer().simplify(pending))
                waits.append(tirx.IfThenElse(loop.loop_var == number, tirx.Evaluate(wait), None))
            return with_span_of(stmt, flatten(waits))

        return ir_transform(loop, None, divide, ["tirx.Evaluate"])

    if not calls_in(func.body, lambda call: op_name(call) == _WAIT and variables_in(call)):
        return func
    return func.with_body(ir_transform(func.body, None, in_loop, ["tirx.For"]))
