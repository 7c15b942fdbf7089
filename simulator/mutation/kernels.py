"""Kernels of a plan at the tile and at the device level, with the operations to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tilelang import tvm
from tvm import tirx

from ...builtins.spec import register_op
from ...builtins.symmetric import is_symmetric
from ...passes.ir.accesses import written_tensors
from ...passes.ir.implicit import implicit_of
from ...passes.ir.releases import upgrade_ir
from ...passes.ir.walk import flatten, rewrite_children
from ...runtime.plans import steps as plan_steps
from ...runtime.plans.traced_plan import TracedPlan
from ..device import program as device
from ..device.lowering import lowered as lowered_to_device
from ..frontend.program import OPERATIONS, Program, lowered
from ..frontend.statements import Statements
from ..machine.executable import Executable
from ..machine.steps import Step
from .equivalent import Source, flag_reasons
from .mutators import DEVICE_MUTATORS, TILE_MUTATORS, Context, Mutators
from .operations import (
    DEVICE,
    TILE,
    Accesses,
    Edit,
    Instructions,
    Operation,
    distinct,
    operations,
    places_in,
    sequences_around,
)

PROBE = "tileweave.probe"
register_op(PROBE, "an operation of a mutation test is reached", 1)

Change = tuple[Any, str, str, str, str, Callable[[], Executable]]
"""An operation, its flag, the name of the change, a proof of equivalence, the known reason for
equivalence of an inserted operation, and a function that returns the mutant. Texts may be empty."""

_OWN_KERNELS = Path(plan_steps.__file__).parent
"""Folder of the kernels that plans launch implicitly."""


class Kernel:
    """One kernel of a program at one level.

    Args:
        program: the kernel after the tile passes.
        functions: functions that the simulator executes, in order.
    """

    instructions: Instructions
    mutators: Mutators

    def __init__(
        self, func: tirx.PrimFunc, world_size: int, program: tirx.PrimFunc,
        functions: list[tirx.PrimFunc],
    ) -> None:  # fmt: skip
        self.func, self.world_size = upgrade_ir(func), world_size
        self.program, self.functions = program, functions
        self.operations = [
            (number, op)
            for number, function in enumerate(functions)
            for op in operations(function.body, self.instructions)
        ]
        self.probes = Probes()

    def compiled(self, functions: list[tirx.PrimFunc], *extra: Any) -> Program:
        """Return the kernel with these functions.

        Args:
            extra: objects whose ``register`` adds operations to the compiler.
        """
        raise NotImplementedError

    def probed(self) -> Program:
        """Return the kernel with probes that record which operations it reaches."""
        ops = [op for _, op in self.operations]
        return self.compiled([self.probes.edited(f, ops) for f in self.functions], self.probes)

    def is_attributed(self, op: Operation) -> bool:
        """Return whether an operation serves the flag of the next operation that has one."""
        return True

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield file and line of each statement."""
        return (place for function in self.functions for place in places_in(function.body))

    def changes(self, mutated: Callable[[Kernel, Program], Executable]) -> Iterator[Change]:
        """Yield the mutants in which this kernel is changed.

        Args:
            mutated: returns the plan with the changed kernel.
        """
        implicit = {p.name for p in implicit_of(self.program)}
        contexts = [self._context(function) for function in self.functions]
        for number, (place, op) in enumerate(self.operations):
            flag = self._flag(number)
            proof = self.probes.proof(number, op)
            inserted = flag in implicit or Path(op.file).parent == _OWN_KERNELS
            known = flag_reasons(flag) if inserted and self.is_attributed(op) else {}
            for mutator in self.mutators:
                for change, edit in mutator(op, contexts[place]):
                    make = partial(self._mutated, place, edit, mutated)
                    redundant = self._proof(place, op) if change == "drop" else ""
                    reason = known.get(f"{op.kind} {change}", "")
                    yield op, flag, change, proof or redundant, reason, make

    def _context(self, function: tirx.PrimFunc) -> Context:
        symmetric = {b.name for b in self.func.buffer_map.values() if is_symmetric(b)}
        symmetric |= {p.name for p in implicit_of(self.program) if p.symmetric}
        accesses = Accesses(self.program, written_tensors(self.program.body))
        return Context(function, self.world_size, frozenset(symmetric), accesses)

    def _flag(self, number: int) -> str:
        """Return the name of the flag of an operation, or of the next operation that has one."""
        return next((flag for _, op in self.operations[number:] if (flag := op.flag())), "")

    def _proof(self, place: int, op: Operation) -> str:
        """Return why the operation may be dropped from its function, or nothing."""
        return ""

    def _mutated(
        self, place: int, edit: Edit, mutated: Callable[[Kernel, Program], Executable]
    ) -> Executable:
        functions = list(self.functions)
        functions[place] = functions[place].with_body(edit(functions[place].body))
        return mutated(self, self.compiled(functions))


