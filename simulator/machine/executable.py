"""A plan and its programs, compiled for simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.errors import TileWeaveError
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
    name_of_stream,
)
from ...runtime.plans.sync_push import implicit_name
from ...runtime.plans.traced_plan import TracedPlan
from ..frontend.program import Program
from ..inputs.arguments import check_blocks
from ..memory.order import Layout
from ..memory.threads import cut, finer, names_of
from ..report.errors import SimulationError
from .machine import Machine
from .streams import Await, Event, Record, Transfer, WaitEvent
from .streams import Launch as KernelLaunch


@dataclass(frozen=True)
class Call:
    """A call of the plan on one rank: its steps, each with its kernel launches."""

    epoch: int
    steps: list[tuple[Step, list[tuple]]]


class Executable:
    """A plan compiled for ``world_size`` ranks. A ``T.prim_func`` is a plan of one launch.

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
            raise TileWeaveError(f"simulate: {what!r}; expected a T.prim_func or a tw.plan")
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
        """Implicit parameters of each kernel, with their names in steps, by ``id`` of the
        ``T.prim_func``."""
        return {
            key: [(implicit_name(func, h.name), h) for h in program.implicit]
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
        if self._group_of is None:
            self._group_of = cut({0, 1}.union(*(p.cuts for p in self.programs)))
        if parts is not None:
            wide = np.full(len(self._group_of), -1)
            wide[: len(parts)] = parts
            self._group_of = finer(self._group_of, wide)
        for program in self.programs:
            program.divide(self._group_of)
        return names_of(self._group_of)

    def layout(self, calls: Sequence[Sequence[Call]]) -> Layout:
        """Return the numbering of the agents of these calls.

        Raises:
            TileWeaveError: their clocks would not fit into memory.
        """
        blocks: dict[str | None, int] = {None: 0}
        for step, launches in (s for rank in calls for call in rank for s in call.steps):
            most = max((_blocks(extents) for _, _, extents in launches), default=0)
            blocks[step.stream] = max(blocks.get(step.stream, 0), most)
        thread_groups = max((p.thread_groups for p in self.programs), default=1)
        launches = max((sum(len(call.steps) for call in rank) for rank in calls), default=0)
        check_blocks(sum(blocks.values()), thread_groups, launches, self.world_size)
        mbarriers = max((p.mbarriers for p in self.programs), default=0)
        return Layout(self.world_size, list(blocks.items()), thread_groups, mbarriers)

    def enqueue(self, machine: Machine, rank: int, calls: Sequence[Call]) -> None:
        """Add the streams of a rank to ``machine``, with all that its host enqueues in them."""
        queues: dict[str | None, list[Any]] = {name: [] for name in machine.layout.first}
        enqueue_index = 0
        for call in calls:
            for step, launches in call.steps:
                enqueue_index += 1
                if isinstance(step, WaitStream):
                    event = Event(name_of_stream(step.other))
                    queues[step.other].append(Record(event, call.epoch))
                    queues[step.stream].append(WaitEvent(event, call.epoch, step.loc))
                    continue
                of = f" of {step.name}" if isinstance(step, Launch) else ""
                common: dict[str, Any] = {
                    "epoch": call.epoch, "enqueue_index": enqueue_index, "loc": step.loc,
                    "title": f"{step.op}{of} (step {step.number})",
                }  # fmt: skip
                if isinstance(step, Launch):
                    tensors = {
                        name: machine.named[value.parameter.name][rank]
                        for name, value in step.arguments.items()
                        if isinstance(value, Region)
                    }
                    implicit = machine.implicit.get(id(step.program), {})
                    tensors |= {name: of_ranks[rank] for name, of_ranks in implicit.items()}
                    queues[step.stream] += [
                        KernelLaunch(kernel=k, env=env, extents=extents, tensors=tensors, **common)
                        for k, env, extents in launches
                    ]
                    continue
                make = self._await if isinstance(step, WaitValue) else self._transfer
                queues[step.stream].append(make(machine, step, rank, common))
        for name, items in queues.items():
            machine.add_stream(rank, name, items)

    def _transfer(self, machine: Machine, step: Any, rank: int, common: dict) -> Transfer:
        dst, src = step.dst, getattr(step, "src", None)
        return Transfer(
            step=step,
            dst=machine.named[dst.parameter.name][rank],
            src=None if src is None else machine.named[src.parameter.name][rank],
            takes_room=isinstance(step, Copy) and _owner(step.dst, rank) == _owner(step.src, rank),
            **common,
        )

    def _await(self, machine: Machine, step: Any, rank: int, common: dict) -> Await:
        flag = machine.named[step.flag.parameter.name][rank]
        return Await(step=step, flag=flag, takes_room=False, **common)

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


def _owner(region: Region, rank: int) -> int:
    return rank if region.rank is None else region.rank


def _blocks(extents: tuple[int, ...]) -> int:
    count = 1
    for extent in extents:
        count *= extent
    return count
