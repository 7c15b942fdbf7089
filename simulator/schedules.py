"""Schedules of one case: in this process, or shared out to processes that it forks.

A process sends back only what schedules without a fault leave. Everything else happens in this
process, as if it had run all schedules: it repeats a schedule that ended in another way, from a
fault or an exception to a warning, and so raises, prints and writes what that schedule does.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..builtins.errors import TileWeaveError
from ..runtime.trace.trace import Trace
from .inputs.arguments import free_memory
from .machine.machine import Machine, outputs_of
from .memory.arrivals import refuse_surplus, unconsumed
from .memory.threads import ThreadGroupSplit
from .report.errors import SimulationError, SimulationWarning
from .report.progress import Progress
from .report.timeline import Recorder

if TYPE_CHECKING:
    from .case import Case

_WORTH = 1.0
"""Seconds of estimated work from which it is shared out, unless the caller chooses the number of
processes."""


@dataclass(frozen=True)
class ScheduleResult:
    """Results of a schedule without a fault."""

    signals: dict[tuple, str]
    """Signals that it neither waits for nor reads, each with a warning."""
    outputs: list[dict[str, np.ndarray]] = field(default_factory=list)
    """Tensors of each rank after the last schedule."""
    machine: Machine | None = None
    """Machine of the last schedule, if this process ran it."""
    printed: str = ""
    """Lines that the program printed in another process."""

    def after(self, earlier: ScheduleResult) -> ScheduleResult:
        """Return this schedule with the signals that neither it nor ``earlier`` ones consume."""
        signals = {k: text for k, text in earlier.signals.items() if k in self.signals}
        return replace(self, signals=signals)


class Schedules:
    """The schedules of one call of ``tw.simulate``.

    Args:
        write: writes the trace of the schedule with a fault. None: nothing is recorded.
        jobs: number of processes; None: as many as are useful.
    """

    def __init__(
        self, case: Case, seeds: range, resident_blocks: int, bar: Progress,
        write: Callable[[Trace], None] | None, jobs: int | None,
    ) -> None:  # fmt: skip
        self._case, self._seeds, self._blocks = case, seeds, resident_blocks
        self._bar, self._write, self._jobs = bar, write, jobs
        self._seconds = 0.0
        """Duration of the last schedule."""

    def run(self) -> ScheduleResult:
        """Return the last schedule, with the signals that no schedule waits for or reads.

        Raises:
            SimulationError: the fault of the first schedule that has one.
        """
        last, seeds = self._here(self._seeds[0]), self._seeds[1:]
        while seeds:
            with closing(self._elsewhere(seeds)) as elsewhere:
                for ended in elsewhere:
                    print(ended.printed, end="")
                    last, seeds = ended.after(last), seeds[1:]
                    self._bar.ended()
            if seeds:
                last, seeds = self._here(seeds[0]).after(last), seeds[1:]
        return last

    def _here(self, seed: int) -> ScheduleResult:
        """Run one schedule in this process."""
        start = time.monotonic()
        machine = run_schedule(self._case, seed, self._blocks, self._bar, self._write)
        self._seconds = time.monotonic() - start
        signals = unconsumed(machine.every_tensor())
        if seed != self._seeds[-1]:
            return ScheduleResult(signals)
        return ScheduleResult(signals, outputs_of(machine), machine)

    def _elsewhere(self, seeds: range) -> Iterator[ScheduleResult]:
        """Run schedules in forked processes, and yield them in their order, up to the first one
        that this process must run itself."""
        if self._write is not None:
            seeds = seeds[:-1]  # the trace of the last one is written
        n = self._processes(len(seeds))
        with _forked(self._work, [seeds[first::n] for first in range(n)]) as pipes:
            for number in range(len(seeds) if n else 0):
                try:
                    ended = pipes[number % n].recv()
                except EOFError:  # the process was killed
                    return
                if ended is None:
                    return
                yield ended

    def _processes(self, schedules: int) -> int:
        """Return the number of processes that share the next schedules, or 0."""
        jobs = self._jobs
        if jobs is None:
            size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            jobs = min(default_jobs(), free_memory() // size)
            if schedules * self._seconds < _WORTH:
                jobs = 1
        jobs = min(jobs, schedules)
        return 0 if jobs == 1 or multiprocessing.current_process().daemon else jobs

    def _work(self, seeds: range, pipe: Any) -> None:
        """Run schedules in a forked process, and send each, or None for one to repeat."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all processes
        gc.freeze()  # a collection would copy all pages
        parent, names = os.getppid(), self._case.thread_names
        self._bar, self._write = Progress(self._case.executable.plan.name, len(seeds), False), None
        for seed in seeds:
            try:
                with (
                    warnings.catch_warnings(record=True) as warned,
                    redirect_stdout(io.StringIO()) as printed,
                ):
                    ended = self._here(seed)
                # Finer thread groups apply to all later schedules.
                is_usual = not warned and self._case.thread_names is names
                ended = replace(ended, machine=None, printed=printed.getvalue())
                pipe.send(ended if is_usual else None)
            except Exception:
                is_usual = False
                pipe.send(None)
            if not is_usual or os.getppid() != parent:
                return


@contextmanager
def _forked(work: Callable[[range, Any], None], shares: Sequence[range]) -> Iterator[list[Any]]:
    """Fork a process for each share. Yield the ends of their pipes; kill them at the end.

    The processes inherit the program, so nothing of it is pickled. They use neither TileLang's nor
    torch's threads, which a fork does not copy.
    """
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    try:
        for share in shares:
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(share, send), daemon=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
                process.start()
            processes.append(process)
            pipes.append(receive)
            send.close()
        yield pipes
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def default_jobs() -> int:
    """Return the number of usable cores; 1 in a process with threads, whose locks a fork copies."""
    if threading.active_count() > 1 or not hasattr(os, "sched_getaffinity"):
        return 1
    return len(os.sched_getaffinity(0))


def run_schedule(
    case: Case,
    seed: int,
    resident_blocks: int,
    bar: Progress,
    write: Callable[[Trace], None] | None = None,
) -> Machine:
    """Run one schedule and return its machine. ``write`` writes the trace of a fault."""
    kind = Machine if write is None else Recorder
    machine = case.machine(seed, resident_blocks, kind)
    try:
        while not _ends(machine, case, bar):
            machine = case.machine(seed, resident_blocks, kind)
        refuse_surplus(machine.every_tensor())
    except SimulationError as error:
        fault = case.explained(error, machine).in_schedule(seed)
        if write is not None:
            write_fault(write, machine, case.executable.plan.name, fault, stacklevel=7)
        raise fault from None
    return machine


def write_fault(
    write: Callable[[Trace], None], machine: Any, name: str, fault: SimulationError,
    stacklevel: int,
) -> None:  # fmt: skip
    """Write the trace of a fault. If that fails, warn: the fault is more important."""
    try:
        write(machine.trace(name, fault.seed, fault))
    except TileWeaveError as error:
        warnings.warn(str(error), SimulationWarning, stacklevel=stacklevel)


def _ends(machine: Machine, case: Case, bar: Progress) -> bool:
    """Run one schedule. Return False if it must restart with finer thread groups."""
    try:
        with bar.schedule(machine):
            machine.run()
    except ThreadGroupSplit as divided:
        case.divide(divided.group_of)
        machine.printed.clear()
        return False
    finally:
        for text in machine.printed:
            print(text)
    return True
