"""What a peer writes during the kernel is not read through the read-only cache."""

from __future__ import annotations

from tvm import tirx

from ..builtins.declare import builtin_of
from .walk import builtins_in


def drop_readonly(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Take ``const __restrict__`` off the parameters of kernels that synchronise with anyone.

    TileLang marks parameters that a kernel only reads, and nvcc then loads them with
    ``ld.global.nc``, which may return data from before a wait. A kernel that only sends has nothing
    to lose them for.

    Before: ``const bfloat16_t* __restrict__ A``
    After:  ``bfloat16_t* A``
    """
    if not any(_acquires(c) for c in builtins_in(func.body)):
        return func
    return func.without_attr("tl.readonly_param_indices").with_attr("tirx.noalias", False)


def _acquires(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    if any(name == "sem" for name, _ in spec.words):
        return spec.word(call, "sem") not in ("release",) and spec.name != "signal"
    return spec.barrier_after or spec.name.startswith(("get_", "bulk_load", "multimem_ld"))
