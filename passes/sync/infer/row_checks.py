"""Checks of the rows of ragged tensors on the GPU, with the option ``tileweave.check_rows``."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ...ir.ragged import totals_name
from ...ir.walk import base_of
from ..regions.granules import Counter
from . import builtin_calls
from .context import SyncContext


def place_row_checks(context: SyncContext) -> None:
    """Check each row before it is written, and the number of rows at the end of the launch.

    Before: ``T.copy(tile, S[dst, me, row, 0])``
    After:  ``T.tileweave.check_row(S[dst, me, row, 0], S_rows[dst, 0], S_written[dst], row, ...);
    T.copy(tile, S[dst, me, row, 0])``
    """
    if not context.options.check_rows:
        return
    for counter in context.counters:
        if counter.accesses.is_ragged:
            _check(context, counter)


def _check(context: SyncContext, counter: Counter) -> None:
    name, axes = counter.accesses.tensor.name, counter.accesses.segments
    shape = tuple(int(e) for e in counter.accesses.tensor.shape)
    segments, rows = shape[:axes], shape[1 + axes]
    words = context.add_implicit(f"{name}_rows", (*segments, rows), "uint64", symmetric=False)
    written = context.add_implicit(f"{name}_written", segments, "uint32", symmetric=False)
    row_size = math.prod(shape[2 + axes :]) // counter.unit
    for footprints in counter.accesses.in_kernel("write"):
        access, ragged = footprints.access, footprints.access.ragged
        assert ragged is not None
        index = [substitute(base_of(i), access.first_iteration) for i in access.node.indices]
        units = ragged.stored // ragged.stored_rows // counter.unit
        stmt = builtin_calls.check_row(
            _element(context, counter, index),
            tirx.BufferLoad(words, [*index[:axes], tirx.IntImm("int32", 0)]),
            tirx.BufferLoad(written, index[:axes]),
            (index[1 + axes], ragged.stored_rows, rows, units, row_size, context.epoch), access,
        )  # fmt: skip
        context.placement.put_before(access.anchor, stmt, access)
    _check_total(context, counter, written)


def _check_total(context: SyncContext, counter: Counter, written: tirx.Buffer) -> None:
    """Check all segments that the rank writes, in the last block of the launch."""
    accesses = counter.accesses
    total = next(
        b for b in context.program.func.buffer_map.values()
        if b.name == totals_name(accesses.tensor.name)
    )  # fmt: skip
    variables = [tirx.Var(f"segment_{axis}", "int32") for axis in range(accesses.segments)]
    zeros = [tirx.IntImm("int32", 0)] * (len(accesses.tensor.shape) - accesses.segments - 1)
    stmt = builtin_calls.check_amount(
        _element(context, counter, [*variables, context.symbols.rank_call, *zeros]),
        tirx.BufferLoad(written, variables),
        tirx.BufferLoad(total, [*variables, tirx.IntImm("int32", 0)]), int(total.shape[-1]),
        accesses.in_kernel("write")[-1].access,
    )  # fmt: skip
    for variable, extent in reversed(list(zip(variables, accesses.tensor.shape, strict=False))):
        stmt = tirx.For(variable, 0, extent, tirx.ForKind.SERIAL, stmt)
    context.at_end.append(stmt)


def _element(context: SyncContext, counter: Counter, index: list) -> tirx.BufferLoad:
    """Return an element of the rows, in the buffer of this launch."""
    tensor = counter.accesses.tensor
    index = [index[0], *context.buffer_index(tensor), *index[1:]]
    return tirx.BufferLoad(context.all_buffers_of(tensor), index)
