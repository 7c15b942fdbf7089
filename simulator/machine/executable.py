"""A plan and its programs, compiled for simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx

from ...builtins.errors import TileWeaveError, not_a_program
from ...passes.ir.implicit import Implicit
from ...passes.ir.walk import communicates
from ...passes.sync.infer.options import Options, options_of
from ...runtime.plans.mesh_plan import MeshPlan
from ...runtime.plans.parameters import Parameter, Shape
from ...runtime.plans.regions import Region, RegionError
from ...runtime.plans.steps import (
    Collective,
    Copy,
    CopyValue,
    Launch,
    Step,
    WaitStream,
    WaitValue,
    WriteValue,
)
from ...runtime.plans.sync_push import implicit_name
from ...runtime.plans.traced_plan import TracedPlan
from ..frontend.program import Program
from ..inputs.arguments import check_blocks
from ..memory.memory import Tensor
from ..memory.order import Lane, Layout, of_group
from ..memory.threads import cut, finer, names_of
from ..report.errors import SimulationError, refuse_vectors
from .collectives import Collective as CollectiveWork
from .group import Group
from .host import Host
from .machine import Machine
from .streams import Await, Transfer
from .streams import Launch as KernelLaunch


@dataclass(frozen=True)
class Call:
    """A call of the plan on one rank: its steps, each with its kernel launches.

    Attributes:
        stream: the caller's stream.
        names: names of the caller's tensors, by parameter; empty if they are the plan's.
    """

    epoch: int
    steps: list[tuple[Step, list[tuple]]]
    stream: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


class ImplicitSet(NamedTuple):
    """Implicit parameters of one kernel, each with its name in steps."""

    groups: Sequence[Group]
    parameters: list[tuple[str, Implicit]]


class Executable:
    """A plan compiled for the ranks of a group. A ``T.prim_func`` is a plan of one launch.

    Args:
        world_size: number of ranks of the group.
        make: compiles a kernel for this number of ranks.
        label: distinguishes its side streams and implicit tensors from those of other executables.
        groups: groups that call it, each with its own memory; None: the group of all ranks.
        nodes: ranks with the same index in the groups of different nodes; None: one node.

    Raises:
        TileWeaveError: neither a plan nor a ``T.prim_func`` is given.
    """

    def __init__(
        self, what: Any, world_size: int, make: Callable[[tirx.PrimFunc, int], Program] = Program,
        label: str = "", groups: Sequence[Group] | None = None,
        nodes: Sequence[Group] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(what, tirx.PrimFunc):
            what = TracedPlan.of_program(what)
        if isinstance(what, MeshPlan):
            raise TileWeaveError(
                f"simulate: {what!r} on {world_size} ranks; expected the axes of a mesh with their "
                "sizes, such as {'cp': 2, 'tp': 2}"
            )
        if not isinstance(what, TracedPlan):
            raise not_a_program("simulate", what, "a T.prim_func or a tw.plan")
        for p in what.parameters:
            refuse_vectors(p.name, p.dtype, what.loc)
        self.plan, self.world_size, self._make, self._label = what, world_size, make, label
        self.groups = groups or [Group("", tuple(range(world_size)))]
        self._group_at = {rank: group for group in self.groups for rank in group.ranks}
        alone = [Group("", (rank,)) for rank in self._group_at]
        self._nodes_at = {rank: group for group in nodes or alone for rank in group.ranks}
        self._plans: dict[int, TracedPlan] = {}
        """The plan for each node, if there are several."""
        self._programs: dict[int, tuple[tirx.PrimFunc, Program]] = {}
        self._group_of: np.ndarray | None = None
        """Thread group of each thread of a block."""
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
    def implicit(self) -> dict[tuple, ImplicitSet]:
        """Implicit parameters of each kernel."""
        return {
            (self._label, key): ImplicitSet(
                self.groups,
                [(self._label + implicit_name(func, p.name), p) for p in program.implicit],
            )
            for key, (func, program) in self._programs.items()
        }

    def groups_of(self, name: str) -> Sequence[Group]:
        """Return the groups of which each has a copy of a symmetric tensor."""
        return self.groups

    def call(
        self, rank: int, epoch: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any],
        stream: str | None = None, names: Mapping[str, str] | None = None,
    ) -> Call:  # fmt: skip
        """Trace one call of the plan.

        Args:
            rank: among all ranks.
            stream, names: of the call.

        Raises:
            SimulationError: a region is out of bounds, or an operation is not simulated.
        """
        number = self._group_at[rank].ranks.index(rank)
        try:
            plan = self._plan_of(self._nodes_at[rank], rank)
            steps = plan.trace(number, self.world_size, shapes, scalars)
        except RegionError as error:
            where = f"rank {rank} in launch {epoch}"
            raise SimulationError(
                "bounds", f"{error}\nin plan {self.plan.name} of {where}"
            ) from None
        launches = [(step, self._launches(step, number)) for step in steps]
        return Call(epoch, launches, stream, names or {})

    def _plan_of(self, nodes: Group, rank: int) -> TracedPlan:
        """Return the plan that a rank calls."""
        if nodes.size == 1:
            return self.plan
        node = nodes.ranks.index(rank)
        if node not in self._plans:
            self._plans[node] = self.plan.on_node(node, nodes.size)
        return self._plans[node]

    def written(self, calls: Sequence[Call]) -> set[str]:
        """Return the names of the tensors that these calls write."""
        names = set()
        for step, _ in (s for call in calls for s in call.steps):
            if isinstance(step, Launch):
                names |= _tensors(step, self.program(step.program).written)
            elif isinstance(step, (Copy, WriteValue, CopyValue, Collective)):
                names.add(step.dst.parameter.name)
        return names

    def multicasts(self, calls: Sequence[Call]) -> set[str]:
        """Return the names of the tensors that these calls use as multicast addresses."""
        names = set()
        for step, _ in (s for call in calls for s in call.steps):
            if isinstance(step, Launch):
                names |= _tensors(step, self.program(step.program).multicasts)
        return names

    def program(self, func: tirx.PrimFunc) -> Program:
        """Return the compiled ``func``."""
        if id(func) not in self._programs:
            self._programs[id(func)] = func, self._make(func, self.world_size)
        return self._programs[id(func)][1]

    def divide(self, parts: np.ndarray | None = None) -> tuple[str, ...]:
        """Divide the threads of all blocks into the same thread groups; return their names.

        Args:
            parts: numbers of sets of threads that act separately.
        """
        self._group_of = divide(self.programs, self._group_of, parts)
        return names_of(self._group_of)

    def layout(self, calls: Sequence[Sequence[Call]]) -> Layout:
        """Return the numbering of the agents of these calls.

        Raises:
            TileWeaveError: their clocks would not fit into memory.
        """
        lanes = [lane for rank in calls for call in rank for lane in self.lanes(call)]
        launches = max((sum(len(call.steps) for call in rank) for rank in calls), default=0)
        return layout(self.world_size, [(Lane(), 0), *lanes], self.programs, launches)

    def lanes(self, call: Call) -> Iterable[tuple[Lane, int]]:
        """Yield the lane of each step of a call, with its largest number of blocks."""
        for step, launches in call.steps:
            most = max((_blocks(extents) for _, _, extents in launches), default=0)
            yield Lane(self._stream(call, step.stream), self.groups[0].name), most

    def _stream(self, call: Call, name: str | None) -> str | None:
        """Return the name of a stream of the plan among all streams of the rank."""
        return call.stream if name is None else self._label + name

    def launches(self, call: Call) -> Iterator[tuple[Launch, int, Mapping[str, str]]]:
        """Yield each launch of a call, the number of its ranks, and the names of the caller's
        tensors by the plan's parameters."""
        for step, _ in call.steps:
            if isinstance(step, Launch):
                yield step, self.world_size, call.names

    def communicates(self, call: Call) -> bool:
        """Return whether the runtime orders a call after the last one in another stream."""
        return any(p.symmetric for p in self.parameters) or any(
            communicates(step.program) for step, _ in call.steps if isinstance(step, Launch)
        )

    def enqueue(self, machine: Machine, rank: int, calls: Sequence[Call]) -> None:
        """Add the streams of a rank to ``machine``, with all that its host enqueues in them."""
        host = Host(machine, rank)
        for call in calls:
            self.enqueue_call(host, call)
        host.close()

    def enqueue_call(self, host: Host, call: Call) -> None:
        """Enqueue the steps of one call."""
        group = self._group_at[host.rank]
        for step, launches in call.steps:
            host.enqueue_index += 1
            stream = self._stream(call, step.stream)
            if isinstance(step, WaitStream):
                host.wait(stream, self._stream(call, step.other), call.epoch, step.loc)
                continue
            common: dict[str, Any] = {
                "epoch": call.epoch, "enqueue_index": host.enqueue_index, "loc": step.loc,
                "title": f"{step.title} (step {step.number}){of_group(group.name)}",
                "group": group,
            }  # fmt: skip
            if isinstance(step, Launch):
                tensors = {
                    name: self._tensor(host, call, value)
                    for name, value in step.arguments.items()
                    if isinstance(value, Region)
                }
                implicit = host.machine.implicit.get((self._label, id(step.program)), {})
                tensors |= {name: of_ranks[host.rank] for name, of_ranks in implicit.items()}
                host.queue(stream).extend(
                    KernelLaunch(kernel=k, env=env, extents=extents, tensors=tensors, **common)
                    for k, env, extents in launches
                )
            elif isinstance(step, WaitValue):
                flag = self._tensor(host, call, step.flag)
                work = Await(step=step, flag=flag, takes_room=False, **common)
                host.queue(stream).append(work)
            elif isinstance(step, Collective):
                host.queue(stream).append(self._collective(host, call, step, common))
            else:
                host.queue(stream).append(self._transfer(host, call, step, common))

    def _transfer(self, host: Host, call: Call, step: Any, common: dict) -> Transfer:
        src, rank = getattr(step, "src", None), common["group"].ranks.index(host.rank)
        return Transfer(
            step=step,
            dst=self._tensor(host, call, step.dst),
            src=None if src is None else self._tensor(host, call, src),
            takes_room=isinstance(step, Copy) and _owner(step.dst, rank) == _owner(step.src, rank),
            **common,
        )

    def _collective(self, host: Host, call: Call, step: Collective, common: dict) -> CollectiveWork:
        among = self._nodes_at[host.rank] if step.across == "nodes" else common["group"]
        return CollectiveWork(
            step=step, dst=self._tensor(host, call, step.dst),
            src=self._tensor(host, call, step.src), among=among,
            sequence=host.number_collective(among), **common,
        )  # fmt: skip

    def _tensor(self, host: Host, call: Call, region: Region) -> Tensor:
        name = region.parameter.name
        return host.machine.named[call.names.get(name, self._label + name)][host.rank]

    def _launches(self, step: Step, rank: int) -> list[tuple]:
        if not isinstance(step, Launch):
            return []
        self.launched.add(id(step.kernel))
        values = step.arguments
        regions = {n: v for n, v in values.items() if isinstance(v, Region)}
        program, shapes = self.program(step.program), {n: v.shape for n, v in regions.items()}
        self.counted |= _tensors(step, program.counted)
        return list(program.launches(rank, shapes, values))


