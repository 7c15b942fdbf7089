"""Copy parts of tiles that have gaps by threads, without the TMA."""

from __future__ import annotations

from tvm import tirx
from tvm.arith import Analyzer
from tvm.target import Target
from tvm.tirx.stmt_functor import ir_transform

from ..ir.tma import TMA_SM, sm_of, without_tma
from ..ir.walk import op_name

_COPY = "tl.tileop.copy"
_NO_TMA = "disable_tma"


def copy_parts_by_threads(func: tirx.PrimFunc, target: Target, is_retry: bool) -> tirx.PrimFunc:
    """Copy parts of tiles in shared memory without the TMA, if other elements are between them.

    It runs only if TileLang fails to lower such a copy, or lowers it wrongly.

    Before: ``T.copy(tile[:, 0:64], S[peer, 0, 0])`` with a tile of 80 columns
    After:  ``T.copy(tile[:, 0:64], S[peer, 0, 0], disable_tma=True)``
    """

    if not is_retry or sm_of(target) < TMA_SM:
        return func

    def change(call: tirx.Call) -> tirx.Call | None:
        if op_name(call) != _COPY or int(call.annotations.get(_NO_TMA, 0)):
            return None
        return without_tma(call) if any(map(_has_gaps, call.args[:2])) else None

    return func.with_body(ir_transform(func.body, None, change, ["tirx.Call"]))


def _has_gaps(region: tirx.PrimExpr) -> bool:
    """Return whether ``region`` is a part of a tile in shared memory that is not contiguous."""
    if op_name(region) != "tl.region" or not region.args[0].buffer.scope().startswith("shared"):
        return False
    start, _, *extents = region.args
    axes = list(zip(start.buffer.shape, extents, strict=True))
    equal = Analyzer().can_prove_equal
    while axes and equal(*axes[-1]):
        axes.pop()
    return any(not equal(extent, 1) for _, extent in axes[:-1])
