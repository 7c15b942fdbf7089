"""Steps of a plan for each rank and call, with the synchronization that they need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...passes import needs_sizes, specialize_sizes
from ...passes.ir.releases import upgrade_ir
from ...passes.sync.infer.options import own_options, with_options
from ..kernel.dynamic import DynamicKernel
from ..kernel.kernel import Kernel
from .builder import PlanBuilder
from .parameters import Parameter, Shape, key_of, parameters_of, shapes_of
from .regions import Region, RegionError
from .steps import Launch, Step, WaitStream
from .sync_pull import PullSync, pull_sync_of
from .sync_push import PushSync, refuse_beside_itself, refuse_pushes, sync_of

_MAX_TRACES = 256
"""Maximum number of traces that a plan caches; a trace is the steps of one call on one rank."""
_tracing = threading.RLock()
"""Lock for tracing and the caches of traces: several threads may call one plan, and all must launch
the same program objects. It is reentrant, because a plan's function may trace another plan."""


_Plan = TypeVar("_Plan", bound="TracedPlan")


class TracedPlan:
    """Plan without its calls: a function that appends the steps of each call on each rank.

    Attributes:
        name: name of the function.
        parameters: parameters of a call.
        body: appends the steps of one call to a ``PlanBuilder``.
        pass_configs: options for compiling its kernels.
    """

    def __init__(
        self, name: str, parameters: list[Parameter], body: Callable[..., None], loc: str,
        pass_configs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.parameters, self.loc = name, parameters, loc
        own_options(pass_configs or {})
        self.body, self.pass_configs = body, dict(pass_configs or {})
        self._programs: dict[int, tuple[tirx.PrimFunc, tirx.PrimFunc]] = {}
        """``id`` of a program -> the program, kept alive, and the program with the options."""
        self._syncs: dict[tuple, PushSync | PullSync] = {}
        self._last: tuple[tuple, bool] = (), False
        """Key of the call that was analyzed last, and whether it needs synchronization."""
        self._traces: dict[tuple, list[Step]] = {}

    @classmethod
    def of_program(cls, func: tirx.PrimFunc | Kernel) -> TracedPlan:
        """Return the plan that only launches ``func``."""
        program = func.program if isinstance(func, Kernel) else func
        name = str(program.attrs["global_symbol"])

        def body(p: PlanBuilder, *args: Any) -> None:
            p.launch(func, *args)
            p.steps = [replace(step, loc=name) for step in p.steps]

        return cls(name, list(parameters_of(program)), body, name)

    def with_configs(self: _Plan, pass_configs: Mapping[str, Any]) -> _Plan:
        """Return a plan with the same steps, whose kernels are also compiled with ``pass_configs``.

        Raises:
            TileWeaveError: an option is unknown, or its value is not legal.
        """
        own_options(pass_configs)
        configs = {**self.pass_configs, **pass_configs}
        return type(self)(self.name, self.parameters, self.body, self.loc, configs)

    def trace(
        self, rank: int, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any],
        *, recorded: bool = False,
    ) -> list[Step]:  # fmt: skip
        """Return the steps of one call on one rank, in the order in which the host enqueues them.

        Side streams are forked first and joined last. If the plan has no explicit synchronization,
        the steps that order its copies and kernels are included.

        Args:
            shapes: name of a tensor -> shape, of one rank's part if symmetric.
            scalars: name of a scalar -> value.
            recorded: whether a CUDA graph records the steps.
        """
        key = rank, world_size, tuple(shapes.items()), _keys(scalars), recorded
        with _tracing:
            steps = self._traces.pop(key, None)
            if steps is None:
                sync = self._sync_of(world_size, shapes, scalars)
                steps = self._traced(rank, world_size, shapes, scalars)
                if sync is not None:
                    steps = sync.apply(rank, world_size, steps, recorded)
            self._traces[key] = steps
            if len(self._traces) > _MAX_TRACES:
                del self._traces[next(iter(self._traces))]
        return steps

    def launches(
        self, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> list[Launch]:
        """Return a launch of each program that one call launches on any rank, with or without a
        CUDA graph.

        The order is the same on all ranks. All ranks compile all these programs, so that implicit
        memory has the same offset on all of them.

        Args:
            shapes, scalars: see ``trace``.
        """
        launches: dict[int, Launch] = {}
        for rank, recorded in product(range(world_size), (False, True)):
            for step in self.trace(rank, world_size, shapes, scalars, recorded=recorded):
                if isinstance(step, Launch):
                    launches.setdefault(id(step.program), step)
        return list(launches.values())

    def _sync_of(
        self, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> PushSync | PullSync | None:
        """Return the synchronization of a call, if it needs any; calls with equal shapes share
        it."""
        key = world_size, tuple(shapes.items())
        call = key, _keys(scalars)
        if self._last[0] != call:
            ranks = range(world_size)
            try:
                traces = [self._traced(r, world_size, shapes, scalars) for r in ranks]
            except RegionError:
                return None  # the trace of the rank with that region raises it
            refuse_beside_itself(traces)
            sync = pull_sync_of(traces) or sync_of(traces)
            if sync is not None:
                self._syncs.setdefault(key, sync)
            elif key in self._syncs:
                refuse_pushes(traces)
            self._last = call, sync is not None
        return self._syncs[key] if self._last[1] else None

    def _traced(
        self, rank: int, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> list[Step]:
        """Return the steps that the plan appends, with the fork and join of its streams."""
        p = PlanBuilder(rank, world_size)
        arguments = [
            scalars[a.name]
            if a.shape is None
            else Region.of(a, a.across(shapes[a.name], world_size))
            for a in self.parameters
        ]
        self.body(p, *arguments)
        sides = list(dict.fromkeys(s.stream for s in p.steps if s.stream is not None))
        fork: list[Step] = [WaitStream(s, self.loc, 0, other=None) for s in sides]
        join: list[Step] = [WaitStream(None, self.loc, 0, other=s) for s in sides]
        return [*fork, *map(self._prepared, p.steps), *join]

    def _prepared(self, step: Step) -> Step:
        """Return ``step`` with its program configured by the plan's options and specialized for the
        sizes of its arguments. Cached by options and sizes."""
        if not isinstance(step, Launch) or isinstance(step.kernel, Kernel):
            return step
        program = step.program
        if not isinstance(step.kernel, DynamicKernel):
            program = self._with_options(program)
        if needs_sizes(program):
            program = specialize_sizes(program, step.sizes)
        return replace(step, program=program)

    def _with_options(self, program: tirx.PrimFunc) -> tirx.PrimFunc:
        entry = self._programs.get(id(program))
        if entry is None:
            configured = with_options(upgrade_ir(program), self.pass_configs)
            entry = self._programs[id(program)] = program, configured
        return entry[1]

    def kernels(self, world_size: int) -> list[tirx.PrimFunc]:
        """Return the programs that a call launches on any rank, including those that order it.

        Raises:
            TileWeaveError: an extent is dynamic, or the plan has scalars: the programs depend on
                the call.
        """
        return [step.program for step in self.launches_of_any_call(world_size)]

    def launches_of_any_call(self, world_size: int) -> list[Launch]:
        """Return ``launches`` of a plan whose calls all launch the same programs.

        Raises:
            TileWeaveError: an extent is dynamic, or the plan has scalars: the programs depend on
                the call.
        """
        shapes = shapes_of(self.parameters, {}, self.name)
        scalars = [p.name for p in self.parameters if p.shape is None]
        if scalars:
            raise TileWeaveError(
                f"{self.name}: what it launches may depend on {', '.join(scalars)}; expected a "
                "plan without scalars"
            )
        return self.launches(world_size, shapes, {})

    def is_synchronized(self, world_size: int) -> bool:
        """Return whether a call for ``world_size`` ranks has received inferred synchronization."""
        return any(s is not None for (ranks, *_), s in self._syncs.items() if ranks == world_size)

    def __repr__(self) -> str:
        return f"tw.plan {self.name}({', '.join(p.name for p in self.parameters)})"


def _keys(scalars: Mapping[str, Any]) -> tuple:
    return tuple((name, key_of(value)) for name, value in scalars.items())
