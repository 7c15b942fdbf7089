"""Case: a plan, its inputs and its calls, which each schedule runs on a machine of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..builtins.errors import TileWeaveError
from ..passes.ir.implicit import Implicit
from ..runtime.plans.parameters import Parameter, dynamic_extents, shapes_of
from ..runtime.plans.steps import WaitStream
from .inputs.arguments import check_blocks, check_tensors, scalars_at
from .inputs.inputs import check_aliases
from .machine.executable import Executable
from .machine.host import Host
from .machine.machine import Machine
from .machine.streams import block_names, sampled
from .memory.memory import Tensor
from .memory.order import Layout
from .memory.segments import Segments
from .memory.threads import cut, finer, names_of
from .memory.values import numpy_dtype
from .report.errors import SimulationError


class Case:
    """Successive calls of a plan on all ranks, with their inputs, which each schedule runs.

    Attributes:
        shapes: shapes of all tensors, one dict per rank, of the rank's own part.
        written: names of the tensors that the calls write.
        nan: whether a statement that makes a NaN or an infinity is a fault.
        blocks: number of blocks of a launch that run; None: all.
        clipped: guarded accesses out of bounds of the schedules so far, by tensor and line.
    """

    def __init__(
        self,
        executable: Executable,
        inputs: Sequence[Mapping[str, Any]],
        epochs: int,
        nan: bool = False,
        blocks: int | None = None,
    ) -> None:
        parameters = executable.parameters
        names = {p.name for p in parameters if p.shape is not None}
        dynamic = dynamic_extents(parameters)
        self.executable, self.nan, self.blocks = executable, nan, blocks
        self.clipped: dict[tuple[str, str], str] = {}
        self.aliases = {n: v for n, v in inputs[0].items() if isinstance(v, str)}
        """Multicast parameters, with the symmetric tensor at their address."""
        self.inputs = inputs = [
            {n: v for n, v in values.items() if n not in self.aliases} for values in inputs
        ]
        self.shapes = [
            shapes_of(
                parameters, {n: np.shape(v) for n, v in values.items() if n in names}, "simulate",
                {n: v for n, v in values.items() if n in dynamic},
            )
            for values in inputs
        ]  # fmt: skip
        check_tensors(parameters, self.shapes)
        scalars = [{n: v for n, v in i.items() if n not in names | dynamic.keys()} for i in inputs]
        self.calls = [
            [
                executable.call(rank, e, shapes, scalars_at(e, values, parameters))
                for e in range(epochs)
            ]
            for rank, (shapes, values) in enumerate(zip(self.shapes, scalars, strict=True))
        ]
        calls = [call for calls in self.calls for call in calls]
        self.written: set[str] = set().union(*(call.written for call in calls))
        self.written |= {self.aliases[name] for name in self.written & self.aliases.keys()}
        self.multicasts: set[str] = set().union(*(call.multicasts for call in calls))
        check_aliases(self.aliases, self.multicasts, self.shapes[0])
        if blocks is not None:
            self._require_separate_blocks()
        self.divide()

    def divide(self, parts: np.ndarray | None = None) -> None:
        """Divide the threads of all blocks into the same thread groups, which divide earlier ones.

        Args:
            parts: numbers of sets of threads that act separately.
        """
        programs, group_of = self.executable.programs, self.executable.group_of
        if group_of is None:
            group_of = cut({0, 1}.union(*(p.cuts for p in programs)))
        if parts is not None:
            wide = np.full(len(group_of), -1)
            wide[: len(parts)] = parts
            group_of = finer(group_of, wide)
        for program in programs:
            program.divide(group_of)
        self.executable.group_of, self.thread_names = group_of, names_of(group_of)

    def machine(self, seed: int, resident_blocks: int, kind: type[Machine] = Machine) -> Machine:
        """Return a machine for one schedule."""
        world_size = self.executable.world_size
        machine = kind(world_size, self._layout(), seed, resident_blocks, self.thread_names)
        machine.nan, machine.most_blocks, machine.clipped = self.nan, self.blocks, self.clipped
        for p in self.executable.parameters:
            if p.shape is not None and p.name not in self.aliases:
                machine.tensors[p.name] = self._tensors(p, machine)
        for name, target in self.aliases.items():
            machine.tensors[name] = machine.tensors[target]
        machine.named |= machine.tensors
        for kernel, implicit in self.executable.implicit.items():
            inferred = any(not p.scratch for _, p in implicit)
            implicit_tensors = [
                (name, p.name, _implicit_tensors(p, machine, inferred)) for name, p in implicit
            ]
            machine.implicit[kernel] = {own: tensors for _, own, tensors in implicit_tensors}
            machine.named |= {name: tensors for name, _, tensors in implicit_tensors}
        for rank, calls in enumerate(self.calls):
            host = Host(machine, rank)
            for call in calls:
                host.enqueue(call)
            host.close()
        return machine

    def _layout(self) -> Layout:
        """Return the numbering of the agents of the calls.

        Raises:
            TileWeaveError: their clocks would not fit into memory.
        """
        streams: dict[str | None, int] = {None: 0}
        grids: dict[str | None, set[tuple[int, ...]]] = defaultdict(set)
        programs, world_size = self.executable.programs, self.executable.world_size
        for step, launches in (s for calls in self.calls for call in calls for s in call.steps):
            grids[step.stream].update(extents for *_, extents in launches)
            blocks = max((len(sampled(e, self.blocks)) for *_, e in launches), default=0)
            streams[step.stream] = max(streams.get(step.stream, 0), blocks)
            if isinstance(step, WaitStream):
                streams.setdefault(step.other, 0)
        launched = max(sum(len(call.steps) for call in calls) for calls in self.calls)
        thread_groups = max((p.thread_groups for p in programs), default=1)
        check_blocks(sum(streams.values()), thread_groups, launched, world_size)
        mbarriers = max((p.mbarriers for p in programs), default=0)
        layout = Layout(world_size, streams, thread_groups, mbarriers)
        for stream, extents in grids.items():
            if len(extents) == 1:  # otherwise a block has several coordinates
                layout.name_blocks(stream, block_names(*extents, self.blocks))
        return layout

    def _require_separate_blocks(self) -> None:
        """Refuse to run some of the blocks only, if what they do may depend on the others."""
        programs = self.executable.programs
        reasons = [
            (self.executable.world_size > 1, "more than one rank"),
            (sum(len(program.kernels) for program in programs) != 1, "another number of kernels"),
            *((bool(program.exchanges), program.exchanges) for program in programs),
            *((program.has_pointers, "tensors at addresses") for program in programs),
        ]
        reason = next((text for holds, text in reasons if holds), None)
        if reason is not None:
            raise TileWeaveError(
                f"simulate: blocks={self.blocks} of {self.executable.plan.name}, with {reason}; "
                "expected one kernel on one rank, whose blocks do not communicate"
            )

    def explained(self, error: SimulationError, machine: Machine) -> SimulationError:
        """Return a fault. One of uninitialized memory names the parameters without an input: those
        that nothing writes, or else those that were read before a write."""
        if error.kind != "poison":
            return error
        supplied = set.intersection(*(set(values) for values in self.inputs)) | self.aliases.keys()
        missing = [
            p.name
            for p in self.executable.parameters
            if p.shape is not None and p.name not in supplied
        ]
        named = [name for name in missing if name not in self.written]
        if not named:
            events = machine.memory.events.what
            read = {t.name for _, _, t, key, _, _ in events if t is not None and t.is_blank(key)}
            named = [name for name in missing if name in read]
        if not named:
            return error
        return error.noted(
            f"no input for {', '.join(named)}; expected an array in inputs= of each "
            "rank, or a write before the read"
        )

    def _tensors(self, p: Parameter, machine: Machine) -> list[Tensor]:
        """Return the tensor of each rank, with its input. A multicast address has all copies."""
        p = replace(p, symmetric=p.symmetric or p.name in self.multicasts)
        dtype, world_size = numpy_dtype(p.dtype), machine.world_size
        if p.symmetric:
            self._require_equal(p)

        def tensor(rank: int) -> Tensor:
            shape = p.across(self.shapes[rank][p.name], world_size)
            return Tensor(machine.memory, p.name, shape, dtype, written=p.name in self.written)

        tensors = _of_ranks(world_size, p.symmetric, tensor)
        for rank, values in enumerate(self.inputs):
            if p.name not in values:
                continue
            array, shape = values[p.name], self.shapes[rank][p.name]
            if array.shape != shape or array.dtype != dtype:
                raise TileWeaveError(
                    f"simulate: {p.name} of rank {rank} is {array.dtype} {array.shape}; expected "
                    f"{dtype} {shape}"
                )
            tensors[rank].give(tensors[rank].part(rank), array)
        return tensors

    def _require_equal(self, p: Parameter) -> None:
        """Refuse a symmetric tensor whose parts differ in shape."""
        first = self.shapes[0][p.name]
        for rank, shapes in enumerate(self.shapes):
            if shapes[p.name] != first:
                raise TileWeaveError(
                    f"simulate: {p.name} of rank {rank} has shape {shapes[p.name]}; expected "
                    f"{first} as of rank 0, since it is symmetric"
                )


def _implicit_tensors(parameter: Implicit, machine: Machine, inferred: bool) -> list[Tensor]:
    """Return an implicit tensor of all ranks, zeroed as on a GPU. Scratch memory of inferred
    programs and of ``T.alloc_global`` stays poison, because it must not be read before a launch has
    written it; but words with flags may be polled before."""
    dtype, world_size = numpy_dtype(parameter.dtype), machine.world_size

    def tensor(rank: int) -> Tensor:
        shape = (world_size, *parameter.shape) if parameter.symmetric else parameter.shape
        tensor = Tensor(machine.memory, parameter.name, shape, dtype, written=True)
        tensor.inserted = not parameter.scratch
        is_scratch = parameter.scratch and (inferred or not parameter.symmetric)
        if parameter.flagged or not is_scratch:
            tensor.give((Ellipsis,), np.zeros(shape, dtype))
        if parameter.segments:
            tensor.segments = Segments(tensor, parameter.segments, parameter.segment)
        return tensor

    return _of_ranks(world_size, parameter.symmetric, tensor)


def _of_ranks(world_size: int, symmetric: bool, make: Callable[[int], Tensor]) -> list[Tensor]:
    """Return the tensor of each rank, one for all ranks if ``symmetric``."""
    if not symmetric:
        return [make(rank) for rank in range(world_size)]
    tensor = make(0)
    tensor.ranks = tuple(range(world_size))
    return [tensor] * world_size
