"""A plan and its programs, compiled for simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.errors import not_a_program
from ...passes.ir.implicit import Implicit
from ...passes.sync.infer.options import Options, options_of
from ...runtime.plans.parameters import Parameter, Shape
from ...runtime.plans.regions import Region, RegionError
from ...runtime.plans.steps import (
    Copy,
    CopyValue,
    Launch,
    Step,
    WriteValue,
)
from ...runtime.plans.sync_push import implicit_name
from ...runtime.plans.traced_plan import TracedPlan
from ..frontend.program import Program
from ..report.errors import SimulationError, refuse_vectors
from .host import Call


class Executable:
    """A plan compiled for a number of ranks. A ``T.prim_func`` is a plan of one launch.

    Args:
        make: compiles a kernel for this number of ranks.

    Raises:
        TileWeaveError: neither a plan nor a ``T.prim_func`` is given.
    """

    def __init__(
        self, what: Any, world_size: int, make: Callable[[tirx.PrimFunc, int], Program] = Program
    ) -> None:
        if isinstance(what, tirx.PrimFunc):
            what = TracedPlan.of_program(what)
        if not isinstance(what, TracedPlan):
            raise not_a_program("simulate", what, "a T.prim_func or a tw.plan")
        for p in what.parameters:
            refuse_vectors(p.name, p.dtype, what.loc)
        self.plan, self.world_size, self._make = what, world_size, make
        self._programs: dict[int, tuple[tirx.PrimFunc, Program]] = {}
        self.group_of: np.ndarray | None = None
        """Thread group of each thread of a block in the schedules so far."""
        self.launched: set[int] = set()
        """``id`` of each ``T.prim_func`` that the plan launches."""
        self.counted: set[str] = set()
        """Names of the tensors whose words the barriers of the calls so far use."""

    @property
    def parameters(self) -> list[Parameter]:
        return self.plan.parameters

    @property
    def programs(self) -> list[Program]:
        """The kernels of the calls so far."""
        return [program for _, program in self._programs.values()]

    @property
    def functions(self) -> list[tirx.PrimFunc]:
        """The ``T.prim_func`` of each kernel of the calls so far."""
        return [func for func, _ in self._programs.values()]

    @property
    def resident_blocks(self) -> int:
        """Number of blocks that the compiler assumes to be resident on a GPU: the smallest number
        among the kernels of the calls so far."""
        options = [options_of(func) for func, _ in self._programs.values()] or [Options()]
        return min(o.resident_blocks for o in options)

    @property
    def implicit(self) -> dict[int, list[tuple[str, Implicit]]]:
        """Implicit parameters of each kernel, each with its name in steps."""
        return {
            key: [(implicit_name(func, p.name), p) for p in program.implicit]
            for key, (func, program) in self._programs.items()
        }

    def call(
        self, rank: int, epoch: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> Call:
        """Trace one call of the plan.

        Raises:
            SimulationError: a region is out of bounds, or an operation is not simulated.
        """
        try:
            steps = self.plan.trace(rank, self.world_size, shapes, scalars)
        except RegionError as error:
            where = f"rank {rank} in launch {epoch}"
            raise SimulationError(
                "bounds", f"{error}\nin plan {self.plan.name} of {where}"
            ) from None
        launches = [(step, self._launches(step, rank)) for step in steps]
        kernels = [(step, self.program(step.program)) for step in steps if isinstance(step, Launch)]
        moves = (step for step in steps if isinstance(step, (Copy, WriteValue, CopyValue)))
        written = {step.dst.parameter.name for step in moves}
        written = written.union(*(_tensors(step, p.written) for step, p in kernels))
        multicasts = set().union(*(_tensors(step, p.multicasts) for step, p in kernels))
        return Call(epoch, launches, written, multicasts)

    def program(self, func: tirx.PrimFunc) -> Program:
        """Return the compiled ``func``."""
        if id(func) not in self._programs:
            self._programs[id(func)] = func, self._make(func, self.world_size)
        return self._programs[id(func)][1]

    def _launches(self, step: Step, rank: int) -> list[tuple]:
        if not isinstance(step, Launch):
            return []
        self.launched.add(id(step.kernel))
        values = step.arguments
        regions = {n: v for n, v in values.items() if isinstance(v, Region)}
        program, shapes = self.program(step.program), {n: v.shape for n, v in regions.items()}
        self.counted |= _tensors(step, program.counted)
        return list(program.launches(rank, shapes, values))


def _tensors(launch: Launch, parameters: Set[str]) -> set[str]:
    """Return the names of the plan's tensors that are arguments for these parameters."""
    arguments = launch.arguments
    return {arguments[name].parameter.name for name in parameters & arguments.keys()}
