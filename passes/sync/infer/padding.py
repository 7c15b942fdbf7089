"""Padding of packed rows: ``W.pad`` counts rows that no rank writes as arrived."""

from __future__ import annotations

import tilelang.language as T
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ....builtins.spec import builtin_of
from ..regions.granules import Counter
from .context import SyncContext


def count_padding(body: tirx.Stmt, context: SyncContext) -> tirx.Stmt:
    """Give each declaration of padding the counters of its tensor.

    Before: ``T.tileweave.pad(S[me, row, 0], n, element, row, rows, row_size, rows)``
    After:  ``T.tileweave.pad(S_arrived[me, 0], n, S[me, row, 0], row, rows, units, tile)``
    """
    packed = [c for c in context.counters if c.traffic.is_packed]
    counters = {c.traffic.tensor.name: c for c in packed}

    def change(call: tirx.Call) -> tirx.Call | None:
        spec = builtin_of(call)
        if spec is None or not spec.pads:
            return None
        counter = counters[call.args[0].args[0].buffer.name]
        units = int(spec.operand(call, "row_size")) // counter.unit
        values = {"element": call.args[0], "row_size": units, "tile": counter.traffic.tile}
        arguments = [_first_flag(context, counter), *call.args[1:]]
        for place, name in enumerate(spec.implicit, len(spec.operands)):
            arguments[place] = tirx.convert(values.get(name, arguments[place]))
        return tirx.Call(call.dtype, call.op, arguments, annotations=call.annotations)

    return ir_transform(body, None, change, ["tirx.Call"]) if packed else body


def _first_flag(context: SyncContext, counter: Counter) -> tirx.PrimExpr:
    """Return the address of the counters of this rank's copy."""
    me = context.symbols.rank
    flag = context.flag(counter, me, me, tirx.IntImm("int32", 0))
    return T.access_ptr(flag, "rw", extent=counter.granules.total)
