"""Plans that can be called, and the decorator that makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from ...builtins.errors import TileWeaveError
from ..plans.builder import PlanBuilder
from ..plans.parameters import (
    Parameter,
    dynamic_extents,
)
from ..plans.traced_plan import TracedPlan
from .calls import Calls
from .recorded_call import RecordedCall

_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Plan(TracedPlan):
    """Operator: a function that appends the steps of each call. Made by ``tw.plan``."""

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Enqueue the steps on torch's current stream and on side streams; the host does not wait.

        Collective the first time, when it compiles its kernels; call it once before capturing it
        in a CUDA graph.

        Raises:
            TileWeaveError: an argument that does not fit the declaration. Nothing is enqueued then.
        """
        self._calls(*args, **kwargs)

    def compile(self) -> None:
        """Compile its kernels, and take the hidden memory that they need, ahead of the first call.
        Collective.

        Raises:
            HeapExhausted: there is not enough symmetric memory; nothing is taken then.
            TileWeaveError: an extent is dynamic, or there are scalars: the call decides what it
                launches; or what ``tw.compile`` raises.
        """
        self._calls.compile()

    def ready(self, *args: Any) -> tuple[RecordedCall, list[int]]:
        """What a call does, checked, and where its tensors lie; the first time also compiled,
        collectively. Called with other addresses it is a call with such tensors that lie elsewhere,
        from the same thread in the same stream, as long as it is valid; a CUDA graph records it if
        one is being captured now.

        Raises:
            TileWeaveError: an argument that does not fit the declaration, or dynamic extents, which
                keep calls apart.
        """
        if dynamic := dynamic_extents(self.parameters):
            names = ", ".join(map(str, dynamic))
            raise TileWeaveError(f"{self.name}: {names} dynamic; expected numbers as extents")
        ready, _, addresses = self._calls.ready(args, {})
        return ready, addresses

    def free(self) -> None:
        """Give the hidden memory of the kernels that it compiled back. Collective, in the same
        order everywhere; a later call compiles anew."""
        self._calls.free()


def plan(
    function: Callable[..., None] | None = None, *, pass_configs: Mapping[str, Any] | None = None
) -> Any:
    """Decorator, ``@tw.plan`` or ``@tw.plan(pass_configs={...})``: a function that says the steps
    of an operator becomes that operator, a ``tw.Plan``.

    The first parameter gets the ``tw.PlanBuilder`` to say them to; the others are annotated as those of a
    ``@T.prim_func``. The function gets numbers for scalars and regions for tensors, and may branch
    on ``p.rank``, ``p.world_size``, scalars and shapes; the last steps it said for equal ones serve
    again. A parameter annotated None is left out of calls, as of those of a ``@T.prim_func``; the
    function gets None for it.

    Args:
        pass_configs: as for ``tw.compile``, of each kernel that the plan compiles.

    Raises:
        TileWeaveError: a parameter without such an annotation, or an option that there is not.
    """
    if function is None:
        return partial(plan, pass_configs=pass_configs)
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise TileWeaveError(f"plan: {function!r}; expected a function")
    first, *others = inspect.signature(function).parameters.values() or [None]
    code = function.__code__
    loc = f"{code.co_filename}:{code.co_firstlineno}"
    parameters = []
    absent = {given.name: None for given in others if given.annotation is None}
    for given in others:
        if given.name in absent:
            continue
        parameter = Parameter.of(given.name, given.annotation)
        if parameter is None or given.default is not given.empty or given.kind not in _BY_NAME:
            shown = "" if given.annotation is given.empty else f": {given.annotation!r}"
            if isinstance(given.annotation, str):
                shown += " (from __future__ import annotations makes it a string)"
            raise TileWeaveError(
                f"plan {function.__name__}: parameter {_STARS.get(given.kind, '')}{given.name}"
                f"{shown}; expected T.Tensor(...), W.Symmetric(...) or a scalar type such as "
                f"T.int32, without a default, and a name to call it by\n --> {loc}"
            )
        parameters.append(parameter)
    refused = None
    if first is None:
        refused = "no parameters; expected one for the steps"
    elif first.kind is first.KEYWORD_ONLY or Parameter.of(first.name, first.annotation):
        refused = f"parameter {first.name} comes first; expected one for the steps before it"
    elif code.co_flags & _LATER:
        refused = "says its steps when somebody iterates or awaits; expected a plain function"
    if refused is not None:
        raise TileWeaveError(f"plan {function.__name__}: {refused}\n --> {loc}")

    def body(p: PlanBuilder, *args: Any) -> None:
        function(p, **absent, **{a.name: arg for a, arg in zip(parameters, args, strict=True)})

    return Plan(function.__name__, parameters, body, loc, pass_configs)