class TileKernel(Kernel):
    """Kernel after the tile passes."""

    instructions, mutators = TILE, TILE_MUTATORS

    def __init__(self, func: tirx.PrimFunc, world_size: int) -> None:
        program = lowered(func, world_size)
        super().__init__(func, world_size, program, [program])

    def compiled(self, functions: list[tirx.PrimFunc], *extra: Any) -> Program:
        return Program(self.func, self.world_size, functions[0], (*OPERATIONS, *extra))


class DeviceKernel(Kernel):
    """Device functions of a kernel, which are lowered once for all mutants.

    Args:
        arch: ``sm_80`` or ``sm_90a``.
    """

    instructions, mutators = DEVICE, DEVICE_MUTATORS

    def __init__(self, func: tirx.PrimFunc, world_size: int, arch: str) -> None:
        self._lowered = lowered_to_device(func, world_size, arch)
        functions = [distinct(kernel) for kernel in self._lowered.kernels]
        super().__init__(func, world_size, self._lowered.program, functions)
        self.operations = list(_numbered(self.operations))

    def compiled(self, functions: list[tirx.PrimFunc], *extra: Any) -> Program:
        below = replace(self._lowered, kernels=functions)
        operations = *device.OPERATIONS, *extra
        return device.DeviceProgram(self.func, self.world_size, below=below, operations=operations)

    def is_attributed(self, op: Operation) -> bool:
        return bool(op.flag())  # the others may serve shared memory

    def _proof(self, place: int, op: Operation) -> str:
        repeated = op.kind == "sync_threads" and _follows(self.functions[place].body, op)
        return "the same barrier follows immediately" if repeated else ""


def _numbered(found: list[tuple[int, Operation]]) -> Iterator[tuple[int, Operation]]:
    """Number the operations of one kind of a statement: lowering inserts and repeats them."""
    counts: dict[tuple, int] = {}
    sources = {file: Source(file) for file in {op.file for _, op in found}}
    for place, op in found:
        source = sources[op.file]
        key = op.kind, op.file, source.function(op.line), source.statement(op.line)
        counts[key] = counts.get(key, 0) + 1
        yield place, replace(op, number=counts[key])


def _follows(body: tirx.Stmt, op: Operation) -> bool:
    """Return whether the statement after an operation in its sequence is equal to it."""
    for sequence, at in sequences_around(body, op.stmt)[:1]:
        after = list(sequence.seq)[at + 1 : at + 2]
        return bool(after) and tvm.ir.structural_equal(after[0], op.stmt)
    return False


class Kernels:
    """Kernels that a plan launches, each compiled once.

    Args:
        make: returns the kernel of a ``T.prim_func`` for a number of ranks.
    """

    def __init__(self, world_size: int, make: Callable[[tirx.PrimFunc, int], Kernel]) -> None:
        self._world_size, self._make = world_size, make
        self._kernels: dict[int, Kernel] = {}
        self._programs: dict[int, Program] = {}

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self._kernels.values())

    def of(self, func: tirx.PrimFunc) -> Kernel:
        if id(func) not in self._kernels:
            self._kernels[id(func)] = self._make(func, self._world_size)
        return self._kernels[id(func)]

    def probed(self, func: tirx.PrimFunc, world_size: int) -> Program:
        """Return a kernel with probes."""
        return self.of(func).probed()

    def changes(self, plan: TracedPlan) -> Iterator[Change]:
        """Yield the mutants of ``plan`` in which one of its kernels is changed."""

        def mutated(kernel: Kernel, program: Program) -> Executable:
            def make(func: tirx.PrimFunc, world_size: int) -> Program:
                return program if self.of(func) is kernel else self._unchanged(func)

            return Executable(plan, self._world_size, make)

        for kernel in self:
            yield from kernel.changes(mutated)

    def _unchanged(self, func: tirx.PrimFunc) -> Program:
        kernel = self.of(func)
        return kernel.compiled(kernel.functions)


class Probes:
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

    def register(self, c: Statements) -> None:
        c.steps[PROBE] = self._step

    def _step(self, c: Statements, call: tirx.Call, loc: str) -> Step:
        number = int(call.args[0])

        def run(frame):
            self.reached.add(number)
            if frame.block.has_bulk_stores(frame.mask.overlapping):
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
    return group == "wait" or op.kind in ("complete_bulk_stores", "tma_store_wait")
