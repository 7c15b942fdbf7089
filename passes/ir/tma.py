"""The TMA of a target, and the operations on tiles that use it."""

from __future__ import annotations

from tilelang import tvm
from tilelang.transform import PassConfigKey
from tvm import tirx
from tvm.target import Target

from .walk import op_name, with_annotation

TMA_COPY = "tl.tileop.tma_copy"

TMA_SM = 90

TMA_MULTIPLE = 16
"""The TMA needs strides of global memory and rows of tiles that are multiples of this, in bytes
(cuTensorMapEncodeTiled)."""

_NO_PRODUCER = (PassConfigKey.TL_DISABLE_TMA_LOWER, PassConfigKey.TL_DISABLE_WARP_SPECIALIZED)


def requires_tma(call: tirx.Call) -> bool:
    """Return whether ``call`` is a tile operation that requires the TMA."""
    name = op_name(call)
    return name == TMA_COPY or (
        name == "tl.tileop.atomicadd" and bool(int(call.annotations.get("use_tma", 0)))
    )


def without_tma(copy: tirx.Call) -> tirx.Call:
    """Return a tile copy that does not use the TMA."""
    return with_annotation(copy, "disable_tma", tirx.IntImm("bool", 1))


def tma_name(call: tirx.Call) -> str:
    """Return the name of such an operation in a program."""
    return "tma_copy" if op_name(call) == TMA_COPY else "atomic_add with use_tma=True"


def sm_of(target: Target) -> int:
    """Return the number of the target's architecture, such as 90; 0 if it has none."""
    return int(str(target.attrs.get("arch", "sm_0")).removeprefix("sm_").rstrip("af"))


def may_have_producer(target: Target) -> bool:
    """Return whether TileLang may let producer warps load tiles by the TMA."""
    config = tvm.transform.PassContext.current().config
    return sm_of(target) >= TMA_SM and not any(int(config.get(key, 0)) for key in _NO_PRODUCER)
