"""Plans of a mesh: calls of plans by several groups, in the order in which a host enqueues them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.errors import TileWeaveError, brief_errors
from ...passes.sync.infer.options import own_options
from .declaration import plan_declaration
from .parameters import Parameter, Shape, parameters_of
from .regions import Region
from .step_list import StepList
from .steps import Step
from .traced_plan import TracedPlan


@dataclass(frozen=True)
class GroupCall(Step):
    """Call of a plan by a group.

    Attributes:
        program: a plan, or a ``T.prim_func`` that the group launches.
        group: axis of the mesh along which the ranks of the group are; None: all ranks.
        nodes: axis of the mesh along which the nodes of ``program`` are; None: one node.
        ordered: whether the runtime orders it after the calls before it.
    """

    op = "m.call"
    program: TracedPlan | tirx.PrimFunc
    group: str | None
    nodes: str | None
    ordered: bool
    arguments: dict[str, Any]
    """Name of a parameter of ``program`` -> region or number."""


class MeshBuilder(StepList):
    """First argument of a mesh plan's function: each method appends what the host of this rank
    enqueues next.

    Attributes:
        rank, world_size: among all ranks of the mesh, as integers.
        mesh: size of each axis, by name. Ranks are numbered along the last axis first.
    """

    def __init__(self, rank: int, mesh: Mapping[str, int]) -> None:
        super().__init__(rank, math.prod(mesh.values()))
        self.mesh = dict(mesh)
        self._group_of: dict[str, str | None] = {}
        """Group of each symmetric tensor."""

    def coordinate(self, axis: str) -> int:
        """Return the position of this rank along an axis: its rank in the group."""
        self._require_axis("coordinate", axis)
        position = np.unravel_index(self.rank, tuple(self.mesh.values()))
        return int(position[list(self.mesh).index(axis)])

    def call(
        self, program: Any, *args: Any, group: str | None, nodes: str | None = None,
        stream: str | None = None, ordered: bool = True,
    ) -> None:  # fmt: skip
        """Call a plan, or launch a kernel, by the group of this rank along an axis of the mesh.

        If it communicates, the runtime orders it after all such calls before it, also those on
        other streams: they never overlap.

        Args:
            program: a ``tw.plan``, or a ``@T.prim_func``.
            args: its arguments in order: tensors of the mesh plan and numbers. None is skipped.
            group: name of the axis; None for the group of all ranks.
            nodes: name of the axis of nodes, for a plan on a mesh of nodes and ranks of a node;
                see ``Plan.on``.
            stream: stream that is the caller's stream of ``program``.
            ordered: False for what the runtime does not order: a program that stock TileLang
                launches.
        """
        if isinstance(program, TracedPlan):
            name, parameters = program.name, program.parameters
        elif isinstance(program, tirx.PrimFunc):
            name, parameters = str(program.attrs["global_symbol"]), parameters_of(program)
        else:
            raise self._refused("call", f"program={program!r}", "a tw.plan or a T.prim_func")
        op = f"call of {name}"
        for axis in (a for a in (group, nodes) if a is not None):
            self._require_axis(op, axis)
        if nodes is not None and group in (None, nodes):
            raise self._refused(op, f"nodes={nodes!r} of group={group!r}", "two axes of the mesh")
        arguments = self._arguments(op, parameters, args)
        self._sizes(op, parameters, arguments)
        for p in parameters:
            if p.symmetric:
                self._require_group(op, p, arguments[p.name], group)
        self._add(
            GroupCall, stream, program=program, group=group, nodes=nodes, ordered=bool(ordered),
            arguments=arguments,
        )  # fmt: skip

    def _require_axis(self, op: str, axis: Any) -> None:
        if axis not in self.mesh:
            raise self._refused(op, f"axis {axis!r}", f"one of {', '.join(self.mesh)}")

    def _require_group(self, op: str, p: Parameter, region: Region, group: str | None) -> None:
        """Refuse a symmetric tensor that another group has used."""
        tensor = region.parameter.name
        owner = self._group_of.setdefault(tensor, group)
        if owner != group:
            raise self._refused(
                op, f"{p.name}={tensor} is a tensor of group {owner!r}", f"one of group {group!r}"
            )

    def _part_shape(self, region: Region) -> Shape:
        return region.shape


class MeshPlan:
    """Calls of plans by several groups of a mesh, for the simulator. Created by ``tw.mesh_plan``.

    Attributes:
        parameters: tensors and scalars. A symmetric tensor belongs to the group that uses it.
        loc: ``file:line`` of its function.
    """

    def __init__(
        self, name: str, parameters: list[Parameter], body: Callable[..., None], loc: str,
        pass_configs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.parameters, self.body, self.loc = name, parameters, body, loc
        self.pass_configs = dict(pass_configs or {})

    @staticmethod
    def of_plan(plan: TracedPlan, nodes: str, ranks: str) -> MeshPlan:
        """Return the mesh plan that only calls ``plan``, by the ranks of each node.

        Args:
            nodes, ranks: names of the axes.
        """

        def body(m: MeshBuilder, *args: Any) -> None:
            m.call(plan, *args, group=ranks, nodes=nodes)

        return MeshPlan(plan.name, plan.parameters, body, plan.loc)

    def with_configs(self, pass_configs: Mapping[str, Any]) -> MeshPlan:
        """Return a plan with the same calls, whose kernels are also compiled with
        ``pass_configs``."""
        own_options(pass_configs)
        configs = {**self.pass_configs, **pass_configs}
        return MeshPlan(self.name, self.parameters, self.body, self.loc, configs)

    def trace(
        self, rank: int, mesh: Mapping[str, int], shapes: Mapping[str, Shape],
        scalars: Mapping[str, Any],
    ) -> list[Step]:  # fmt: skip
        """Return what the host of a rank enqueues in one call.

        Args:
            shapes: name of a tensor -> shape, of one rank's part if symmetric.
            scalars: name of a scalar -> value.
        """
        m = MeshBuilder(rank, mesh)
        self.body(
            m,
            *(
                scalars[p.name] if p.shape is None else Region.of(p, shapes[p.name])
                for p in self.parameters
            ),
        )
        return m.steps

    def __repr__(self) -> str:
        return f"tw.mesh_plan {self.name}({', '.join(p.name for p in self.parameters)})"


@brief_errors
def mesh_plan(function: Callable[..., None]) -> MeshPlan:
    """Create a ``tw.MeshPlan`` from a function; a decorator. ``tw.simulate`` runs it on a mesh.

    The first parameter of the function receives a ``tw.MeshBuilder``, which appends the calls that
    the host of a rank enqueues. The other parameters are those of a ``tw.plan``. The function may
    branch on ``m.rank``, ``m.coordinate(axis)``, scalars and shapes.

    Raises:
        TileWeaveError: a parameter has no such annotation.
    """
    parameters, body, loc = plan_declaration(function, "mesh_plan")
    return MeshPlan(function.__name__, parameters, body, loc)


def ranks_of(op: str, mesh: Any) -> Any:
    """Return the number of ranks of a mesh; ``mesh`` itself if it is no mapping.

    Raises:
        TileWeaveError: there is no axis, a name is no text, or a size is no positive integer.
    """
    if not isinstance(mesh, Mapping):
        return mesh
    for name, size in mesh.items():
        if not (isinstance(name, str) and name and type(size) is int and size > 0):
            raise TileWeaveError(
                f"{op}: axis {name!r} of size {size!r}; expected a name, and an integer from 1 on"
            )
    return math.prod(mesh.values()) if mesh else 0
