"""``tw.simulate``: run a program of W ranks on the CPU, in many schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from ..builtins.errors import TileWeaveError
from ..passes.ir.implicit import Implicit
from ..runtime.kernel.configured import configured
from ..runtime.plans.parameters import Parameter, dynamic_extents, shapes_of
from ..runtime.trace.render import writer
from ..runtime.trace.trace import Trace
from .device.program import ARCHITECTURES, DeviceProgram
from .explore.exhaustive import MOST_INTERLEAVINGS, Exploration, Exploring
from .inputs.arguments import (
    check_exhaustive,
    check_file,
    check_jobs,
    check_numbers,
    check_tensors,
    scalars_at,
)
from .inputs.inputs import Inputs, check_aliases, checked_inputs
from .machine.executable import Executable
from .machine.machine import Machine
from .memory.memory import Tensor
from .memory.values import numpy_dtype
from .report.errors import SimulationError, SimulationWarning
from .report.progress import Progress
from .schedules import Schedules, default_jobs, write_fault

Scalar = float | int | Callable[[int], Any]
Level = Literal["tile", "device"]
LEVELS = ("tile", "device")


@overload
def simulate(
    program: Any, world_size: int, inputs: Inputs | None = ..., schedules: int = ...,
    seed: int = ..., epochs: int = ..., resident_blocks: int | None = ..., progress: bool = ...,
    timeline: str | Path | None = ..., pass_configs: Mapping[str, Any] | None = ...,
    most_seconds: float | None = ..., level: Level = ..., arch: str = ...,
    exhaustive: Literal[False] = ..., max_interleavings: int = ..., jobs: int | None = ...,
) -> list[dict[str, np.ndarray]]: ...  # fmt: skip


@overload
def simulate(
    program: Any, world_size: int, inputs: Inputs | None = ..., schedules: int = ...,
    seed: int = ..., epochs: int = ..., resident_blocks: int | None = ..., progress: bool = ...,
    timeline: str | Path | None = ..., pass_configs: Mapping[str, Any] | None = ...,
    most_seconds: float | None = ..., level: Level = ..., arch: str = ...,
    *, exhaustive: Literal[True], max_interleavings: int = ..., jobs: int | None = ...,
) -> Exploration: ...  # fmt: skip


def simulate(
    program: Any,
    world_size: int,
    inputs: Inputs | None = None,
    schedules: int = 1,
    seed: int = 0,
    epochs: int = 3,
    resident_blocks: int | None = None,
    progress: bool = False,
    timeline: str | Path | None = None,
    pass_configs: Mapping[str, Any] | None = None,
    most_seconds: float | None = None,
    level: Level = "tile",
    arch: str = "sm_90a",
    exhaustive: bool = False,
    max_interleavings: int = MOST_INTERLEAVINGS,
    jobs: int | None = None,
) -> list[dict[str, np.ndarray]] | Exploration:
    """Run ``program`` on ``world_size`` simulated ranks and return every rank's tensors.

    Memory is weakly ordered and blocks interleave at random. Unordered conflicting accesses are a
    fault even if all values are right.

    Args:
        program: a ``@T.prim_func``, or a ``@tw.plan``.
        inputs: one dict per rank, parameter name -> NumPy array (ml_dtypes for bfloat16 and fp8).
            An array is the rank's own part of a symmetric tensor. A scalar is a number or a
            callable epoch -> number. Other tensors are poison until they are written. A multicast
            address is the copy of each rank, or the name of a symmetric tensor.
        schedules, seed: number of interleavings, and the seed of the first; others follow it.
        epochs: number of calls of the program on each rank, back to back.
        resident_blocks: blocks of a rank that fit on its GPU; None: as the compiler assumes.
        progress: print an estimate to stderr if it takes long; on a terminal, also a bar.
        timeline: file for the schedule that fails, else for the last one: a trace for Perfetto
            (``.json``), or its drawing (``.html``, ``.svg`` or, with matplotlib, ``.png``).
        pass_configs: as for ``tw.compile``; for a plan, they apply to each of its kernels.
        most_seconds, level, arch: longest estimated time; see ``executable_at``.
        exhaustive: explore all interleavings of a small program, instead of random schedules.
            ``progress``, ``most_seconds`` and ``jobs`` have no effect then.
        max_interleavings: number of interleavings after which the exploration ends.
        jobs: number of processes that share the schedules after the first; the result does not
            depend on it. None: the number of usable cores, if the schedules take longer than a
            second and this process has no other threads, else 1.

    Returns:
        One dict per rank, parameter name -> array, after the last epoch of the last schedule; or
        an ``Exploration``, if ``exhaustive``.

    Raises:
        SimulationError: a fault; its report names ranks, blocks, lines and the seed.
        SimulationWarning: (a warning) flags are signalled but never waited for or read.
        TileWeaveError: illegal arguments, or the timeline cannot be written.
    """
    check_numbers("simulate", world_size, schedules, seed, epochs, resident_blocks)
    check_jobs(jobs)
    if exhaustive:
        check_exhaustive(schedules, seed, level, max_interleavings)
    write = _checked_writer(timeline)
    if not isinstance(program, Executable):
        program = configured("simulate", program, pass_configs)
        program = executable_at(program, world_size, level, arch)
    case = Case(program, checked_inputs(program, inputs), epochs)
    blocks = program.resident_blocks if resident_blocks is None else resident_blocks
    if exhaustive:
        return _explore(Exploring(case, blocks, max_interleavings, write is not None), write)
    most_jobs = jobs or default_jobs()
    bar = Progress(program.plan.name, schedules, progress, most_seconds, jobs=most_jobs)
    seeds = range(seed, seed + schedules)
    last = Schedules(case, seeds, blocks, bar, write, jobs).run()
    _warn(program.plan.name, last.signals)
    if write is not None and last.machine is not None:
        write(last.machine.trace(program.plan.name, seeds[-1]))
    return last.outputs


def _explore(exploring: Exploring, write: Callable[[Trace], None] | None) -> Exploration:
    """Explore all interleavings. ``write`` writes the trace of a fault, else of the last one."""
    try:
        result = exploring.run()
    except SimulationError as error:
        if write is not None:
            write_fault(write, exploring.machine, exploring.name, error, stacklevel=4)
        raise
    _warn(exploring.name, exploring.unread)
    if write is not None:
        write(exploring.machine.trace(exploring.name, None))
    return result


def _warn(name: str, unread: Mapping[tuple, str]) -> None:
    """Warn of signals that are never waited for or read."""
    for text in unread.values():
        warnings.warn(f"{name}: {text}", SimulationWarning, stacklevel=3)


def executable_at(
    program: Any, world_size: int, level: str = "tile", arch: str = "sm_90a"
) -> Executable:
    """Return ``program`` compiled for the simulation of a level.

    Args:
        level: ``tile``, the program itself; or ``device``, the functions of single threads that
            TileLang's pipeline and the device passes lower it to.
        arch: ``sm_80`` or ``sm_90a``, for ``device``.

    Raises:
        TileWeaveError: the level or the architecture is unknown.
    """
    if level not in LEVELS:
        raise TileWeaveError(f"simulate: level={level!r}; expected 'tile' or 'device'")
    if level == "tile":
        return Executable(program, world_size)
    if arch not in ARCHITECTURES:
        legal = " or ".join(map(repr, ARCHITECTURES))
        raise TileWeaveError(f"simulate: arch={arch!r}; expected {legal} with level='device'")
    return Executable(program, world_size, partial(DeviceProgram, arch=arch))


def _checked_writer(timeline: str | Path | None) -> Callable[[Trace], None] | None:
    """Return the function that writes traces to ``timeline``, which must be writable."""
    if timeline is None:
        return None
    check_file(timeline)
    return writer(timeline)


class Case:
    """Successive calls of a plan on all ranks, with their inputs, which each schedule runs.

    Attributes:
        shapes: shapes of all tensors, one dict per rank, of the rank's own part.
        written: names of the tensors that the calls write.
    """

    def __init__(
        self, executable: Executable, inputs: Sequence[Mapping[str, Any]], epochs: int
    ) -> None:
        parameters = executable.parameters
        names = {p.name for p in parameters if p.shape is not None}
        dynamic = dynamic_extents(parameters)
        self.executable = executable
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
        self.written = executable.written(calls)
        self.written |= {self.aliases[name] for name in self.written & self.aliases.keys()}
        self.multicasts = executable.multicasts(calls)
        check_aliases(self.aliases, self.multicasts, self.shapes[0])
        self.thread_names = executable.divide()

    def machine(self, seed: int, resident_blocks: int, kind: type[Machine] = Machine) -> Machine:
        """Return a machine for one schedule."""
        world_size = self.executable.world_size
        layout = self.executable.layout(self.calls)
        machine = kind(world_size, layout, seed, resident_blocks, self.thread_names)
        for p in self.executable.parameters:
            if p.shape is not None and p.name not in self.aliases:
                machine.tensors[p.name] = self._tensors(p, machine)
        for name, target in self.aliases.items():
            machine.tensors[name] = machine.tensors[target]
        machine.named |= machine.tensors
        for kernel, implicit in self.executable.implicit.items():
            inferred = any(not h.scratch for _, h in implicit)
            implicit_tensors = [
                (name, h.name, self._implicit_tensors(h, machine, inferred)) for name, h in implicit
            ]
            machine.implicit[kernel] = {own: tensors for _, own, tensors in implicit_tensors}
            machine.named |= {name: tensors for name, _, tensors in implicit_tensors}
        for rank, calls in enumerate(self.calls):
            self.executable.enqueue(machine, rank, calls)
        return machine

    def _implicit_tensors(self, h: Implicit, machine: Machine, inferred: bool) -> list[Tensor]:
        """Return an implicit tensor of all ranks, zeroed as on a GPU. Scratch memory of inferred
        programs stays poison, because they must not read it before a launch has written it."""
        world_size = self.executable.world_size
        shape, dtype = (world_size, *h.shape) if h.symmetric else h.shape, numpy_dtype(h.dtype)
        count = 1 if h.symmetric else world_size
        tensors = [Tensor(machine.memory, h.name, shape, dtype, written=True) for _ in range(count)]
        for tensor in tensors:
            tensor.symmetric = h.symmetric
            if not (h.scratch and inferred):
                tensor.give((Ellipsis,), np.zeros(shape, dtype))
        return tensors * (world_size // count)

    def _tensors(self, p: Parameter, machine: Machine) -> list[Tensor]:
        """Return the tensor of each rank, with its input. A multicast address has all copies."""
        p = replace(p, symmetric=p.symmetric or p.name in self.multicasts)
        world_size, dtype = self.executable.world_size, numpy_dtype(p.dtype)

        def tensor(rank: int) -> Tensor:
            shape = p.across(self.shapes[rank][p.name], world_size)
            return Tensor(machine.memory, p.name, shape, dtype, written=p.name in self.written)

        if p.symmetric:
            for rank, shapes in enumerate(self.shapes):
                if shapes[p.name] != self.shapes[0][p.name]:
                    raise TileWeaveError(
                        f"simulate: {p.name} of rank {rank} has shape {shapes[p.name]}; expected "
                        f"{self.shapes[0][p.name]} as of rank 0, since it is symmetric"
                    )
            tensors = [tensor(0)] * world_size
            tensors[0].symmetric = True
        else:
            tensors = [tensor(rank) for rank in range(world_size)]
        for rank, values in enumerate(self.inputs):
            if p.name not in values:
                continue
            array, shape = values[p.name], self.shapes[rank][p.name]
            if array.shape != shape or array.dtype != dtype:
                raise TileWeaveError(
                    f"simulate: {p.name} of rank {rank} is {array.dtype} {array.shape}; expected "
                    f"{dtype} {shape}"
                )
            tensors[rank].give((rank,) if p.symmetric else (Ellipsis,), array)
        return tensors
