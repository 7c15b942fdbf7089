"""Parameters that the function of a plan declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from ...builtins.errors import TileWeaveError
from .parameters import Parameter

_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def plan_declaration(function: Any) -> tuple[list[Parameter], Callable[..., None], str]:
    """Return the parameters that the function of a plan declares, the function with these
    parameters only, and its ``file:line``.

    Raises:
        TileWeaveError: it is no function, its first parameter is not for the steps, or another one
            declares neither a tensor nor a scalar.
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise TileWeaveError(f"plan: {function!r}; expected a function")
    first, *others = inspect.signature(function).parameters.values() or [None]
    code = function.__code__
    loc, what = f"{code.co_filename}:{code.co_firstlineno}", f"plan {function.__name__}"
    absent = {p.name: None for p in others if p.annotation is None}
    parameters = [_declared(p, what, loc) for p in others if p.name not in absent]
    if refusal := _refusal(first, code):
        raise TileWeaveError(f"{what}: {refusal}\n --> {loc}")

    def body(p: Any, *args: Any) -> None:
        function(p, **absent, **{a.name: arg for a, arg in zip(parameters, args, strict=True)})

    return parameters, body, loc


def _declared(argument: inspect.Parameter, what: str, loc: str) -> Parameter:
    """Return the parameter that an argument of the plan ``what`` declares.

    Raises:
        TileWeaveError: the argument declares none.
    """
    parameter = Parameter.of(argument.name, argument.annotation)
    has_default = argument.default is not argument.empty
    if parameter is not None and not has_default and argument.kind in _BY_NAME:
        return parameter
    suffix = "" if argument.annotation is argument.empty else f": {argument.annotation!r}"
    if isinstance(argument.annotation, str):
        suffix += " (from __future__ import annotations makes it a string)"
    raise TileWeaveError(
        f"{what}: parameter {_STARS.get(argument.kind, '')}{argument.name}{suffix}; expected "
        "T.Tensor(...), W.Symmetric(...) or a scalar type such as T.int32, without a default, and "
        f"a name to call it by\n --> {loc}"
    )


def _refusal(first: inspect.Parameter | None, code: CodeType) -> str:
    """Return why a function with this first argument defines no plan; empty if it does."""
    if first is None:
        return "no parameters; expected one for the steps"
    if first.kind is first.KEYWORD_ONLY or Parameter.of(first.name, first.annotation):
        return f"parameter {first.name} comes first; expected one for the steps before it"
    if code.co_flags & _LATER:
        return "appends its steps only when it is iterated or awaited; expected a plain function"
    return ""
