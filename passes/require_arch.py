"""An instruction that the target lacks is refused before nvcc meets it."""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target

from ..builtins.declare import builtin_of
from ..builtins.errors import LanguageError
from .walk import builtins_in, location, rewrite_children


def require_arch(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Refuse builtins that need a later GPU than the one compiled for.

    What a builtin needs is in its declaration, by PTX type where types differ.

    Before: ``T.tileweave.fence_proxy_async()``, for sm_80
    After:  LanguageError; what the target has stays as it is
    """
    if "arch" not in target.attrs:
        return func
    arch = str(target.attrs["arch"])
    sm = int(arch.removeprefix("sm_").rstrip("af"))

    def check(stmt: tirx.Stmt) -> tirx.Stmt:
        rewrite_children(stmt, check)  # inner statements first: theirs is the line to name
        for call in builtins_in(stmt):
            spec = builtin_of(call)
            needed = spec.least_sm(call)
            if needed > sm:
                what = f" of {spec.ptx_type(call)}" if needed > spec.sm else ""
                raise LanguageError(
                    f"{spec.name}{what}: compiled for {arch}; expected sm_{needed} or later"
                    f"{location(stmt)}"
                )
        return stmt

    check(func.body)
    return func
