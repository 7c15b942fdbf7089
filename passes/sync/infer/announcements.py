"""Announcements of ragged tensors, in the unit of the counters that count the rows."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ....builtins.spec import builtin_of
from ..regions.granules import Counter
from ..regions.tensor_accesses import TensorAccesses


def in_units(body: tirx.Stmt, counters: Sequence[Counter]) -> tirx.Stmt:
    """Make each announcement add units of its counter to its total.

    Before: ``T.tileweave.announce(S_announced[dst, me, 0], n, S_total[dst], rows, row_size)``
    After:  ``T.tileweave.announce(S_announced[dst, me, 0], n, S_total[dst], rows, units)``
    """
    units = {
        counter.traffic.counts.tensor.name: counter.unit
        for counter in counters if counter.traffic.counts is not None
    }  # fmt: skip

    def change(call: tirx.Call) -> tirx.Call | None:
        spec = builtin_of(call)
        if spec is None or not spec.announces:
            return None
        unit = units.get(call.args[0].args[0].buffer.name, 1)
        place = len(spec.operands) + spec.implicit.index("row_size")
        arguments = list(call.args)
        arguments[place] = tirx.IntImm("int32", int(arguments[place]) // unit)
        return tirx.Call(call.dtype, call.op, arguments, annotations=call.annotations)

    return ir_transform(body, None, change, ["tirx.Call"]) if units else body


def assumption(rows: TensorAccesses) -> str:
    """Return what the compiler assumes of the rows of a ragged tensor, for ``tw.explain``."""
    capacity = int(rows.tensor.shape[1 + rows.segments])
    return (
        "each launch writes row 0 to count - 1 of a segment, each once, where count, at most "
        f"{capacity}, is the announced number"
    )
