"""A mesh plan and the plans that its groups call, compiled for simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...passes.sync.infer.options import Options
from ...runtime.plans.mesh_plan import GroupCall, MeshPlan, ranks_of
from ...runtime.plans.parameters import Parameter, Shape
from ...runtime.plans.regions import Region
from ...runtime.plans.steps import Launch, Step, WaitStream
from ...runtime.plans.traced_plan import TracedPlan
from ..frontend.program import Program
from ..memory.order import Lane, Layout
from ..memory.threads import names_of
from .executable import Call, Executable, ImplicitSet, divide, layout
from .group import Group
from .host import Host
from .machine import Machine


@dataclass(frozen=True)
class MeshCall:
    """A call of the mesh plan on one rank: its steps, each with the call of the group's plan."""

    epoch: int
    steps: list[tuple[Step, Executable | None, Call | None]]


class MeshExecutable:
    """A mesh plan compiled for the groups of a mesh, with the interface of ``Executable``.

    Args:
        mesh: size of each axis, by name.
        make: compiles a kernel for a number of ranks.

    Raises:
        TileWeaveError: something other than a mesh plan is given.
    """

    def __init__(
        self, what: Any, mesh: Mapping[str, int],
        make: Callable[[tirx.PrimFunc, int], Program] = Program,
    ) -> None:  # fmt: skip
        if isinstance(what, TracedPlan) and len(mesh) == 2:
            what = MeshPlan.of_plan(what, *mesh)
        if not isinstance(what, MeshPlan):
            name = what.attrs["global_symbol"] if isinstance(what, tirx.PrimFunc) else repr(what)
            raise TileWeaveError(
                f"simulate: {name} on a mesh; expected a tw.mesh_plan, or a tw.plan on two axes: "
                "nodes, and ranks of a node"
            )
        self.plan, self.mesh, self._make = what, dict(mesh), make
        self.world_size: int = ranks_of("simulate", mesh)
        self._groups = groups_of(mesh)
        self._executables: dict[tuple[int, str | None, str | None], tuple[Any, Executable]] = {}
        """Plan or program, kept alive, and its executable, by its ``id``, its group, and its
        nodes."""
        self._group_of: np.ndarray | None = None
        """Thread group of each thread of a block."""
        self._axis_of: dict[str, str | None] = {}
        """Group to which each symmetric tensor belongs."""

    @property
    def parameters(self) -> list[Parameter]:
        return self.plan.parameters

    @property
    def executables(self) -> list[Executable]:
        """Executables of the plans that the calls so far use."""
        return [executable for _, executable in self._executables.values()]

    @property
    def programs(self) -> list[Program]:
        """The kernels of the calls so far."""
        return [program for e in self.executables for program in e.programs]

    @property
    def launched(self) -> set[int]:
        """``id`` of each ``T.prim_func`` that the calls so far launch."""
        return set().union(*(e.launched for e in self.executables))

    @property
    def resident_blocks(self) -> int:
        """Number of blocks that the compiler assumes to be resident on a GPU."""
        numbers = (e.resident_blocks for e in self.executables)
        return min(numbers, default=Options().resident_blocks)

    @property
    def implicit(self) -> dict[tuple, ImplicitSet]:
        """Implicit parameters of each kernel."""
        return {key: of for e in self.executables for key, of in e.implicit.items()}

    def groups_of(self, name: str) -> Sequence[Group]:
        """Return the groups of which each has a copy of a symmetric tensor."""
        return self._groups[self._axis_of.get(name)]

    def call(
        self, rank: int, epoch: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> MeshCall:
        """Trace one call of the mesh plan.

        Raises:
            SimulationError: a region is out of bounds, or an operation is not simulated.
            TileWeaveError: a rank uses a symmetric tensor with another group than other ranks.
        """
        steps: list[tuple[Step, Executable | None, Call | None]] = []
        for step in self.plan.trace(rank, self.mesh, shapes, scalars):
            if not isinstance(step, GroupCall):
                steps.append((step, None, None))
                continue
            regions = {n: v for n, v in step.arguments.items() if isinstance(v, Region)}
            for region in regions.values():
                self._require_group(region.parameter, step, rank)
            executable = self._executable(step)
            call = executable.call(
                rank, epoch, {name: region.shape for name, region in regions.items()},
                {n: v for n, v in step.arguments.items() if n not in regions}, step.stream,
                {name: region.parameter.name for name, region in regions.items()},
            )  # fmt: skip
            if isinstance(step.program, tirx.PrimFunc):  # its only step is the call
                ((launch, kernels),) = call.steps
                call = replace(call, steps=[(replace(launch, loc=step.loc), kernels)])
            steps.append((step, executable, call))
        return MeshCall(epoch, steps)

    def _require_group(self, p: Parameter, step: GroupCall, rank: int) -> None:
        if p.symmetric and self._axis_of.setdefault(p.name, step.group) != step.group:
            raise TileWeaveError(
                f"simulate: rank {rank} uses {p.name} with group {step.group!r}; expected "
                f"{self._axis_of[p.name]!r}, to which it belongs --> {step.loc}"
            )

    def _executable(self, step: GroupCall) -> Executable:
        """Return the plan of a call, compiled for its group."""
        key = id(step.program), step.group, step.nodes
        if key not in self._executables:
            plan = step.program
            if not isinstance(plan, TracedPlan):
                plan = TracedPlan.of_program(plan)
            if self.plan.pass_configs:
                plan = plan.with_configs(self.plan.pass_configs)
            groups = self._groups[step.group]
            names = [e.plan.name for e in self.executables if e.groups is groups]
            number = f"#{names.count(plan.name) + 1}" if plan.name in names else ""
            label = f"{plan.name}{number} of {step.group or 'all ranks'}: "
            nodes = None if step.nodes is None else self._groups[step.nodes]
            executable = Executable(plan, groups[0].size, self._make, label, groups, nodes)
            self._executables[key] = step.program, executable
        return self._executables[key][1]

    def written(self, calls: Sequence[MeshCall]) -> set[str]:
        """Return the names of the tensors that these calls write."""
        return self._named(calls, Executable.written)

    def multicasts(self, calls: Sequence[MeshCall]) -> set[str]:
        """Return the names of the tensors that these calls use as multicast addresses."""
        return self._named(calls, Executable.multicasts)

    def _named(
        self, calls: Sequence[MeshCall], names: Callable[[Executable, Sequence[Call]], set[str]]
    ) -> set[str]:
        return {
            call.names[name]
            for _, executable, call in (step for of in calls for step in of.steps)
            if executable is not None and call is not None
            for name in names(executable, [call]) & call.names.keys()
        }

    def divide(self, parts: np.ndarray | None = None) -> tuple[str, ...]:
        """Divide the threads of all blocks into the same thread groups; return their names.

        Args:
            parts: numbers of sets of threads that act separately.
        """
        self._group_of = divide(self.programs, self._group_of, parts)
        return names_of(self._group_of)

    def layout(self, calls: Sequence[Sequence[MeshCall]]) -> Layout:
        """Return the numbering of the agents of these calls.

        Raises:
            TileWeaveError: their clocks would not fit into memory.
        """
        lanes, launches = [(Lane(), 0)], [0]
        for of_rank in calls:
            steps = [step for call in of_rank for step in call.steps]
            for _, executable, call in steps:
                if executable is not None and call is not None:
                    lanes += executable.lanes(call)
            launches.append(sum(len(call.steps) for *_, call in steps if call is not None))
        return layout(self.world_size, lanes, self.programs, max(launches))

    def launches(self, call: MeshCall) -> Iterator[tuple[Launch, int, Mapping[str, str]]]:
        """Yield each launch of a call, as ``Executable.launches``."""
        for _, executable, of_group in call.steps:
            if executable is not None and of_group is not None:
                yield from executable.launches(of_group)

    def enqueue(self, machine: Machine, rank: int, calls: Sequence[MeshCall]) -> None:
        """Add the streams of a rank to ``machine``, with all that its host enqueues in them.

        Calls that communicate are in the order that the runtime establishes, see ``launch_order``.
        """
        host = Host(machine, rank)
        last: list[str | None] = []  # the stream of the last call, if there was one
        for mesh_call in calls:
            for step, executable, call in mesh_call.steps:
                if isinstance(step, WaitStream):
                    host.wait(step.stream, step.other, mesh_call.epoch, step.loc)
                if not isinstance(step, GroupCall) or executable is None or call is None:
                    continue
                if step.ordered and executable.communicates(call):
                    if last and last != [step.stream]:
                        host.wait(step.stream, *last, mesh_call.epoch, step.loc)
                    last = [step.stream]
                executable.enqueue_call(host, call)
        host.close()


def groups_of(mesh: Mapping[str, int]) -> dict[str | None, list[Group]]:
    """Return the groups along each axis, and under None the group of all ranks."""
    ranks = np.arange(ranks_of("simulate", mesh)).reshape(tuple(mesh.values()))
    groups: dict[str | None, list[Group]] = {None: [Group("", tuple(ranks.flat))]}
    for number, axis in enumerate(mesh):
        rows = np.moveaxis(ranks, number, -1).reshape(-1, mesh[axis])
        groups[axis] = [Group(axis, tuple(map(int, row))) for row in rows]
    return groups
