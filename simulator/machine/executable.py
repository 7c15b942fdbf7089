"""A plan and its programs, compiled for simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
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
    WaitStream,
    WaitValue,
    WriteValue,
)
from ...runtime.plans.sync_push import implicit_name
from ...runtime.plans.traced_plan import TracedPlan
from ..frontend.program import Program
from ..inputs.arguments import check_blocks
from ..memory.order import Layout
from ..memory.threads import cut, finer, names_of
from ..report.errors import SimulationError, refuse_vectors
from .host import Host
from .machine import Machine
from .streams import Await, Transfer
from .streams import Launch as KernelLaunch


@dataclass(frozen=True)
class Call:
    """A call of the plan on one rank: its steps, each with its kernel launches."""

    epoch: int
    steps: list[tuple[Step, list[tuple]]]


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
        return Call(epoch, [(step, self._launches(step, rank)) for step in steps])

    def written(self, calls: Sequence[Call]) -> set[str]:
        """Return the names of the tensors that these calls write."""
        names = set()
        for step, _ in (s for call in calls for s in call.steps):
            if isinstance(step, Launch):
                names |= _tensors(step, self.program(step.program).written)
            elif isinstance(step, (Copy, WriteValue, CopyValue)):
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
        group_of = self._group_of
        if group_of is None:
            group_of = cut({0, 1}.union(*(p.cuts for p in self.programs)))
        if parts is not None:
            wide = np.full(len(group_of), -1)
            wide[: len(parts)] = parts
            group_of = finer(group_of, wide)
        for program in self.programs:
            program.divide(group_of)
        self._group_of = group_of
        return names_of(group_of)

    def layout(self, calls: Sequence[Sequence[Call]]) -> Layout:
        """Return the numbering of the agents of these calls.

        Raises:
            TileWeaveError: their clocks would not fit into memory.
        """
        blocks: dict[str | None, int] = {None: 0}
        for step, launches in (s for rank in calls for call in rank for s in call.steps):
            most = max((prod(extents) for _, _, extents in launches), default=0)
            blocks[step.stream] = max(blocks.get(step.stream, 0), most)
        thread_groups = max((p.thread_groups for p in self.programs), default=1)
        launched = max((sum(len(call.steps) for call in rank) for rank in calls), default=0)
        check_blocks(sum(blocks.values()), thread_groups, launched, self.world_size)
        mbarriers = max((p.mbarriers for p in self.programs), default=0)
        return Layout(self.world_size, blocks, thread_groups, mbarriers)

    def enqueue(self, machine: Machine, rank: int, calls: Sequence[Call]) -> None:
        """Add the streams of a rank to ``machine``, with all that its host enqueues in them."""
        host = Host(machine, rank)
        for call in calls:
            for step, launches in call.steps:
                _enqueue(host, call.epoch, step, launches)
        host.close()

    def _launches(self, step: Step, rank: int) -> list[tuple]:
        if not isinstance(step, Launch):
            return []
        self.launched.add(id(step.kernel))
        values = step.arguments
        regions = {n: v for n, v in values.items() if isinstance(v, Region)}
        program, shapes = self.program(step.program), {n: v.shape for n, v in regions.items()}
        self.counted |= _tensors(step, program.counted)
        return list(program.launches(rank, shapes, values))


def _enqueue(host: Host, epoch: int, step: Step, launches: list[tuple]) -> None:
    """Enqueue a step on a rank."""
    host.enqueue_index += 1
    if isinstance(step, WaitStream):
        host.wait(step.stream, step.other, epoch, step.loc)
        return
    common: dict[str, Any] = {
        "epoch": epoch, "enqueue_index": host.enqueue_index, "loc": step.loc,
        "title": f"{step.title} (step {step.number})",
    }  # fmt: skip
    queue = host.queue(step.stream)
    if isinstance(step, Launch):
        regions = {n: v for n, v in step.arguments.items() if isinstance(v, Region)}
        tensors = {name: host.tensor(region) for name, region in regions.items()}
        implicit = host.machine.implicit.get(id(step.program), {})
        tensors |= {name: of_ranks[host.rank] for name, of_ranks in implicit.items()}
        queue.extend(
            KernelLaunch(kernel=k, env=env, extents=extents, tensors=tensors, **common)
            for k, env, extents in launches
        )
    elif isinstance(step, WaitValue):
        flag = host.tensor(step.flag)
        queue.append(Await(step=step, flag=flag, takes_room=False, **common))
    else:
        queue.append(_transfer(host, step, common))


def _transfer(host: Host, step: Any, common: dict[str, Any]) -> Transfer:
    src, rank = getattr(step, "src", None), host.rank
    return Transfer(
        step=step,
        dst=host.tensor(step.dst),
        src=None if src is None else host.tensor(src),
        takes_room=isinstance(step, Copy) and _owner(step.dst, rank) == _owner(step.src, rank),
        **common,
    )


def _tensors(launch: Launch, parameters: Set[str]) -> set[str]:
    """Return the names of the plan's tensors that are arguments for these parameters."""
    arguments = launch.arguments
    return {arguments[name].parameter.name for name in parameters & arguments.keys()}


def _owner(region: Region, rank: int) -> int:
    return rank if region.rank is None else region.rank
