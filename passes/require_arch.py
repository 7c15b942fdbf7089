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
    arch, sm = target.attrs["arch"], sm_of(target)

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


def sm_of(target: Target) -> int:
    """The number of the architecture that ``target`` names, such as 90; 0 if it names none."""
    return int(str(target.attrs.get("arch", "sm_0")).removeprefix("sm_").rstrip("af"))
