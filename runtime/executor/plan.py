"""Plans that can be called, and the decorator that creates them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from ...builtins.errors import TileWeaveError, brief_errors
from ..host.group_argument import process_group_of
from ..plans.declaration import plan_declaration
from ..plans.parameters import dynamic_extents
from ..plans.traced_plan import TracedPlan
from .calls import Calls
from .recorded_calls import RecordedCall


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

    def with_configs(self, pass_configs: Mapping[str, Any]) -> Plan:
        """Return a plan with the same steps for the same group, whose kernels are also compiled
        with ``pass_configs``.

        Raises:
            TileWeaveError: an option is unknown, or its value is not legal.
        """
        plan = super().with_configs(pass_configs)
        plan._group = self._group
        return plan

    @brief_errors
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Enqueue the steps on torch's current stream and on side streams; the host does not wait.

        The first call compiles the kernels, collectively; make it before capturing the plan in a
        CUDA graph.

        Raises:
            TileWeaveError: an argument does not match the declaration; nothing is enqueued.
        """
        self._calls(*args, **kwargs)

    @brief_errors
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


@brief_errors
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
    parameters, body, loc = plan_declaration(function)
    return Plan(function.__name__, parameters, body, loc, pass_configs).on(group)
