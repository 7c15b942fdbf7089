"""Compiled operators with their symmetric memory, and the cache that keeps them."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any, TypeVar

import torch
from tvm import tirx

from ...builtins.errors import SyncWarning, TileWeaveError
from ...runtime import Plan, SymmetricTensor
from ...runtime import compile as compile_program
from ...runtime.executor.compile_ahead import Compilation, Later, compile_ahead, compile_alone
from ...runtime.executor.recorded_calls import RecordedCall
from ...runtime.host.group import Group
from ...runtime.host.heap import HeapExhausted
from ...runtime.host.session import Session, opened
from ...runtime.kernel.configured import configured
from ...runtime.kernel.kernel import capturing
from ...runtime.lifecycle import init
from ...runtime.plans.parameters import Parameter, parameters_of
from .checks import with_packed_strides
from .groups import TwoLevels
from .noted import noted_problems
from .registry import OPERATORS, RegisteredOp
from .tiles import set_sm_count, sm_count


class CompiledOp:
    """Compiled kernel or plan with the symmetric memory that it works in.

    Attributes:
        memory: symmetric tensors of a plan, in the order of its parameters; a kernel owns its
            symmetric memory.
        fixed_inputs: tensors passed after ``memory``, the same in each call.
        run: the kernel, or the plan.
        last_used: number of the latest use, see ``OpCache``; larger is more recent.
    """

    fixed_inputs: tuple[torch.Tensor, ...] = ()
    last_used = 0

    def __init__(
        self, steps: tirx.PrimFunc | Plan, session: Session,
        similar: Callable[[], Iterable[tirx.PrimFunc | Plan]] = tuple,
        others: Iterable[tirx.PrimFunc | Plan] = (),
    ) -> None:  # fmt: skip
        """Compile, and allocate symmetric memory, that of kernels included. Collective.

        Args:
            session: of the group that runs it.
            similar: as in ``compile_ahead``.
            others: programs and plans that are compiled at the same time, for later.

        Raises:
            HeapExhausted: the heap is too small; nothing stays allocated.
        """
        self._session = session
        compile_ahead([steps, *others], session.group.process_group, similar)
        parameters = steps.parameters if isinstance(steps, Plan) else parameters_of(steps)
        *self._inputs, self._out = (p for p in parameters if not p.symmetric)
        self.memory: list[SymmetricTensor] = []
        with warnings.catch_warnings():
            # Tiles that cross the end of a tensor are meant; the user cannot change the program.
            warnings.simplefilter("ignore", SyncWarning)
            self.run = (
                self._compile(steps)
                if isinstance(steps, Plan)
                else compile_program(steps, group=session.group.process_group)
            )

    def _compile(self, steps: Plan) -> Plan:
        """Return ``steps``, compiled, after the allocation of its symmetric memory."""
        heap, plan = self._session.heap, steps.on(self._session.group.process_group)
        with ExitStack() as failed:
            for p in plan.parameters:
                if p.symmetric:
                    self.memory.append(heap.allocate(tuple(p.extents), getattr(torch, p.dtype)))
                    failed.callback(self.memory[-1].free)
            plan.compile()
            failed.pop_all()
        return plan

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Compute the result, the last of ``tensors``, from the inputs. Every rank calls it."""
        self.enqueue(*self.declared(*tensors))

    def declared(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the arguments of ``enqueue`` for inputs and a result, all contiguous."""
        *inputs, out = tensors
        pairs = zip(inputs, self._inputs, strict=True)
        return [as_declared(tensor, p) for tensor, p in pairs], as_declared(out, self._out)

    def enqueue(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Run the kernel or plan on inputs of the shapes and types that it declares."""
        self.run(*inputs, *self.memory, *self.fixed_inputs, out)

    def recorded_call(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor
    ) -> tuple[RecordedCall, list[int]]:
        """Return the recorded call that ``enqueue`` makes for such tensors, and the addresses of
        its tensors; see ``Plan.recorded_call``."""
        return self._plan.recorded_call(*inputs, *self.memory, *self.fixed_inputs, out)

    @cached_property
    def _plan(self) -> Plan:
        if isinstance(self.run, Plan):
            return self.run
        return Plan.of_program(self.run).on(self._session.group.process_group)

    def free(self) -> None:
        """Free its symmetric memory. Collective."""
        self.run.free()
        for memory in self.memory:
            memory.free()


class ProblemOp(CompiledOp, RegisteredOp, ABC):
    """Operator compiled for a problem, by one of several choices."""

    def __init__(self, problem: Any, choice: Any, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective.

        Raises:
            HeapExhausted: the heap is too small; nothing stays allocated.
        """
        steps, *others = programs_of(type(self), problem, choice)
        super().__init__(steps, session, lambda: self.similar_programs(problem, choice), others)

    @classmethod
    @abstractmethod
    def choose(
        cls, problem: Any, ranks: Group | TwoLevels, requested: str, device: torch.device
    ) -> Any:
        """Return how calls compute a problem, such as program and tiles, or a transport; one of
        ``UNCOMPILED`` for a computation without a kernel of ours. Collective for each new problem.

        Args:
            requested: strategy or transport that the caller asks for.
            device: of the tensors.
        """

    @classmethod
    @abstractmethod
    def compiled_programs(cls, problem: Any, choice: Any) -> list[tirx.PrimFunc | Plan]:
        """Return all programs that are compiled for ``choice``, that of the operator first."""

    @classmethod
    def choices(cls, problem: Any, choice: Any) -> list[tuple[Any, Any]]:
        """Return all choices for problems like ``problem`` of any size, each with such a problem;
        nothing if they are not known before the calls."""
        return []

    @classmethod
    def sizes(cls, problem: Any, choice: Any) -> list[Any]:
        """Return problems for one of ``choices``, in order. Kernels that fit them fit most sizes
        for which calls use this choice."""
        return []

    @classmethod
    def similar_programs(cls, problem: Any, choice: Any) -> list[tirx.PrimFunc | Plan]:
        """Return the programs for other sizes. Kernels that fit these and ``problem`` fit most
        sizes."""
        return []


@lru_cache(maxsize=64)
def programs_of(
    operator: type[ProblemOp], problem: Any, choice: Any
) -> tuple[tirx.PrimFunc | Plan, ...]:
    """Return the programs of an operator. The inference keeps its result for these objects, from
    compiling ahead until the operator is created."""
    return tuple(operator.compiled_programs(problem, choice))


def shared_by_sizes(steps: Any, problem: Any, **sizes: Any) -> Any:
    """Let programs or plans of problems that differ only in ``sizes`` share kernels.

    Args:
        steps: the program or plan of ``problem``.
        sizes: any values of the fields of ``problem`` that may differ.
    """
    return configured(problem.op, steps, {"tileweave.share": repr(replace(problem, **sizes))})


def similar_sizes(size: int, unit: int = 1) -> list[int]:
    """Return smaller and larger sizes for ``ProblemOp.similar_programs``: odd ones, and multiples
    of ``size``. So a kernel has arguments for integers that depend on divisors of the size, too,
    also if programs for whole tiles have another form.

    Args:
        unit: number that divides all sizes.
    """
    n = size // unit
    numbers = dict.fromkeys(m + odd for m in (n // 2, 2 * n, 7 * n) for odd in (0, 1))
    return [unit * m for m in numbers if m not in (0, n)]


def as_declared(tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """Return a contiguous tensor in the type and shape of a parameter."""
    flat = with_packed_strides(tensor).view(-1)
    dtype = getattr(torch, parameter.dtype)
    if flat.dtype != dtype:
        flat = flat.view(torch.uint8).view(dtype)
    return flat.view(parameter.extents)


def _compile(problem: Any, choice: Any, world_size: int, heap_stride: int, sms: int) -> None:
    """Compile the kernels of one of ``ProblemOp.choices`` for all sizes, in a process that is no
    rank; see ``compile_alone``.

    Args:
        sms: SMs of a rank's GPU.
    """
    os.nice(10)  # no call waits for it
    set_sm_count(sms)
    operator = OPERATORS[problem.op]
    sizes = operator.sizes(problem, choice)
    programs = [program for size in sizes for program in programs_of(operator, size, choice)]

    def similar() -> list[tirx.PrimFunc | Plan]:
        ends = sizes[0], sizes[-1]
        return [program for end in ends for program in operator.similar_programs(end, choice)]

    compile_alone(programs, similar, world_size, heap_stride)


Op = TypeVar("Op", bound=CompiledOp)


class OpCache:
    """Compiled operators of one session.

    All ranks of its group make the same calls in the same order, so they create and free the same
    operators.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.operators: dict[tuple[Any, Any], Any] = {}
        """Operators by problem and choice."""
        self._captured: set[tuple[Any, Any]] = set()
        """Keys of operators that a CUDA graph may replay at any time."""
        self.uses = count(1)
        """Counter from which ``CompiledOp.last_used`` is set."""

    def operator(
        self, problem: Hashable, choice: Hashable, make: Callable[[Any, Any, Session], Op]
    ) -> Op:
        """Return the operator for ``problem`` and ``choice``; create it if it is new.

        Collective if it is new. If the symmetric heap is full, the least recently used operators
        are freed.

        Raises:
            HeapExhausted: the heap is too small even after all evictions.
            TileWeaveError: the operator is new while a CUDA graph is being captured.
        """
        key = problem, choice
        operator = self.operators.get(key)
        if operator is None:
            if capturing():
                raise TileWeaveError(
                    f"{problem}: not compiled yet; expected one call before it is captured in a "
                    "CUDA graph"
                )
            if noted := noted_problems(self.session.group):
                self.compile_ahead([key, *noted])
            operator = self.operators[key] = self.create(problem, choice, make)
        elif capturing():
            self._captured.add(key)
        self.use(operator)
        return operator

    def use(self, operator: CompiledOp) -> None:
        """Mark ``operator`` as the most recently used, so that it is evicted last."""
        operator.last_used = next(self.uses)

    def create(
        self, problem: Hashable, choice: Hashable, make: Callable[[Any, Any, Session], Op]
    ) -> Op:
        """Create an operator; evict others if the heap is full. The caller frees it or passes it to
        ``keep``."""
        while True:
            try:
                return make(problem, choice, self.session)
            except HeapExhausted as error:
                evictable = self.operators.keys() - self._captured
                if not evictable:
                    raise HeapExhausted(f"{problem}: {error}") from None
            old = min(evictable, key=lambda key: self.operators[key].last_used)
            self.operators.pop(old).free()

    def compile_ahead(self, problems: Iterable[tuple[Any, Any]]) -> Compilation:
        """Begin to compile the kernels of several operators, as ``compile_ahead`` does, and later
        those for other sizes. Creating an operator waits for its kernels.

        Args:
            problems: pairs of problem and choice. Creating an operator raises the error of one
                without a program.
        """
        new = [
            (OPERATORS[problem.op], problem, choice)
            for problem, choice in dict.fromkeys(problems)
            if (problem, choice) not in self.operators
        ]
        made: list[tuple[type[ProblemOp], Any, Any]] = []

        def programs() -> Iterator[tirx.PrimFunc | Plan]:
            others: list[tirx.PrimFunc | Plan] = []
            for key in new:
                try:
                    first, *rest = programs_of(*key)
                except Exception:
                    continue
                made.append(key)
                others += rest
                yield first
            yield from others

        def similar() -> list[tirx.PrimFunc | Plan]:
            of_operators = [operator.similar_programs(*key) for operator, *key in made]
            return [program for of_operator in of_operators for program in of_operator]

        group = self.session.group
        of_group = group.world_size, self.session.heap.stride, sm_count()
        choices = [pair for operator, *key in new for pair in operator.choices(*key)]
        later = [
            Later(repr((*pair, *of_group)), partial(_compile, *pair, *of_group))
            for pair in dict.fromkeys(choices)
        ]
        return compile_ahead(programs(), group.process_group, similar, False, later)

    def keep(self, problem: Hashable, choice: Hashable, operator: CompiledOp) -> None:
        """Use ``operator`` for ``problem`` from now on. Free the others of this problem, except
        those that a CUDA graph may replay. Collective."""
        for old in [key for key in self.operators if key[0] == problem]:
            if old not in self._captured:
                self.operators.pop(old).free()
        if (problem, choice) in self.operators:  # one that a graph holds: equivalent
            operator.free()
        else:
            self.operators[problem, choice] = operator
            self.use(operator)

    def free(self) -> None:
        """Free all operators, except those that a CUDA graph may replay. Collective."""
        for key in [key for key in self.operators if key not in self._captured]:
            self.operators.pop(key).free()


_caches: dict[str, OpCache] = {}
"""Caches of the sessions, by the name of the session."""


def op_cache_of(group: Group) -> OpCache:
    """Return the cache of the session of ``group``. Open the session if it is not open."""
    session = init(group.process_group)
    cache = _caches.get(session.name)
    if cache is None or cache.session is not session:
        cache = _caches[session.name] = OpCache(session)
    return cache


def free_caches() -> None:
    """Free the operators of all open sessions, except those in CUDA graphs. Collective."""
    for session in opened():
        cache = _caches.get(session.name)
        if cache is not None and cache.session is session:
            cache.free()
