"""Refuse instructions that the target lacks before nvcc compiles them."""

from __future__ import annotations

from collections.abc import Iterator

from tilelang import tvm
from tilelang.transform import PassConfigKey
from tvm import tirx
from tvm.target import Target

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.origin import name_of
from ..ir.walk import annotated, builtins_in, calls_in, location, op_name, rewrite_children

TMA_COPY = "tl.tileop.tma_copy"
TMA_SM = 90
TMA_MULTIPLE = 16
"""The TMA needs strides of global memory and rows of tiles that are multiples of this, in bytes
(cuTensorMapEncodeTiled)."""
_NO_PRODUCER = (PassConfigKey.TL_DISABLE_TMA_LOWER, PassConfigKey.TL_DISABLE_WARP_SPECIALIZED)


def require_arch(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Refuse builtins and TMA operations of TileLang that need a later GPU than the target.

    The declaration of a builtin has its first architecture, by PTX type if types differ. TileLang
    also refuses its own operations, but without their line.

    Before: ``T.tileweave.fence_proxy_async()``, for sm_80
    After:  LanguageError; programs that the target supports stay unchanged
    """
    if "arch" not in target.attrs:
        return func
    arch, sm = target.attrs["arch"], sm_of(target)

    def check(stmt: tirx.Stmt) -> tirx.Stmt:
        rewrite_children(stmt, check)  # inner statements first, because their lines are exact
        for call in builtins_in(stmt):
            spec = builtin_of(call)
            needed = spec.least_sm(call)
            if needed > sm:
                ptx_type = f" of {spec.ptx_type(call)}" if needed > spec.sm else ""
                raise LanguageError(
                    f"{name_of(call)}{ptx_type}: compiled for {arch}; expected sm_{needed} or later"
                    f"{location(stmt)}"
                )
        for name, change in _tma_operations(stmt) if sm < TMA_SM else ():
            raise LanguageError(
                f"{name}: compiled for {arch}, which has no TMA; expected sm_{TMA_SM} or later, "
                f"or {change}{location(stmt)}"
            )
        return stmt

    check(func.body)
    return func


def _tma_operations(stmt: tirx.Stmt) -> Iterator[tuple[str, str]]:
    """Yield each tile operation that requires the TMA, with an alternative without the TMA."""
    for call in calls_in(stmt, requires_tma):
        yield tma_name(call), "T.copy" if op_name(call) == TMA_COPY else "use_tma=False"


def requires_tma(call: tirx.Call) -> bool:
    """Return whether ``call`` is a tile operation that requires the TMA."""
    name = op_name(call)
    return name == TMA_COPY or (
        name == "tl.tileop.atomicadd" and bool(int(call.annotations.get("use_tma", 0)))
    )


def without_tma(copy: tirx.Call) -> tirx.Call:
    """Return a tile copy that does not use the TMA."""
    return annotated(copy, "disable_tma", tirx.IntImm("bool", 1))


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
