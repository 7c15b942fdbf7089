"""Prevent loads through the read-only cache of data that a peer writes during the kernel."""

from __future__ import annotations

from tvm import tirx

from ...builtins.spec import builtin_of
from ..ir.memory_order import acquires
from ..ir.operators import SYSTEM_ATOMIC
from ..ir.walk import builtins_in, uses_op


def drop_readonly(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Remove ``const __restrict__`` from the parameters of kernels that synchronize.

    TileLang marks parameters that a kernel only reads, and nvcc then loads them with
    ``ld.global.nc``, which may return data from before a wait. A kernel that only sends keeps the
    qualifiers.

    Before: ``const bfloat16_t* __restrict__ A``
    After:  ``bfloat16_t* A``
    """
    observes = any(_observes(c) for c in builtins_in(func.body))
    if not observes and not uses_op(func.body, SYSTEM_ATOMIC):
        return func
    return func.without_attr("tl.readonly_param_indices").with_attr("tirx.noalias", False)


def _observes(call: tirx.Call) -> bool:
    return acquires(call) or builtin_of(call).observes
