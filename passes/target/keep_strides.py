"""Keep TileLang 0.1.12 from copies that ignore the strides of a tensor."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.target import Target
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ...builtins.symmetric import packed_strides
from ...builtins.versions import installed_tilelang
from ..ir.tma import TMA_COPY, TMA_SM, sm_of, without_tma
from ..ir.walk import location, nodes_in, op_name

_COPY = "tl.tileop.copy"
_WITHOUT_FAULT = (0, 1, 13)
"""First release whose bulk copies use the strides of the tensor (``Copy::LowerBulk1D``)."""


def keep_strides(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Copy contiguous parts of strided tensors without the TMA, for TileLang 0.1.12.

    This release copies a contiguous part by one bulk copy, and computes its address from the shape
    of the tensor. The part of another rank then has a wrong address. It also fails for tiles of
    one axis.

    Raises:
        LanguageError: the copy is a ``T.tma_copy``, which has no other form.

    Before: ``T.copy(tile, S[peer, 0, 0])``
    After:  ``T.copy(tile, S[peer, 0, 0], disable_tma=True)``
    """
    if installed_tilelang() >= _WITHOUT_FAULT or sm_of(target) < TMA_SM:
        return func

    for stmt in nodes_in(func.body, tirx.Evaluate):
        if op_name(stmt.value) == TMA_COPY and _is_affected(stmt.value):
            raise LanguageError(
                "T.tma_copy: TileLang 0.1.12 ignores the strides of a tensor whose part is "
                f"contiguous; expected T.copy, or tilelang==0.1.13{location(stmt)}"
            )

    def change(call: tirx.Call) -> tirx.Call | None:
        if op_name(call) != _COPY or not _is_affected(call):
            return None
        return without_tma(call)

    return func.with_body(ir_transform(func.body, None, change, ["tirx.Call"]))


def _is_affected(copy: tirx.Call) -> bool:
    return any(map(_may_be_linear, copy.args[:2]))


def _may_be_linear(region: tirx.PrimExpr) -> bool:
    """Return whether a region of a strided tensor may be contiguous in its last axes."""
    start, _, *extents = region.args
    buffer = start.buffer
    if buffer.scope() != "global" or _is_packed(buffer):
        return False
    axes = [(_constant(size), _constant(n)) for size, n in zip(buffer.shape, extents, strict=True)]
    while axes and (axes[-1][0] is None or axes[-1][0] == axes[-1][1] or axes[-1][1] is None):
        axes.pop()
    return all(extent in (None, 1) for _, extent in axes[:-1])


def _is_packed(buffer: tirx.Buffer) -> bool:
    if not buffer.strides:
        return True
    equal = tvm.arith.Analyzer().can_prove_equal
    packed = packed_strides(buffer.shape)
    return all(equal(a, b) for a, b in zip(buffer.strides, packed, strict=True))


def _constant(expr: tirx.PrimExpr) -> int | None:
    return int(expr) if isinstance(expr, tirx.IntImm) else None
