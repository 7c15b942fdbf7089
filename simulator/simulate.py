"""``tw.simulate``: run a program of W ranks on the CPU, in many schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from ..builtins.errors import TileWeaveError, brief_errors
from ..runtime.kernel.configured import configured, program_of
from ..runtime.trace.render import writer
from ..runtime.trace.trace import Trace
from .case import Case
from .device.program import ARCHITECTURES, DeviceProgram
from .explore.exhaustive import MAX_INTERLEAVINGS, Exploration, Exploring
from .frontend.debugger import Debugger
from .frontend.program import OPERATIONS, Program
from .inputs.arguments import check_count, check_exhaustive, check_file, check_numbers
from .inputs.inputs import Inputs, checked_inputs
from .machine.executable import Executable
from .report.errors import SimulationError, SimulationWarning
from .report.progress import Progress
from .schedules import Schedules, default_jobs, write_fault

Scalar = float | int | Callable[[int], Any]
Level = Literal["tile", "device"]
LEVELS = ("tile", "device")


@overload
def simulate(
    program: Any, world_size: int, inputs: Inputs | None = ...,
    schedules: int = ..., seed: int = ..., epochs: int = ..., resident_blocks: int | None = ...,
    progress: bool = ..., timeline: str | Path | None = ...,
    pass_configs: Mapping[str, Any] | None = ...,
    most_seconds: float | None = ..., level: Level = ..., arch: str = ...,
    exhaustive: Literal[False] = ..., max_interleavings: int = ..., jobs: int | None = ...,
    sizes: Mapping[str, Any] | None = ..., nan: bool = ...,
    blocks: int | None = ..., debugger: Debugger | None = ...,
) -> list[dict[str, np.ndarray]]: ...  # fmt: skip


@overload
def simulate(
    program: Any, world_size: int, inputs: Inputs | None = ...,
    schedules: int = ..., seed: int = ..., epochs: int = ..., resident_blocks: int | None = ...,
    progress: bool = ..., timeline: str | Path | None = ...,
    pass_configs: Mapping[str, Any] | None = ...,
    most_seconds: float | None = ..., level: Level = ..., arch: str = ...,
    *, exhaustive: Literal[True], max_interleavings: int = ..., jobs: int | None = ...,
    sizes: Mapping[str, Any] | None = ..., nan: bool = ...,
    blocks: int | None = ..., debugger: Debugger | None = ...,
) -> Exploration: ...  # fmt: skip


@brief_errors
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
    max_interleavings: int = MAX_INTERLEAVINGS,
    jobs: int | None = None,
    sizes: Mapping[str, Any] | None = None,
    nan: bool = False,
    blocks: int | None = None,
    debugger: Debugger | None = None,
) -> list[dict[str, np.ndarray]] | Exploration:
    """Run ``program`` on ``world_size`` simulated ranks and return every rank's tensors.

    Memory is weakly ordered and blocks interleave at random. Unordered conflicting accesses are a
    fault even if all values are right.

    Args:
        program: a ``@T.prim_func``, a ``@tw.plan``, a kernel of TileLang, or a function of
            ``tilelang.jit``.
        world_size: number of ranks.
        inputs: one dict per rank, parameter name -> NumPy array (ml_dtypes for bfloat16 and fp8).
            An array is the rank's own part of a symmetric tensor. A scalar is a number or a
            callable epoch -> number. Other tensors are poison until they are written. A multicast
            address is the copy of each rank, or the name of a symmetric tensor.
        schedules, seed: number of interleavings, and the seed of the first; others follow it.
        epochs: number of calls of the program on each rank, back to back.
        resident_blocks: blocks of a rank that fit on its GPU; None: as the compiler assumes.
        progress: print an estimate to stderr if it takes long; on a terminal, also a bar.
        timeline: file for the schedule that fails, else for the last one: a trace for Perfetto
            (``.json``), or a page that draws it (``.html``).
        pass_configs: as for ``tw.compile``; for a plan, they apply to each of its kernels.
        most_seconds, level, arch: longest estimated time; see ``executable_at``.
        exhaustive: explore all interleavings of a small program, instead of random schedules.
            ``progress``, ``most_seconds`` and ``jobs`` have no effect then.
        max_interleavings: number of interleavings after which the exploration ends.
        jobs: number of processes that share the schedules after the first; the result does not
            depend on it. None: the number of usable cores, if the schedules take longer than a
            second and this process has no other threads, else 1.
        sizes: arguments of a function of ``tilelang.jit``, without its tensors.
        nan: whether a fault is a statement that stores a NaN, none of whose operands is one; or an
            infinity, all of whose operands are finite.
        blocks: number of blocks of each launch that run, among them the first, the last and those
            at the corners of the grid; None: all. The others must not affect them.
        debugger: shows values of the run at the tile level. One process runs all schedules.

    Returns:
        One dict per rank, parameter name -> array, after the last epoch of the last schedule; or
        an ``Exploration``, if ``exhaustive``. With ``blocks``, those that the program writes are
        masked arrays, whose mask is true for elements that no block has written.

    Raises:
        SimulationError: a fault; its report names ranks, blocks, lines and the seed.
        SimulationWarning: (a warning) flags are signalled but never waited for or read; a guarded
            access is out of bounds, other than at the end of a tile; or a check of the compiler
            refuses a kernel for ``arch``.
        TileWeaveError: illegal arguments, or the timeline cannot be written.
    """
    check_numbers("simulate", world_size, schedules, seed, epochs, resident_blocks)
    check_count("simulate", "jobs", jobs)
    check_count("simulate", "blocks", blocks)
    if exhaustive:
        check_exhaustive(schedules, seed, level, max_interleavings)
    check_file(timeline)
    write = None if timeline is None else writer(timeline)
    if not isinstance(program, Executable):
        program = program_of("simulate", program, sizes)
        program = configured("simulate", program, pass_configs)
        program = executable_at(program, world_size, level, arch, debugger)
    case = Case(program, checked_inputs(program, inputs), epochs, nan, blocks)
    resident = program.resident_blocks if resident_blocks is None else resident_blocks
    if exhaustive:
        exploring = Exploring(case, resident, max_interleavings, write is not None)
        return _explore(exploring, program, arch, write)
    if debugger is not None or any(p.has_pointers for p in program.programs):
        jobs = 1
    most_jobs = jobs or default_jobs()
    bar = Progress(program.plan.name, schedules, progress, most_seconds, jobs=most_jobs)
    seeds = range(seed, seed + schedules)
    last = Schedules(case, seeds, resident, bar, write, jobs).run()
    if last.machine is not None:
        last.machine.pointed.write_back()
    texts = [*last.signals.values(), *case.clipped.values()]
    _warn(program, arch, [*texts, *_not_computed(last.outputs, blocks)])
    if write is not None and last.machine is not None:
        write(last.machine.trace(program.plan.name, seeds[-1]))
    return last.outputs


def _explore(
    exploring: Exploring, program: Executable, arch: str,
    write: Callable[[Trace], None] | None,
) -> Exploration:  # fmt: skip
    """Explore all interleavings. ``write`` writes the trace of a fault, else of the last one."""
    try:
        result = exploring.run()
    except SimulationError as error:
        if write is not None:
            write_fault(write, exploring.machine, exploring.name, error, stacklevel=5)
        raise
    _warn(program, arch, [*exploring.unread.values(), *exploring.case.clipped.values()])
    if write is not None:
        write(exploring.machine.trace(exploring.name, None))
    return result


def _not_computed(outputs: list[dict[str, np.ndarray]], blocks: int | None) -> Iterator[str]:
    """Yield how much of each output a part of the blocks has computed."""
    for name, array in outputs[0].items():
        if isinstance(array, np.ma.MaskedArray) and array.mask.any():
            yield f"{blocks} blocks compute {array.count()} of {array.size} elements of {name}"


def _warn(executable: Executable, arch: str, texts: Iterable[str]) -> None:
    """Warn of signals that are never waited for or read, of guarded accesses, of elements that are
    not computed, and of kernels that do not compile."""
    texts = list(texts)
    for program in executable.programs:
        error = program.refusal(arch)
        if error is not None:
            texts.append(refused(program.name, arch, error))
    for text in texts:
        warnings.warn(f"{executable.plan.name}: {text}", SimulationWarning, stacklevel=4)


def refused(name: str, arch: str, error: Any) -> str:
    """Return the warning that the compiler refuses a kernel that the simulator accepts."""
    return f"the compiler refuses {name} for {arch}: {error}"


def executable_at(
    program: Any, world_size: int, level: str = "tile", arch: str = "sm_90a",
    debugger: Debugger | None = None, stock: bool = False,
) -> Executable:  # fmt: skip
    """Return ``program`` compiled for the simulation of a level.

    Args:
        level: ``tile``, the program itself; or ``device``, the functions of single threads that
            TileLang's pipeline and the device passes lower it to.
        arch: ``sm_80`` or ``sm_90a``, for ``device``.
        debugger: for ``tile``, shows values of the run.
        stock: for ``device``, lower it as ``tilelang.jit`` does, instead of ``tw.compile``.

    Raises:
        TileWeaveError: the level or the architecture is unknown, or has no debugger.
    """
    if level not in LEVELS:
        raise TileWeaveError(f"simulate: level={level!r}; expected 'tile' or 'device'")
    if level == "device" and arch not in ARCHITECTURES:
        legal = " or ".join(map(repr, ARCHITECTURES))
        raise TileWeaveError(f"simulate: arch={arch!r}; expected {legal} with level='device'")
    if level == "device" and debugger is not None:
        raise TileWeaveError("simulate: a debugger with level='device'; expected level='tile'")
    operations = OPERATIONS if debugger is None else (*OPERATIONS, debugger)
    make = (
        partial(Program, operations=operations)
        if level == "tile"
        else partial(DeviceProgram, arch=arch, stock=stock)
    )
    return Executable(program, world_size, make)
