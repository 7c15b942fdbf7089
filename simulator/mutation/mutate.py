"""``tw.mutate``: mutation testing of the synchronization of a program."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tilelang import tvm
from tqdm import tqdm
from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...builtins.spec import register_op
from ...builtins.symmetric import is_symmetric
from ...passes.group.upgrade_ir import upgrade_ir
from ...passes.ir.accesses import written_tensors
from ...passes.ir.implicit import implicit_of
from ...passes.ir.walk import flatten, rewrite_children
from ...runtime.plans import steps as plan_steps
from ...runtime.plans.steps import Step as HostStep
from ...runtime.plans.traced_plan import TracedPlan
from ..frontend.block_ops import BlockStatements
from ..frontend.program import OPERATIONS, Program, lowered
from ..inputs.arguments import check_numbers
from ..machine.executable import Executable
from ..machine.steps import Step
from ..memory.values import close, is_float, same
from ..report.errors import SimulationError, SimulationWarning
from ..simulate import simulate
from .equivalent import PLAN_REASONS, Explanation, Explanations, flag_reasons
from .host_steps import ChangedPlan, host_changes, host_operations
from .mutators import Context, changes
from .operations import Accesses, Edit, Operation, operations, places_in

PROBE = "tileweave.probe"
register_op(PROBE, "an operation of a mutation test is reached", 1)

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
) -> list[Mutant]:
    """Change the synchronization of ``program`` in one place at a time and run each such mutant.

    The operations are those of the program after TileWeave's own passes, so operations that the
    compiler inserted are tested, too. A mutant runs in one schedule after another until one reports
    a fault or ends with outputs that differ from those of the program. A mutant that survives all
    schedules is either equivalent, which a sidecar file must then explain (``equivalent.py``), or a
    fault that the simulator does not detect.

    Args:
        progress: show a progress bar on stderr, if that is a terminal.
        equivalent: sidecar file that explains survivors; None: ``x.equivalent.json`` next to each
            source file ``x.py`` of the program, if there is one.
        others: as for ``simulate``.

    Returns:
        All mutants in the order of the program.

    Raises:
        SimulationError: the program itself has a fault, or a mutant uses an operation that is not
            simulated.
        TileWeaveError: illegal arguments.
    """
    check_numbers("mutate", world_size, schedules, seed, epochs, resident_blocks)
    run = _Runs(world_size, inputs, range(seed, seed + schedules), epochs, resident_blocks)
    plan = Executable(program, world_size).plan
    kernels, steps = _reference(run, plan, world_size)
    todo = [*_of_host(plan, steps, world_size), *(c for k in kernels for c in k.changes(plan))]
    places = [place for kernel in kernels for place in places_in(kernel.lowered.body)]
    places += [(op.file, op.line) for op, *_ in todo]
    explanations = Explanations([*places, (plan.loc.rpartition(":")[0], 0)], equivalent)
    mutants = []
    for op, flag, change, proof, known, mutated in tqdm(
        todo, "mutants", disable=None if progress else True, leave=False
    ):
        mutant = Mutant(op.name, change, op.file, op.line, "survived", "", flag=flag)
        mutants.append(_judged(run, mutant, proof, known, mutated))
    return _explained(mutants, explanations)


def _reference(
    run: _Runs, plan: TracedPlan, world_size: int
) -> tuple[list[_Kernel], list[HostStep]]:
    """Run the unchanged plan. Return its kernels and the steps of all ranks."""
    kernels: list[_Kernel] = []
    steps: list[HostStep] = []

    def probed(func: tirx.PrimFunc, ranks: int) -> Program:
        kernels.append(_Kernel(func, ranks))
        return kernels[-1].probed()

    watched = ChangedPlan(plan, lambda traced: (steps.extend(traced), traced)[1])
    run.reference(Executable(watched, world_size, probed))
    return kernels, steps


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
    names = []
    plan = Executable(program, world_size).plan
    for op, _, change, *_, mutated in _Kernel(program, world_size).changes(plan):
        names.append(f"{op.name} {change}")
        if names[-1] == name:
            return mutated()
    raise TileWeaveError(f"mutate: {name!r}; expected {' or '.join(dict.fromkeys(names))}")


Change = tuple[Any, str, str, str, str, Callable[[], Executable]]
"""An operation, its flag, the name of the change, a proof of equivalence, the known reason for
equivalence of an inserted operation, and a function that returns the mutant. Texts may be empty."""

_OWN_KERNELS = Path(plan_steps.__file__).parent
"""Folder of the kernels that plans launch implicitly."""


def _of_host(plan: TracedPlan, steps: list[HostStep], world_size: int) -> Iterator[Change]:
    known = PLAN_REASONS if plan.is_synchronized(world_size) else {}
    for op in host_operations(steps):
        for change, edit in host_changes(op, world_size):
            mutated = partial(Executable, ChangedPlan(plan, edit), world_size)
            yield op, "", change, "", known.get(f"{op.name} {change}", ""), mutated


class _Kernel:
    """Kernel of the program, with the operations to change."""

    def __init__(self, func: tirx.PrimFunc, world_size: int) -> None:
        self.func, self.world_size = upgrade_ir(func), world_size
        self.lowered = lowered(func, world_size)
        self.operations = operations(self.lowered.body)
        self.probes = _Probes()

    def probed(self) -> Program:
        """Return the kernel with probes that record which operations it reaches."""
        func = self.probes.edited(self.lowered, self.operations)
        return Program(self.func, self.world_size, func, (*OPERATIONS, self.probes))

    def changes(self, plan: TracedPlan) -> Iterator[Change]:
        """Yield the mutants of ``plan`` in which this kernel is changed."""
        symmetric = {b.name for b in self.func.buffer_map.values() if is_symmetric(b)}
        implicit = {h.name for h in implicit_of(self.lowered)}
        symmetric |= {h.name for h in implicit_of(self.lowered) if h.symmetric}
        written = written_tensors(self.lowered.body)
        accesses = Accesses(self.lowered, written)
        context = Context(self.lowered, self.world_size, frozenset(symmetric), accesses)
        for number, op in enumerate(self.operations):
            proof, flag = self.probes.proof(number, op), self._flag(number)
            inserted = flag in implicit or Path(op.file).parent == _OWN_KERNELS
            known = flag_reasons(flag) if inserted else {}
            for change, edit in changes(op, context):
                mutated = partial(self._mutated, plan, edit)
                reason = known.get(f"{op.name} {change}", "")
                yield op, flag, change, proof, reason, mutated

    def _flag(self, number: int) -> str:
        """Return the name of the flag of an operation, or of the next operation that has one."""
        flags = (op.pointer() for op in self.operations[number:])
        return next((flag.buffer.name for flag in flags if flag is not None), "")

    def _mutated(self, plan: TracedPlan, edit: Edit) -> Executable:
        func = self.lowered.with_body(edit(self.lowered.body))

        def make(other: tirx.PrimFunc, world_size: int) -> Program:
            # For an older TileLang, a plan has an upgraded copy of the program.
            is_own = other.same_as(self.func) or tvm.ir.structural_equal(other, self.func)
            return Program(other, world_size, func if is_own else None)

        return Executable(plan, self.world_size, make)


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
            if all(same(o[rank][name], values) for o in self._outputs.values())
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
                    right = same(values, expected)
                else:
                    right = not is_float(values.dtype) or close(values, expected)
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


class _Probes:
    """Records which operations are reached in any schedule, and with bulk stores in flight."""

    def __init__(self) -> None:
        self.reached: set[int] = set()
        self.busy: set[int] = set()

    def edited(self, func: tirx.PrimFunc, found: list[Operation]) -> tirx.PrimFunc:
        """Return the program with a probe before each statement that contains an operation."""

        def edit(stmt: tirx.Stmt) -> tirx.Stmt:
            here = [n for n, op in enumerate(found) if op.stmt.same_as(stmt)]
            probe = tvm.ir.Op.get(PROBE)
            probes = [tirx.Evaluate(tirx.call_intrin("handle", probe, n)) for n in here]
            return flatten([*probes, rewrite_children(stmt, edit)])

        return func.with_body(edit(func.body))

    def register(self, c: BlockStatements) -> None:
        c.steps[PROBE] = self._step

    def _step(self, c: BlockStatements, call: tirx.Call, loc: str) -> Step:
        number = int(call.args[0])

        def run(frame):
            self.reached.add(number)
            if frame.block.stores:
                self.busy.add(number)

        return Step(run)

    def proof(self, number: int, op: Operation) -> str:
        """Return why no change of the operation can matter in these schedules, or nothing."""
        if number not in self.reached:
            return "no block of any rank reaches it"
        if _ends_bulk_stores(op) and number not in self.busy:
            return "no bulk store is in flight when it runs"
        return ""


def _ends_bulk_stores(op: Operation) -> bool:
    group = op.spec.bulk_group if op.spec is not None else ""
    return group == "wait" or op.name in ("complete_bulk_stores", "tma_store_wait")


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