def divide(
    programs: Iterable[Program], group_of: np.ndarray | None, parts: np.ndarray | None
) -> np.ndarray:
    """Divide the threads of all blocks of ``programs`` into the same thread groups; return the
    group of each thread.

    Args:
        group_of: earlier groups, which the new ones divide; None before the first time.
        parts: numbers of sets of threads that act separately.
    """
    if group_of is None:
        group_of = cut({0, 1}.union(*(p.cuts for p in programs)))
    if parts is not None:
        wide = np.full(len(group_of), -1)
        wide[: len(parts)] = parts
        group_of = finer(group_of, wide)
    for program in programs:
        program.divide(group_of)
    return group_of


def layout(
    world_size: int, lanes: Iterable[tuple[Lane, int]], programs: Sequence[Program], launches: int
) -> Layout:
    """Return the numbering of the agents.

    Args:
        lanes: lanes with numbers of blocks; a lane may occur several times.
        launches: number of launches of one rank.

    Raises:
        TileWeaveError: the clocks would not fit into memory.
    """
    blocks: dict[Lane, int] = {}
    for lane, count in lanes:
        blocks[lane] = max(blocks.get(lane, 0), count)
    thread_groups = max((p.thread_groups for p in programs), default=1)
    check_blocks(sum(blocks.values()), thread_groups, launches, world_size)
    mbarriers = max((p.mbarriers for p in programs), default=0)
    return Layout(world_size, list(blocks.items()), thread_groups, mbarriers)


def _tensors(launch: Launch, parameters: Set[str]) -> set[str]:
    """Return the names of the plan's tensors that are arguments for these parameters."""
    arguments = launch.arguments
    return {arguments[name].parameter.name for name in parameters & arguments.keys()}


def _owner(region: Region, rank: int) -> int:
    return rank if region.rank is None else region.rank


def _blocks(extents: tuple[int, ...]) -> int:
    count = 1
    for extent in extents:
        count *= extent
    return count
