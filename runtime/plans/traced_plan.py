"""Steps of a plan for each rank and call, with the synchronization that they need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...passes import needs_sizes, specialize_sizes
from ...passes.sync.infer.options import own_options, split_options
from ..kernel.dynamic import DynamicKernel
from ..kernel.kernel import Kernel
from .builder import PlanBuilder
from .parameters import (
    Parameter,
    Shape,
    key_of,
    parameters_of,
    shapes_of,
)
from .regions import Region, RegionError
from .steps import Launch, Step, WaitStream
from .sync_pull import PullSync, pulls_of
from .sync_push import PlanSync, refuse_beside_itself, refuse_pushes, sync_of

_TRACES = 256
"""Ranks' calls whose steps a plan remembers."""
_tracing = threading.RLock()
"""Held while steps are made and remembered: threads may call one plan, and all are to launch the
very same programs. What a plan says may ask for the steps of another."""


class TracedPlan:
    """Plan without its calls: a function that appends the steps of each call on each rank.

    Attributes:
        name: of the function.
        parameters: what a call takes.
        body: says the steps of one call.
        pass_configs: with which its kernels are compiled.
    """

    def __init__(
        self, name: str, parameters: list[Parameter], body: Callable[..., None], loc: str,
        pass_configs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.parameters, self.loc = name, parameters, loc
        own_options(pass_configs or {})
        self.body, self.pass_configs = body, dict(pass_configs or {})
        self._programs: dict[int, tuple[tirx.PrimFunc, tirx.PrimFunc]] = {}
        self._syncs: dict[tuple, PlanSync | PullSync] = {}
        self._last: tuple[tuple, bool] = (), False
        """The call looked at last, and whether it needs an order."""
        self._traces: dict[tuple, list[Step]] = {}

    @classmethod
    def of_program(cls, func: tirx.PrimFunc | Kernel) -> TracedPlan:
        """The plan that launches ``func``, and nothing else."""
        program = func.program if isinstance(func, Kernel) else func
        name = str(program.attrs["global_symbol"])

        def body(p: PlanBuilder, *args: Any) -> None:
            p.launch(func, *args)
            p.steps = [replace(step, loc=name) for step in p.steps]

        return cls(name, list(parameters_of(program)), body, name)

    def with_configs(self, pass_configs: Mapping[str, Any]) -> TracedPlan:
        """The same operator, whose kernels are compiled with these ``pass_configs``, too.

        Raises:
            TileWeaveError: an option that there is not, or a value that it cannot have.
        """
        own_options(pass_configs)
        configs = {**self.pass_configs, **pass_configs}
        return type(self)(self.name, self.parameters, self.body, self.loc, configs)

    def trace(
        self, rank: int, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any],
        *, recorded: bool = False,
    ) -> list[Step]:  # fmt: skip
        """The steps of one call on one rank, in the order in which the host enqueues them: side
        streams forked first, joined last. What orders its copies and kernels is among them, where
        the plan leaves that out.

        Args:
            shapes: of every tensor, of one rank's part if symmetric.
            scalars: the values of the others.
            recorded: whether a CUDA graph records them.
        """
        key = rank, world_size, tuple(shapes.items()), _keys(scalars), recorded
        with _tracing:
            steps = self._traces.pop(key, None)
            if steps is None:
                sync = self._sync_of(world_size, shapes, scalars)
                steps = self._traced(rank, world_size, shapes, scalars)
                if sync is not None:
                    steps = sync.apply(rank, world_size, steps, self._with_options, recorded)
            self._traces[key] = steps
            if len(self._traces) > _TRACES:
                del self._traces[next(iter(self._traces))]
        return steps

    def launches(
        self, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> list[Launch]:
        """A launch of each program that one call launches on some rank, or that a CUDA graph
        records for it, in the same order whichever rank asks: all compile them, so that hidden
        memory is at one place on all.

        Args:
            shapes, scalars: as for ``trace``.
        """
        found: dict[int, Launch] = {}
        for rank, recorded in product(range(world_size), (False, True)):
            for step in self.trace(rank, world_size, shapes, scalars, recorded=recorded):
                if isinstance(step, Launch):
                    found.setdefault(id(step.program), step)
        return list(found.values())

    def _sync_of(
        self, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> PlanSync | PullSync | None:
        """What orders a call: the same for the same shapes, in all calls that need it."""
        key = world_size, tuple(shapes.items())
        call = key, _keys(scalars)
        if self._last[0] != call:
            ranks = range(world_size)
            try:
                traces = [self._traced(r, world_size, shapes, scalars) for r in ranks]
            except RegionError:
                return None  # the rank whose region it is says so
            refuse_beside_itself(traces)
            found = pulls_of(traces) or sync_of(traces)
            if found is not None:
                self._syncs.setdefault(key, found)
            elif key in self._syncs:
                refuse_pushes(traces)
            self._last = call, found is not None
        return self._syncs[key] if self._last[1] else None

    def _traced(
        self, rank: int, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> list[Step]:
        """The steps as the plan says them."""
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
        """``step`` with the plan's options and for the sizes of its arguments, if it launches a
        program: the same for the same ones."""
        if not isinstance(step, Launch) or isinstance(step.kernel, Kernel):
            return step
        program = step.program
        if not isinstance(step.kernel, DynamicKernel):
            program = self._with_options(program)
        if needs_sizes(program):
            program = specialize_sizes(program, step.sizes)
        return replace(step, program=program)

    def _with_options(self, program: tirx.PrimFunc) -> tirx.PrimFunc:
        known = self._programs.get(id(program))
        if known is None:
            configured, _ = split_options(program, self.pass_configs)
            known = self._programs[id(program)] = program, configured
        return known[1]

    def kernels(self, world_size: int) -> list[tirx.PrimFunc]:
        """The programs that a call launches on any rank, with what orders them, as it compiles
        them.

        Raises:
            TileWeaveError: an extent is dynamic, or there are scalars: the call decides.
        """
        return [step.program for step in self.launches_of_any_call(world_size)]

    def launches_of_any_call(self, world_size: int) -> list[Launch]:
        """``launches`` of a plan whose calls launch all the same.

        Raises:
            TileWeaveError: an extent is dynamic, or there are scalars: the call decides.
        """
        shapes = shapes_of(self.parameters, {}, self.name)
        scalars = [p.name for p in self.parameters if p.shape is None]
        if scalars:
            raise TileWeaveError(
                f"{self.name}: what it launches may depend on {', '.join(scalars)}; expected a "
                "plan without scalars"
            )
        return self.launches(world_size, shapes, {})

    def is_synchronised(self, world_size: int) -> bool:
        """Whether some call for ``world_size`` ranks was given what orders it."""
        return any(s is not None for (ranks, _), s in self._syncs.items() if ranks == world_size)

    def __repr__(self) -> str:
        return f"tw.plan {self.name}({', '.join(p.name for p in self.parameters)})"


def _keys(scalars: Mapping[str, Any]) -> tuple:
    return tuple((name, key_of(value)) for name, value in scalars.items())
