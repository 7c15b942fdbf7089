"""``tw.mutate``: mutation testing of the synchronization of a program."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from tqdm import tqdm
from tvm import tirx

from ...builtins.errors import TileWeaveError, brief_errors
from ...passes.ir.releases import upgrade_ir
from ...runtime.plans.steps import Step as HostStep
from ...runtime.plans.traced_plan import TracedPlan
from ..inputs.arguments import check_numbers
from ..machine.executable import Executable
from ..memory.values import equal_bits, is_float, nearly_equal
from ..report.errors import SimulationError, SimulationWarning
from ..report.progress import duration
from ..simulate import Level, executable_at, simulate
from .equivalent import PLAN_REASONS, Explanation, Explanations, level_key
from .host_steps import ChangedPlan, host_changes, host_operations
from .kernels import Change, DeviceKernel, Kernels, TileKernel

_SILENT = 5.0
"""Seconds before an estimate is made."""
Outputs = list[dict[str, np.ndarray]]
Verdict = Literal["killed", "explained", "survived", "wrong explanation"]


@dataclass(frozen=True)
class Mutant:
    """One change of one synchronization operation, and its verdict.

    Attributes:
        op: name of the operation in the program.
        change: ``drop``, ``sem=relaxed``, ``target+1`` and so on (``mutators.py``).
        file, line: location of the operation, or of the statement for which the compiler inserted
            it.
        verdict: ``killed`` (a fault, or different outputs), ``explained`` (it survived for a reason
            that a sidecar file or the tool gives), ``survived`` (without a reason) or ``wrong
            explanation`` (of a mutant that is killed, or that does not exist).
        why: the fault, the reason, or the difference.
        seed: seed of the schedule that killed it.
        flag: name of the tensor of its flag, or of the flag of the next operation that has one.
        function, statement: keys of an explanation for that line (``equivalent.py``).
    """

    op: str
    change: str
    file: str
    line: int
    verdict: Verdict
    why: str
    seed: int | None = None
    flag: str = ""
    function: str = ""
    statement: str = ""

    @property
    def name(self) -> str:
        return f"{self.op} {self.change}".strip()

    @property
    def is_accounted_for(self) -> bool:
        return self.verdict in ("killed", "explained")


@brief_errors
def mutate(
    program: Any,
    world_size: int,
    inputs: Sequence[Mapping[str, Any]] | None = None,
    schedules: int = 20,
    seed: int = 0,
    epochs: int = 3,
    resident_blocks: int | None = None,
    progress: bool = False,
    equivalent: str | os.PathLike[str] | None = None,
    level: Level = "tile",
    arch: str = "sm_90a",
    most_seconds: float | None = None,
) -> list[Mutant]:
    """Change the synchronization of ``program`` in one place at a time and run each such mutant.

    The operations are those of the program after TileWeave's own passes, so operations that the
    compiler inserted are tested, too. A mutant runs in one schedule after another until one reports
    a fault or ends with outputs that differ from those of the program. A mutant that survives all
    schedules is either equivalent, which a sidecar file must then explain (``equivalent.py``), or a
    fault that the simulator does not detect.

    With ``level="device"`` the operations are those of the device functions that the program is
    lowered to: also barriers, fences and waits that TileLang inserts. The host steps of a plan are
    changed at the tile level only.

    Args:
        progress: show a progress bar on stderr, if that is a terminal.
        equivalent: sidecar file that explains survivors; None: ``x.equivalent.json`` next to each
            source file ``x.py`` of the program, if there is one.
        level, arch: level whose operations are changed and simulated; see ``executable_at``.
        most_seconds: refuse or end a test that is estimated to take longer; None for no limit.
        others: as for ``simulate``.

    Returns:
        All mutants in the order of the program.

    Raises:
        SimulationError: the program itself has a fault, or a mutant uses an operation that is not
            simulated.
        TileWeaveError: illegal arguments, or the test is estimated to take too long.
    """
    check_numbers("mutate", world_size, schedules, seed, epochs, resident_blocks)
    run = _Runs(world_size, inputs, range(seed, seed + schedules), epochs, resident_blocks)
    plan = executable_at(program, world_size, level, arch).plan
    make = TileKernel if level == "tile" else partial(DeviceKernel, arch=arch)
    kernels, limit = Kernels(world_size, make), _Limit(plan.name, most_seconds)
    steps = _reference(run, plan, world_size, kernels)
    todo = [*_of_host(plan, steps, world_size)] if level == "tile" else []
    todo += kernels.changes(plan)
    explained_at = "" if level == "tile" else level_key(arch)
    explanations = Explanations(_places(plan, kernels, todo), equivalent, explained_at)
    mutants = []
    for op, flag, change, proof, known, mutated in tqdm(
        todo, "mutants", disable=None if progress else True, leave=False
    ):
        limit.check(len(mutants), len(todo))
        mutant = Mutant(op.name, change, op.file, op.line, "survived", "", flag=flag)
        mutants.append(_judged(run, mutant, proof, known, mutated))
    return _explained(mutants, explanations)


def _places(plan: TracedPlan, kernels: Kernels, todo: list[Change]) -> list[tuple[str, int]]:
    """Return file and line of all statements that a sidecar file may name."""
    places = [place for kernel in kernels for place in kernel.places()]
    return [*places, *((op.file, op.line) for op, *_ in todo), (plan.loc.rpartition(":")[0], 0)]


class _Limit:
    """Time limit of a mutation test.

    Args:
        most_seconds: longest estimated time; None for no limit.
    """

    def __init__(self, name: str, most_seconds: float | None) -> None:
        self._name, self._most = name, most_seconds
        self._start = self._first = time.monotonic()

    def check(self, done: int, mutants: int) -> None:
        """Refuse to continue if all mutants are estimated to take too long."""
        now = time.monotonic()
        if done == 0:
            self._first = now
        seconds = self._first - self._start + (now - self._first) * mutants / max(1, done)
        if self._most is None or now - self._start < min(_SILENT, self._most):
            return
        if seconds > self._most:
            raise TileWeaveError(
                f"mutate: {self._name} takes an estimated {duration(seconds)} for {mutants} "
                f"mutants, of which {done} have ended; expected at most {duration(self._most)}: "
                "smaller sizes, fewer schedules, or --force"
            )


def _reference(run: _Runs, plan: TracedPlan, world_size: int, kernels: Kernels) -> list[HostStep]:
    """Run the unchanged plan with probes in its kernels. Return the host steps of all ranks."""
    steps: list[HostStep] = []
    watched = ChangedPlan(plan, lambda traced: (steps.extend(traced), traced)[1])
    run.reference(Executable(watched, world_size, kernels.probed))
    return steps


def _of_host(plan: TracedPlan, steps: list[HostStep], world_size: int) -> Iterator[Change]:
    known = PLAN_REASONS if plan.is_synchronized(world_size) else {}
    for op in host_operations(steps):
        for change, edit in host_changes(op, world_size):
            mutated = partial(Executable, ChangedPlan(plan, edit), world_size)
            yield op, "", change, "", known.get(f"{op.name} {change}", ""), mutated


def _judged(
    run: _Runs, mutant: Mutant, proof: str, known: str, mutated: Callable[[], Executable]
) -> Mutant:
    """Return the mutant with its verdict."""
    if proof:
        return replace(mutant, verdict="explained", why=f"proven: {proof}")
    try:
        judged = run.judge(mutant, mutated())
    except SimulationError as error:
        report = f"{error.report}\nin the mutant {mutant.name} of line {mutant.line}"
        raise SimulationError(error.kind, report, seed=error.seed) from None
    if known and judged.verdict == "survived":
        return replace(judged, verdict="explained", why=f"inferred: {known}")
    return judged


def changed(program: tirx.PrimFunc, world_size: int, name: str) -> Executable:
    """Return ``program`` with the first change of this name, such as ``signal drop``.

    Raises:
        TileWeaveError: there is no such change.
    """
    names, program = [], upgrade_ir(program)  # as the plan launches it
    plan, kernels = Executable(program, world_size).plan, Kernels(world_size, TileKernel)
    kernels.of(program)
    for op, _, change, *_, mutated in kernels.changes(plan):
        names.append(f"{op.name} {change}")
        if names[-1] == name:
            return mutated()
    raise TileWeaveError(f"mutate: {name!r}; expected {' or '.join(dict.fromkeys(names))}")


class _Runs:
    """Schedules that each mutant runs in, with the outputs of the program itself."""

    def __init__(
        self, world_size, inputs, seeds: range, epochs: int, resident_blocks: int | None
    ) -> None:
        self.seeds = seeds
        self._arguments = world_size, inputs, 1, epochs, resident_blocks
        self._outputs: dict[int, Outputs] = {}
        self._fixed: set[tuple[int, str]] = set()
        self._counted: set[str] = set()

    def reference(self, program: Executable) -> None:
        """Run the program itself. Record its outputs, and those that are equal in all schedules."""
        self._outputs = {seed: self._one(program, seed) for seed in self.seeds}
        first, self._counted = self._outputs[self.seeds[0]], program.counted
        self._fixed = {
            (rank, name)
            for rank, tensors in enumerate(first)
            for name, values in tensors.items()
            if all(equal_bits(o[rank][name], values) for o in self._outputs.values())
        }

    def _one(self, program: Executable, seed: int) -> Outputs:
        world_size, inputs, schedules, epochs, resident_blocks = self._arguments
        with warnings.catch_warnings():  # unread signals of mutants are expected
            warnings.simplefilter("ignore", SimulationWarning)
            return simulate(program, world_size, inputs, schedules, seed, epochs, resident_blocks)

    def judge(self, mutant: Mutant, program: Executable) -> Mutant:
        for seed in self.seeds:
            try:
                outputs = self._one(program, seed)
            except SimulationError as error:
                if error.kind == "unsupported":
                    raise
                return replace(mutant, verdict="killed", why=_summary(error), seed=seed)
            wrong = self._difference(seed, outputs)
            if wrong:
                return replace(mutant, verdict="killed", why=wrong, seed=seed)
        return replace(mutant, why=f"no fault and no other output in {len(self.seeds)} schedules")

    def _difference(self, seed: int, outputs: Outputs) -> str:
        for rank, tensors in enumerate(outputs):
            for name, values in tensors.items():
                if name in self._counted:  # words of barriers are no outputs
                    continue
                expected = self._outputs[seed][rank][name]
                if (rank, name) in self._fixed:
                    right = equal_bits(values, expected)
                else:
                    right = not is_float(values.dtype) or nearly_equal(values, expected)
                if not right:
                    return f"output: {name} of rank {rank} differs from that of the program"
        return ""


def _summary(error: SimulationError) -> str:
    """Return the kind and the first lines of a report: ``race: copy.py:12, copy.py:15``."""
    accesses = error.report.split("\nlast events")[0]
    lines = dict.fromkeys(
        f"{file.rpartition('/')[2]}:{line}"
        for file, line in re.findall(r"--> (\S+):(\d+)", accesses)
    )
    return f"{error.kind}: {', '.join(list(lines)[:2])}"


def _explained(mutants: list[Mutant], explanations: Explanations) -> list[Mutant]:
    """Add the explanations of sidecar files to the mutants, and report wrong explanations."""
    out = []
    for mutant in mutants:
        function, statement = explanations.keys(mutant.file, mutant.line)
        reason = explanations.reason(mutant.name, function, statement, mutant.flag)
        mutant = replace(mutant, function=function, statement=statement)
        if reason and mutant.verdict == "survived":
            mutant = replace(mutant, verdict="explained", why=reason)
        elif reason and mutant.verdict == "killed":
            why = f"explained as equivalent ({reason}), but {mutant.why}"
            mutant = replace(mutant, verdict="wrong explanation", why=why)
        out.append(mutant)
    return [*out, *(_without_mutant(out, e) for e in explanations.stale())]


def _without_mutant(mutants: list[Mutant], e: Explanation) -> Mutant:
    """Return the entry for an explanation that matches no mutant."""
    op, _, change = e.name.partition(" ")
    inside = [m for m in mutants if m.function == e.function]
    names = dict.fromkeys(m.name for m in inside if m.statement == e.statement)
    statements = dict.fromkeys(m.statement for m in inside if m.name == e.name)
    functions = dict.fromkeys(m.function for m in mutants)
    expected = ", ".join(names or statements or functions) or "no explanation"
    return Mutant(
        op, change, e.sidecar, e.line, "wrong explanation",
        f"explains {e.name!r} of {e.statement!r} in {e.function!r}, which is no mutant; "
        f"expected {expected}", function=e.function, statement=e.statement,
    )  # fmt: skip
