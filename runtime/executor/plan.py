"""Plans that can be called, and the decorator that creates them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import CodeType
from typing import Any

from ...builtins.errors import TileWeaveError
from ..host.group_argument import process_group_of
from ..plans.builder import PlanBuilder
from ..plans.parameters import (
    Parameter,
    dynamic_extents,
)
from ..plans.traced_plan import TracedPlan
from .calls import Calls
from .recorded_calls import RecordedCall

_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Plan(TracedPlan):
    """Operator whose function appends the steps of each call. Created by ``tw.plan``."""

    _group: Any = None
    """Ranks that call it; None for the default group."""

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self, self._group)

    def on(self, group: Any) -> Plan:
        """Return this plan for calls by another group. It shares the steps; kernels and implicit
        memory are its own.

        Args:
            group: ranks that call it: None for the default group, a ``ProcessGroup``, its name, or
                a ``DeviceMesh`` with one axis.
        """
        plan = copy.copy(self)
        vars(plan).pop("_calls", None)
        plan._group = process_group_of(group)
        return plan

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Enqueue the steps on torch's current stream and on side streams; the host does not wait.

        The first call compiles the kernels, collectively; make it before capturing the plan in a
        CUDA graph.

        Raises:
            TileWeaveError: an argument does not match the declaration; nothing is enqueued.
        """
        self._calls(*args, **kwargs)

    def compile(self) -> None:
        """Compile its kernels and allocate their implicit memory, ahead of the first call.
        Collective.

        Raises:
            HeapExhausted: there is not enough symmetric memory; nothing is allocated.
            TileWeaveError: an extent is dynamic, or the plan has scalars: the kernels depend on
                the call; or what ``tw.compile`` raises.
        """
        self._calls.compile()

    def recorded_call(self, *args: Any) -> tuple[RecordedCall, list[int]]:
        """Return the recorded call for these arguments, and the addresses of its tensors.
        Collective the first time, when it compiles the kernels.

        The recorded call accepts the addresses of other tensors with the same shapes and types, in
        the same thread and stream, while it is valid. It is for a CUDA graph if one is being
        captured now.

        Raises:
            TileWeaveError: an argument does not match the declaration, or an extent is dynamic:
                such calls need a barrier between them.
        """
        if dynamic := dynamic_extents(self.parameters):
            names = ", ".join(map(str, dynamic))
            raise TileWeaveError(f"{self.name}: {names} dynamic; expected numbers as extents")
        call, _, addresses = self._calls.recorded_call(args, {})
        return call, addresses

    def free(self) -> None:
        """Free the implicit memory of the kernels that it compiled. Collective, in the same order
        on all ranks; a later call compiles again."""
        self._calls.free()


def plan(
    function: Callable[..., None] | None = None, *, pass_configs: Mapping[str, Any] | None = None,
    group: Any = None,
) -> Any:  # fmt: skip
    """Create a ``tw.Plan`` from a function; a decorator: ``@tw.plan`` or
    ``@tw.plan(pass_configs={...})``.

    The first parameter of the function receives a ``tw.PlanBuilder``, which appends steps. The
    other parameters are annotated like those of a ``@T.prim_func``; the function receives numbers
    for scalars and regions for tensors. It may branch on ``p.rank``, ``p.world_size``, scalars and
    shapes; calls with equal values of these reuse the steps. A parameter annotated None is not an
    argument of calls, and the function receives None for it.

    Args:
        pass_configs: options of ``tw.compile`` for each kernel that the plan compiles.
        group: ranks that call it, by default all; see ``Plan.on``.

    Raises:
        TileWeaveError: a parameter has no such annotation, or an option is unknown.
    """
    if function is None:
        return partial(plan, pass_configs=pass_configs, group=group)
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise TileWeaveError(f"plan: {function!r}; expected a function")
    first, *others = inspect.signature(function).parameters.values() or [None]
    code = function.__code__
    loc = f"{code.co_filename}:{code.co_firstlineno}"
    absent = {p.name: None for p in others if p.annotation is None}
    parameters = [_declared(p, function.__name__, loc) for p in others if p.name not in absent]
    if refusal := _refusal(first, code):
        raise TileWeaveError(f"plan {function.__name__}: {refusal}\n --> {loc}")

    def body(p: PlanBuilder, *args: Any) -> None:
        function(p, **absent, **{a.name: arg for a, arg in zip(parameters, args, strict=True)})

    return Plan(function.__name__, parameters, body, loc, pass_configs).on(group)


def _declared(argument: inspect.Parameter, name: str, loc: str) -> Parameter:
    """Return the parameter that an argument of the function ``name`` declares.

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
        f"plan {name}: parameter {_STARS.get(argument.kind, '')}{argument.name}{suffix}; expected "
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
