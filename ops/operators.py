"""What an operator's file declares: its programs, which of them serves a problem, and the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tvm import tirx

from ..runtime import Plan, SymmetricTensor, symmetric
from ..runtime import compile as compiled
from ..runtime.group import Group
from .epilogue import Epilogue
from .problem import Problem
from .tiles import CANDIDATES, FP8_CANDIDATES, Tiles


@dataclass(frozen=True)
class Choice:
    """One way to compute a problem while communicating.

    Attributes:
        program: one of the names in ``Operator.programs``.
        tiles: what it is made for.
    """

    program: str
    tiles: Tiles

    def __str__(self) -> str:
        return f"{self.program}, {self.tiles}"


class Operator(ABC):
    """An operator compiled for one problem. A subclass is made known by the operator's name:
    ``class MatmulReduceScatter(Operator, op="matmul_reduce_scatter")``.

    Attributes:
        programs: the tile programs, or plans, by the names of ``Choice.program``.
        problem: what it computes.
        memory: the symmetric tensors that a plan works in, in the order of its parameters; a kernel
            has its own.
        run: the kernel, or the plan.
    """

    programs: ClassVar[Mapping[str, Callable[..., Any]]]

    def __init_subclass__(cls, op: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        OPERATORS[op] = cls

    @classmethod
    @abstractmethod
    def program(cls, problem: Problem, choice: Choice) -> tirx.PrimFunc | Plan:
        """One of ``programs``, for a problem."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        """Compile, and take symmetric memory. Collective.

        Raises:
            HeapExhausted: there is not enough of it; nothing is taken then.
        """
        self.problem = problem
        program = self.program(problem, choice)
        planned = isinstance(program, Plan)
        self.memory: list[SymmetricTensor] = []
        with ExitStack() as failed:
            for p in (p for p in (program.parameters if planned else ()) if p.symmetric):
                self.memory.append(symmetric(p.shape, getattr(torch, p.dtype)))
                failed.callback(self.memory[-1].free)
            self.run = program if planned else compiled(program)
            failed.pop_all()

    @abstractmethod
    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *epilogue: torch.Tensor
    ) -> None:
        """Compute ``c``. Every rank calls it, with ``Epilogue.tensors``."""

    def free(self) -> None:
        """Give its symmetric memory back. Collective."""
        self.run.free()
        for memory in self.memory:
            memory.free()

    @staticmethod
    @abstractmethod
    def unfused(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, group: Group, epilogue: Epilogue
    ) -> Any:
        """Compute ``c`` by ``torch.distributed`` and ``torch.mm``, on any device."""

    @staticmethod
    @abstractmethod
    def table(problem: Problem) -> Choice:
        """What is taken where nothing was measured. It depends on the problem alone."""

    @classmethod
    def candidates(cls, problem: Problem) -> Iterable[Choice]:
        """What tuning measures beside ``table(problem)``: every program with all tiles."""
        every = FP8_CANDIDATES if problem.scaled else CANDIDATES
        return [Choice(program, tiles) for program in cls.programs for tiles in every]


OPERATORS: dict[str, type[Operator]] = {}
"""By the operators' names."""
