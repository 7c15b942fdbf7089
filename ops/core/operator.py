"""Base class of GEMM operators: their programs, the choice among them, and the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from tvm import tirx

from ...runtime import Plan
from ...runtime.host.group import Group
from ...runtime.host.session import Session
from ...runtime.kernel.kernel import capturing
from .call import CallableOp
from .epilogue import Epilogue
from .gemm_config import GemmConfig
from .groups import TwoLevels
from .problem import Problem
from .tiles import (
    CANDIDATES,
    FP8_CANDIDATES,
    Tiles,
    has_room_for_persistent_blocks,
    tiles_for,
)

if TYPE_CHECKING:
    from ..collectives.collective import Collective, Move
    from .across_nodes import Mesh


Multiply: TypeAlias = Callable[..., None]
"""Function ``(operator, a, b, out, epilogue)``: all ranks of a node compute ``out`` by an
operator."""


@dataclass(frozen=True)
class Choice:
    """Program and tiles of a fused kernel.

    Attributes:
        program: one of the names in ``Operator.programs``.
        tiles: tiles for which the program is instantiated.
    """

    program: str
    tiles: Tiles

    def __str__(self) -> str:
        return f"{self.program}, {self.tiles}"


class Operator(CallableOp, ABC):
    """GEMM operator compiled for one problem.

    Attributes:
        collective: collective that the operator fuses with its product.
        gathers: whether the collective precedes the product and gathers its rows; else it follows
            the product and adds.
        scatters: whether each rank receives some rows of the sum; else all of them.
        programs: tile programs or plans by ``Choice.program``.
        graph_fallback: by the name of a program whose kernel and copies wait for each other, and
            so must run concurrently: the program that replaces it where they may not.
        extra_inputs: by the name of a program, a function that returns the inputs that no caller
            passes, on a device.
        problem, choice: the problem, and how it is computed.
        graph_operator: operator that CUDA graphs record instead; None if they record this one.
    """

    collective: ClassVar[type[Collective]]
    gathers: ClassVar[bool] = False
    scatters: ClassVar[bool] = False
    arguments = ("a", "b")
    programs: ClassVar[Mapping[str, Callable[..., Any]]]
    graph_fallback: ClassVar[Mapping[str, str]] = {}
    extra_inputs: ClassVar[
        Mapping[str, Callable[[Problem, Choice, torch.device], tuple[torch.Tensor, ...]]]
    ] = {}
    graph_operator: Operator | None = None

    @classmethod
    def program(cls, problem: Problem, choice: Choice) -> tirx.PrimFunc | Plan:
        """Return one of ``programs``, instantiated for a problem."""
        return cls.programs[choice.program](GemmConfig.of(problem, choice.tiles))

    def __init__(self, problem: Problem, choice: Choice, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective.

        Raises:
            HeapExhausted: the heap is too small; nothing stays allocated.
        """
        super().__init__(self.program(problem, choice), session)
        self.problem, self.choice = problem, choice
        extra_inputs = self.extra_inputs.get(choice.program)
        device = session.group.device
        self.fixed_inputs = extra_inputs(problem, choice, device) if extra_inputs else ()
        with ExitStack() as failed:
            failed.callback(self.free)
            if (graph_choice := self.graph_choice(problem, choice)) != choice:
                self.graph_operator = type(self)(problem, graph_choice, session)
            failed.pop_all()

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Compute c from a, b and ``Epilogue.tensors``; c is the last of ``tensors``. Every rank
        calls it."""
        operator = self.graph_operator if self.graph_operator is not None and capturing() else self
        operator.enqueue(*operator.declared(*tensors))

    def declared(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        a, b, *epilogue, c = tensors
        return [a, self.problem.stored(b), *epilogue], c

    def free(self) -> None:
        """Free its symmetric memory. Collective."""
        if self.graph_operator is not None:
            self.graph_operator.free()
        super().free()

    @staticmethod
    @abstractmethod
    def unfused(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, group: Group, epilogue: Epilogue
    ) -> Any:
        """Compute ``c`` by ``torch.distributed`` and ``torch.mm``, on any device."""

    @staticmethod
    @abstractmethod
    def within(problem: Problem, ranks: TwoLevels) -> Problem:
        """Return the problem of the calls within the node that ``across`` makes."""

    @staticmethod
    @abstractmethod
    def across(
        multiply: Multiply, move: Move, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
        epilogue: Epilogue, mesh: Mesh,
    ) -> None:  # fmt: skip
        """Compute ``c`` on the ranks of several nodes.

        Args:
            multiply: calls an operator of the ranks of a node.
            move: calls a collective of the ranks of a node.
        """

    @classmethod
    def graph_choice(cls, problem: Problem, choice: Choice) -> Choice:
        """Return what CUDA graphs record where calls run ``choice``: the ``graph_fallback`` of its
        program. A graph edge cannot let a kernel begin before copies that wait for it, and such
        copies may delay the kernel."""
        if choice.program not in cls.graph_fallback:
            return choice
        return cls.default_choice(problem, cls.graph_fallback[choice.program])

    @staticmethod
    def default_choice(problem: Problem, program: str) -> Choice:
        """Return a program with the tiles that it has without a prediction and a measurement."""
        return Choice(program, tiles_for(*problem.shards, problem.itemsize))

    @classmethod
    def compiled_programs(cls, problem: Problem, choice: Choice) -> list[tirx.PrimFunc | Plan]:
        """Return all programs that are compiled for ``choice``."""
        choices = dict.fromkeys((choice, cls.graph_choice(problem, choice)))
        return [cls.program(problem, option) for option in choices]

    @staticmethod
    @abstractmethod
    def gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
        """Return the gradients of the arguments of ``torch.ops.tileweave``, given that of the
        result.

        Args:
            ctx: has saved a and b, and holds ``group`` and ``strategy``.
        """

    @staticmethod
    @abstractmethod
    def symmetric_elements(M: int, N: int, K: int) -> int:
        """Return the most elements of symmetric memory that a rank needs for a GEMM of the whole
        group, without counters and tails."""

    @staticmethod
    @abstractmethod
    def estimates(problem: Problem) -> Mapping[Choice, float]:
        """Return the estimated time in us of each choice that is legal without tuning, see
        ``cost_model``."""

    @classmethod
    def suits(cls, problem: Problem, program: str) -> bool:
        """Return whether ``fused`` may choose a program for a problem, and the GPU has enough SMs
        for it."""
        return program not in cls.graph_fallback or has_room_for_persistent_blocks()

    @classmethod
    def options(cls, problem: Problem) -> dict[Choice, float]:
        """Return the ``estimates`` of the choices that suit the problem."""
        estimates = cls.estimates(problem).items()
        return {choice: us for choice, us in estimates if cls.suits(problem, choice.program)}

    @classmethod
    @abstractmethod
    def predicted(cls, problem: Problem) -> tuple[float, float]:
        """Return the estimated times in us of ``table`` and ``unfused``."""

    @classmethod
    def table(cls, problem: Problem) -> Choice:
        """Return the choice without tuning: the fastest of ``options``. It depends only on the
        problem and the kind of GPU."""
        options = cls.options(problem)
        return min(options, key=lambda choice: options[choice])

    @classmethod
    def tuning_tiles(cls, problem: Problem) -> tuple[Tiles, ...]:
        """Return the tiles with which tuning measures each program."""
        return FP8_CANDIDATES if problem.scaled else CANDIDATES

    @classmethod
    def has_choice(cls, problem: Problem, choice: Choice) -> bool:
        """Return whether this version has ``choice``, which another version may have stored."""
        is_tried = choice.program in cls.programs and choice.tiles in cls.tuning_tiles(problem)
        return is_tried or choice in cls.options(problem)

    @classmethod
    def candidates(cls, problem: Problem) -> list[Choice]:
        """Return the choices that tuning measures: ``options``, and every program with all of
        ``tuning_tiles``."""
        programs = [p for p in cls.programs if cls.suits(problem, p)]
        choices = [Choice(p, tiles) for p in programs for tiles in cls.tuning_tiles(problem)]
        return list(dict.fromkeys([*cls.options(problem), *choices]))
