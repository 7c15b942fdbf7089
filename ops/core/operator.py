"""What an operator's file declares: its programs, which of them serves a problem, and the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tvm import tirx

from ...runtime import Plan
from ...runtime.host.group import Group
from ...runtime.kernel.kernel import capturing
from ..autotune.cost_model import estimate_unfused_us
from .compiled import CompiledOp
from .epilogue import Epilogue
from .problem import Problem
from .tiles import (
    CANDIDATES,
    FP8_CANDIDATES,
    Tiles,
    has_room_for_walks,
    tiles_for,
)


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


class Operator(CompiledOp, ABC):
    """An operator compiled for one problem. A subclass is made known by the operator's name:
    ``class MatmulReduceScatter(Operator, op="matmul_reduce_scatter")``.

    Attributes:
        programs: the tile programs, or plans, by the names of ``Choice.program``.
        graph_fallback: by the name of a program whose kernel and copies wait for each other, so that they
            must run side by side: the one that is taken where that is not sure.
        extra_inputs: by the name of a program, what it takes that no caller gives, for a problem.
        problem, choice: what it computes, and how.
        in_graphs: what CUDA graphs record instead, if that is something else.
    """

    programs: ClassVar[Mapping[str, Callable[..., Any]]]
    graph_fallback: ClassVar[Mapping[str, str]] = {}
    extra_inputs: ClassVar[Mapping[str, Callable[[Problem, Choice], tuple[torch.Tensor, ...]]]] = {}
    in_graphs: Operator | None = None

    def __init_subclass__(cls, op: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        OPERATORS[op] = cls

    @classmethod
    def program(cls, problem: Problem, choice: Choice) -> tirx.PrimFunc | Plan:
        """One of ``programs``, for a problem."""
        rows, N, _ = problem.shards
        return cls.programs[choice.program](
            rows, N, problem.K, problem.ranks, problem.tile_dtype, problem.transposed,
            choice.tiles, problem.biased, problem.tile_out_dtype,
        )  # fmt: skip

    def __init__(self, problem: Problem, choice: Choice) -> None:
        """Compile, and take symmetric memory. Collective.

        Raises:
            HeapExhausted: there is not enough of it; nothing is taken then.
        """
        super().__init__(self.program(problem, choice))
        self.problem, self.choice = problem, choice
        extra_inputs = self.extra_inputs.get(choice.program)
        self.given = extra_inputs(problem, choice) if extra_inputs else ()
        with ExitStack() as failed:
            failed.callback(self.free)
            if (recorded := self.recorded(problem, choice)) != choice:
                self.in_graphs = type(self)(problem, recorded)
            failed.pop_all()

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *epilogue: torch.Tensor
    ) -> None:
        """Compute ``c``. Every rank calls it, with ``Epilogue.tensors``."""
        made = self.in_graphs if self.in_graphs is not None and capturing() else self
        made.enqueue(*made.declared(a, b, c, *epilogue))

    def declared(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *epilogue: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What ``enqueue`` takes, at the same places: inputs in the order of a call, and ``c``."""
        return [a, self.problem.stored(b), *epilogue], c

    def free(self) -> None:
        """Give its symmetric memory back. Collective."""
        if self.in_graphs is not None:
            self.in_graphs.free()
        super().free()

    @staticmethod
    @abstractmethod
    def unfused(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, group: Group, epilogue: Epilogue
    ) -> Any:
        """Compute ``c`` by ``torch.distributed`` and ``torch.mm``, on any device."""

    @classmethod
    def recorded(cls, problem: Problem, choice: Choice) -> Choice:
        """What CUDA graphs record where calls run ``choice``: programs that run ``alone``. No edge
        of a graph lets a kernel begin before copies that wait for it, and those may hold it up."""
        if choice.program not in cls.graph_fallback:
            return choice
        return Choice(
            cls.graph_fallback[choice.program], tiles_for(*problem.shards, problem.itemsize)
        )

    @classmethod
    def launched(cls, problem: Problem, choice: Choice) -> list[tirx.PrimFunc | Plan]:
        """All that is compiled for ``choice``."""
        choices = dict.fromkeys((choice, cls.recorded(problem, choice)))
        return [cls.program(problem, each) for each in choices]

    @staticmethod
    @abstractmethod
    def estimates(problem: Problem) -> Mapping[Choice, float]:
        """The time in us of what may be taken where nothing was measured, see ``forecast``."""

    @classmethod
    def suits(cls, problem: Problem, program: str) -> bool:
        """Whether one of ``programs`` is for a problem, and the GPU is large enough for it."""
        return program not in cls.graph_fallback or has_room_for_walks()

    @classmethod
    def options(cls, problem: Problem) -> dict[Choice, float]:
        """``estimates`` of what suits the problem."""
        every = cls.estimates(problem).items()
        return {choice: us for choice, us in every if cls.suits(problem, choice.program)}

    @classmethod
    def predicted(cls, problem: Problem) -> tuple[float, float]:
        """How long ``table`` takes, and ``unfused``, in us."""
        sizes = problem.M, problem.N, problem.K, problem.moved_bytes
        return min(cls.options(problem).values()), estimate_unfused_us(*sizes, problem.itemsize)

    @classmethod
    def table(cls, problem: Problem) -> Choice:
        """What is taken where nothing was measured: of ``options`` the fastest. It depends on the
        problem and the kind of GPU alone."""
        options = cls.options(problem)
        return min(options, key=lambda choice: options[choice])

    @classmethod
    def tiles_tried(cls, problem: Problem) -> tuple[Tiles, ...]:
        """Those with which tuning measures each of ``programs``."""
        return FP8_CANDIDATES if problem.scaled else CANDIDATES

    @classmethod
    def may_take(cls, problem: Problem, choice: Choice) -> bool:
        """Whether ``choice``, which another version may have made, is one of this one's."""
        is_tried = choice.program in cls.programs and choice.tiles in cls.tiles_tried(problem)
        return is_tried or choice in cls.options(problem)

    @classmethod
    def candidates(cls, problem: Problem) -> list[Choice]:
        """What tuning measures: ``options``, and every program with all tiles that are tried."""
        programs = [p for p in cls.programs if cls.suits(problem, p)]
        every = [Choice(p, tiles) for p in programs for tiles in cls.tiles_tried(problem)]
        return list(dict.fromkeys([*cls.options(problem), *every]))


OPERATORS: dict[str, type[Operator]] = {}
"""By the operators' names."""
