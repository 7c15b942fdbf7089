"""Cases of ``tileweave bench``: GEMM operators, collectives and attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import ops
from ..ops.attention.problem import AttentionProblem
from ..ops.autotune.trial import Trial, problem_of
from ..ops.autotune.tuner import choice_of
from ..ops.collectives.transport import Transport
from ..ops.core.collective_problem import CollectiveProblem
from ..ops.core.problem import Problem
from ..ops.core.registry import OPERATORS as FUSED
from ..ops.core.strategy import Strategy, not_fused
from ..runtime import SymmetricTensor
from ..runtime.host.group import Group
from . import attention, collectives, implementations
from .implementations import Implementation
from .results import Length, Shape, Size


@dataclass(frozen=True)
class Case(ABC):
    """Operator with one shape or length, or collective with one size.

    Attributes:
        makers: constructors of its implementations by name.
        symmetric_bytes: symmetric memory of our operator on each rank, for 2-byte values, without
            counters and tails.
        gathered_bytes: bytes that the implementation by copies writes to each rank.
        operations: arithmetic operations of all ranks; for a collective, bytes of one rank.
        example: options for a small case.
    """

    makers: ClassVar[Mapping[str, Callable[[Any], Implementation]]]
    example: ClassVar[str]

    op: str
    shape: Any

    @property
    @abstractmethod
    def symmetric_bytes(self) -> int: ...

    @property
    @abstractmethod
    def gathered_bytes(self) -> int: ...

    @property
    @abstractmethod
    def operations(self) -> int: ...

    @abstractmethod
    def problem(self, ranks: int, dtype: torch.dtype) -> Any:
        """Return the problem of each rank.

        Raises:
            TileWeaveError: the number of ranks does not divide it.
        """

    @staticmethod
    @abstractmethod
    def programs(problem: Any, group: Group) -> list[Any]:
        """Return the programs and plans that our implementations launch on a GPU."""

    @staticmethod
    @abstractmethod
    def stage(
        problem: Any, group: Group, gathered: SymmetricTensor | None
    ) -> tuple[Any, Iterator[Any]]:
        """Return the buffers in which implementations compute, which the caller closes, and an
        iterator of inputs, which all ranks advance together."""

    @staticmethod
    @abstractmethod
    def how(problem: Any, inputs: Any) -> Strategy | Transport:
        """Return how the operator computes it, and why."""


@dataclass(frozen=True)
class ProductCase(Case):
    makers = implementations.MAKERS
    example = "--shapes 256x512x512"
    shape: Shape

    @property
    def symmetric_bytes(self):
        M, N, K = self.shape.M, self.shape.N, self.shape.K
        elements = {
            "all_gather_matmul": M * K,
            "matmul_reduce_scatter": 4 * M * N,
            "matmul_all_reduce": 7 * M * N,
        }
        return 2 * elements[self.op]

    @property
    def gathered_bytes(self):
        return 2 * self.shape.M * self.shape.K if self.op == "all_gather_matmul" else 0

    @property
    def operations(self):
        return 2 * self.shape.M * self.shape.N * self.shape.K

    def problem(self, ranks, dtype):
        return problem_of(self.op, self.shape.M, self.shape.N, self.shape.K, ranks, dtype)

    @staticmethod
    def programs(problem: Problem, group):
        programs = [implementations.product_program(problem)]
        if not not_fused("auto", problem, group.device, group):
            choice = choice_of("auto", problem, group)
            if choice is not None:
                programs += FUSED[problem.op].launched(problem, choice)
        return programs

    @staticmethod
    def stage(problem: Problem, group, gathered):
        trial = Trial(problem, group)
        inputs = iter(lambda: implementations.Inputs.random(trial), None)
        return implementations.Buffers(problem, group, gathered, trial.c), inputs

    @staticmethod
    def how(problem: Problem, inputs):
        return ops.strategy_of(getattr(ops, problem.op), inputs.a, inputs.b)


@dataclass(frozen=True)
class CollectiveCase(Case):
    makers = collectives.MAKERS
    example = "--sizes 1"
    shape: Size

    @property
    def symmetric_bytes(self):
        return collectives.symmetric_bytes(self.op, self.shape)

    @property
    def gathered_bytes(self):
        return collectives.gathered_bytes(self.op, self.shape)

    @property
    def operations(self):
        return self.shape.bytes

    def problem(self, ranks, dtype):
        return collectives.problem_of(self.op, self.shape, dtype)

    @staticmethod
    def programs(problem: CollectiveProblem, group):
        return collectives.programs(problem, group)

    @staticmethod
    def stage(problem: CollectiveProblem, group, gathered):
        return (
            collectives.Buffers(problem, group, gathered),
            collectives.Inputs.random(problem, group),
        )

    @staticmethod
    def how(problem: CollectiveProblem, inputs):
        return collectives.transport_of(problem, inputs.x)


@dataclass(frozen=True)
class AttentionCase(Case):
    makers = attention.MAKERS
    example = "--lengths 256"
    shape: Length

    @property
    def symmetric_bytes(self):
        return 2 * self.gathered_bytes

    @property
    def gathered_bytes(self):
        return attention.gathered_bytes(self.shape)

    @property
    def operations(self):
        shape = self.shape
        return 4 * shape.batch * shape.heads * shape.length**2 * shape.head_dim

    def problem(self, ranks, dtype):
        return attention.problem_of(self.shape, ranks, dtype)

    @staticmethod
    def programs(problem: AttentionProblem, group):
        return attention.programs(problem, group)

    @staticmethod
    def stage(problem: AttentionProblem, group, gathered):
        buffers = attention.Buffers(problem, group, gathered)
        return buffers, attention.Inputs.random(problem, group)

    @staticmethod
    def how(problem: AttentionProblem, inputs):
        return attention.how(inputs.q.device)
