"""Refuse instructions that the target lacks before nvcc compiles them."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.target import Target

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.origin import name_of
from ..ir.tma import TMA_COPY, TMA_SM, requires_tma, sm_of, tma_name
from ..ir.walk import builtins_in, calls_in, location, op_name, rewrite_children


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
