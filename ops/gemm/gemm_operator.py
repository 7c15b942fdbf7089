"""Base class and calls of GEMM operators, and their functions in ``torch.ops.tileweave``."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...runtime import Plan
from ...runtime.host.group import Group
from ...runtime.host.session import Session
from ...runtime.kernel.kernel import capturing
from ..autotune.store import Measurement, agree_on_result, table_for, tuning_key
from ..autotune.tuner import tune_problem
from ..collectives.collective import Collective, Move
from ..core.across_nodes import Mesh, readable, writable
from ..core.agreement import agree
from ..core.autocast import lowers
from ..core.call import Call, CallableOp, Decision, compute
from ..core.checks import check_layout, require_no_overlap, with_packed_strides
from ..core.compiled import shared_by_sizes
from ..core.epilogue import EPILOGUE_SCHEMA, FP8, Epilogue
from ..core.gemm_config import GemmConfig
from ..core.groups import TwoLevels, ranks_of
from ..core.library import define_pair, refuse_gradients
from ..core.noted import note
from ..core.problem import (
    Problem,
    as_kernel_operands,
    checked_problem,
    fp8_obstacle,
    require_operands,
)
from ..core.registry import OPERATORS
from ..core.strategy import FUSED, Strategy, first_possible, obstacle_of_ranks
from ..core.tiles import (
    CANDIDATES,
    FP8_CANDIDATES,
    LARGE,
    Choice,
    Tiles,
    has_room_for_persistent_blocks,
)
from ..core.tiles import FP8 as FP8_TILES
from .cost_model import UNFUSED_HOST_US, estimate_unfused_us

_DTYPES = (torch.bfloat16, torch.float16, FP8)
_ROW = 8
"""Alignment of rows in 16-bit elements: the TMA needs multiples of 16 bytes. For the alignment of
fp8 rows see ``fp8_obstacle``."""
_VARIABLE = "TILEWEAVE_TUNE"
_MOST_CHOICES = 6
"""Maximum number of choices for all numbers of rows, those for CUDA graphs included. Most have one
kernel. By the cost model they take 0 to 2 % longer on average than the best one for each number."""
_MOST_ROWS = 16384
"""Largest number of rows for which they are chosen."""
_MISSING = 100
"""Relative loss of a choice that a size does not have."""
Multiply: TypeAlias = Callable[..., None]
"""Function ``(operator, a, b, out, epilogue)``: all ranks of a node compute ``out`` by an
operator."""


class GemmOperator(CallableOp):
    """GEMM operator compiled for one problem.

    The inputs of a call are a, b, bias, scale_a and scale_b; its options are the group, the
    strategy, and the type of the result.

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
    group_at, guarded = 0, 3
    programs: ClassVar[Mapping[str, Callable[..., Any]]]
    graph_fallback: ClassVar[Mapping[str, str]] = {}
    extra_inputs: ClassVar[
        Mapping[str, Callable[[Problem, Choice, torch.device], tuple[torch.Tensor, ...]]]
    ] = {}
    graph_operator: GemmOperator | None = None

    @classmethod
    def program(cls, problem: Problem, choice: Choice) -> tirx.PrimFunc | Plan:
        """Return one of ``programs``, instantiated for a problem. Those for different rows share
        kernels."""
        program = cls.programs[choice.program](GemmConfig.of(problem, choice.tiles))
        return shared_by_sizes(program, problem, rows=0)

    def __init__(self, problem: Problem, choice: Choice, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective.

        Raises:
            HeapExhausted: the heap is too small; nothing stays allocated.
        """
        graph_choice = self.graph_choice(problem, choice)
        super().__init__(problem, choice, session)
        self.problem, self.choice = problem, choice
        extra_inputs = self.extra_inputs.get(choice.program)
        device = session.group.device
        self.fixed_inputs = extra_inputs(problem, choice, device) if extra_inputs else ()
        with ExitStack() as failed:
            failed.callback(self.free)
            if graph_choice != choice:
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
        """Return what CUDA graphs record where calls run ``choice``: itself, or where its program
        has a ``graph_fallback``, that with large tiles or a choice of other numbers of rows. A
        graph edge cannot let a kernel begin before copies that wait for it, and such copies may
        delay the kernel."""
        if choice.program not in cls.graph_fallback:
            return choice
        tiles = FP8_TILES if problem.scaled else LARGE
        fallback = Choice(cls.graph_fallback[choice.program], tiles)
        few = _few_choices(cls, replace(problem, rows=0))
        others = [other for other in few if other.program not in cls.graph_fallback]
        options = cls.options(problem)
        legal = [other for other in (fallback, *others) if other in options]
        return min(legal or [fallback], key=lambda other: options.get(other, 0.0))

    @classmethod
    def compiled_programs(cls, problem: Problem, choice: Choice) -> list[tirx.PrimFunc | Plan]:
        choices = dict.fromkeys((choice, cls.graph_choice(problem, choice)))
        return [cls.program(problem, option) for option in choices]

    @classmethod
    def similar_programs(cls, problem: Problem, choice: Choice) -> list[tirx.PrimFunc | Plan]:
        rows, *_ = problem.shards
        return [
            program
            for n in similar_rows(rows, choice.tiles.M)
            for program in cls.compiled_programs(
                replace(problem, rows=problem.rows // rows * n), choice
            )
        ]

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
    def predicted(cls, problem: Problem) -> tuple[float, float]:
        """Return the estimated times in us of ``table`` and ``unfused``."""
        sizes = problem.M, problem.N, problem.K, problem.moved_bytes
        fused = cls.options(problem)[cls.table(problem)]
        return fused, estimate_unfused_us(*sizes, problem.itemsize)

    @classmethod
    def table(cls, problem: Problem) -> Choice:
        """Return the choice without tuning: the fastest of the few that problems of any number of
        rows use. It depends only on the problem and the kind of GPU."""
        options, few = cls.options(problem), _few_choices(cls, replace(problem, rows=0))
        possible = [choice for choice in few if choice in options] or options
        return min(possible, key=lambda choice: options[choice])

    @classmethod
    def choices(cls, problem: Problem, choice: Choice) -> list[tuple[Problem, Choice]]:
        any_rows = replace(problem, rows=0)
        few = _few_choices(cls, any_rows)
        return [(any_rows, other) for other in few] if choice in few else []  # else it is tuned

    @classmethod
    def sizes(cls, problem: Problem, choice: Choice) -> list[Problem]:
        return [other for other in _sizes(problem, 0.25) if cls.table(other) == choice]

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

    @classmethod
    def decide(cls, call: Call) -> Decision:
        """Check a call, and decide how to compute it. The obstacles that keep a problem from being
        fused may change, other decisions hold until the next tuning or session."""
        a, b, epilogue = arguments_of(call)
        require_operands(cls.op, a, b, call.out, epilogue)
        if call.out is not None:
            cls.check_memory(call.inputs, call.out, ())
            check_layout(cls.op, call.out)
        ranks = ranks_of(call.group)
        problem = checked_problem(cls.op, a, b, ranks.world_size, call.out, epilogue)
        if isinstance(ranks, TwoLevels):
            part = cls.within(problem, ranks)
            unfused_gemm_strategy(call.requested, replace(part, op=cls.op), a.device, ranks.node)
            agree(ranks, problem, call.requested)
            return Decision(problem, ranks, None)
        choice = cls.choose(problem, ranks, call.requested, a.device)
        return Decision(problem, ranks, choice, is_lasting=choice != "nccl")

    @classmethod
    def choose(
        cls, problem: Problem, ranks: Group, requested: str, device: torch.device
    ) -> Choice | str | None:
        unfused = unfused_gemm_strategy(requested, problem, device, ranks)
        agree(ranks, problem, unfused.name if unfused else requested)
        return unfused.name if unfused else choice_of(requested, problem, ranks)

    @classmethod
    def check_memory(
        cls, inputs: Sequence[Any], out: torch.Tensor, results: Sequence[torch.Tensor | None]
    ) -> None:
        named = zip((*cls.arguments, "bias"), inputs[: cls.guarded], strict=True)
        require_no_overlap(cls.op, out, **dict(named))

    @classmethod
    def compute_unfused(cls, call: Call, decision: Decision) -> torch.Tensor:
        a, b, epilogue, c = operands_of(call, decision)
        ranks, requested = decision.group, call.requested
        if not isinstance(ranks, TwoLevels):
            cls.unfused(a, b, c, ranks, epilogue)
            return c
        transport = "nccl" if requested == "nccl" else "auto"
        move = cls.collective.in_node(ranks, transport)
        with Mesh.of(cls.op, ranks, a.device) as mesh:
            cls.across(_in_node(ranks, requested), move, a, b, c, epilogue, mesh)
        return c

    @classmethod
    def prepared(
        cls, call: Call, decision: Decision
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        a, b, epilogue, c = operands_of(call, decision)
        return (a, b, *epilogue.tensors), c


def _sizes(problem: Problem, step: float = 0.9) -> list[Problem]:
    """Return problems of few to many rows, else like ``problem``.

    Args:
        step: logarithm to base 2 of the ratio of a number of rows and the one before it.
    """
    unit = 1 if problem.gathers else problem.ranks
    logarithms = np.arange(0, np.log2(_MOST_ROWS // problem.ranks) + step, step)
    rows = dict.fromkeys(int(n) for n in np.round(2**logarithms))
    return [replace(problem, rows=unit * n) for n in rows]


@lru_cache(maxsize=256)
def _few_choices(operator: type[GemmOperator], problem: Problem) -> tuple[Choice, ...]:
    """Return the choices for problems of any number of rows, else like ``problem``.

    The first is the best one for the largest size. The others are found one by one: each lowers the
    mean square of the relative losses most, against a choice for each size alone.
    """
    times = [operator.options(other) for other in _sizes(problem)]
    choices = list(dict.fromkeys(choice for of_size in times for choice in of_size))
    losses = np.array([
        [of_size[c] / min(of_size.values()) - 1 if c in of_size else _MISSING for c in choices]
        for of_size in times
    ])  # fmt: skip
    few = [int(losses[-1].argmin())]
    most = _MOST_CHOICES - len(operator.graph_fallback)
    while len(few) < most and (left := losses[:, few].min(1)).any():
        few.append(int((np.minimum(left[:, None], losses) ** 2).mean(0).argmin()))
    return tuple(choices[n] for n in few)


def similar_rows(rows: int, tile: int) -> list[int]:
    """Return other numbers of rows of a shard. Most of their programs differ from that for ``rows``
    in integers only.

    The numbers have no simple ratio, so that integers of different meaning differ for some. Most
    end within a tile, so the kernel fits these and whole tiles.

    Args:
        tile: rows of a tile.
    """
    if rows <= tile:
        others = [tile // 2 + 1, tile // 4, tile - 3, 1]
    else:
        others = [rows + 5, tile + 5, 3 * tile + tile // 2 + 1, 37 * tile + tile // 3]
    return [n for n in others if n not in (0, rows)]


def unfused_gemm_strategy(
    requested: str, problem: Problem, device: torch.device, group: Group
) -> Strategy | None:
    """Return ``nccl``, with the reason, if it is requested or the problem cannot be fused; else
    None."""
    strategy = first_possible(
        requested, problem.op, device, group, FUSED, FUSED,
        lambda _: obstacle(problem, device, group), Strategy,
    )  # fmt: skip
    return strategy if strategy.name == "nccl" else None


def obstacle(problem: Problem, device: torch.device, group: Group) -> str | None:
    """Return why a problem cannot be fused, with what is expected; else None."""
    reason = obstacle_of_ranks(device, group, uses_wgmma=True)
    if reason is not None:
        return reason
    if problem.dtype not in _DTYPES:
        return f"the tensors are of {problem.dtype}; expected {' or '.join(map(str, _DTYPES))}"
    for name, extent in (("N", problem.N), ("K", problem.K)):
        if extent % _ROW:
            return f"{name}={extent}; expected a multiple of {_ROW}"
    return fp8_obstacle(problem) if problem.scaled else None


def choice_of(requested: str, problem: Problem, group: Group) -> Choice | None:
    """Return how a problem that can be fused is computed; None for NCCL and cuBLAS.

    Collective for each new problem, which is tuned first if ``TILEWEAVE_TUNE`` is 1.

    Args:
        requested: ``auto`` or ``fused``.
    """
    operator = OPERATORS[problem.op]
    problem, results = tuning_key(problem), table_for(group)
    if problem not in results and not capturing():  # a capture compiles nothing
        tune = (lambda: tune_problem(problem, group).measured) if _tuning_enabled() else None
        results[problem] = agree_on_result(problem, group, tune)
    return _choice_of_measured(requested, problem, results.get(problem), operator, capturing())


@lru_cache(maxsize=1024)
def _choice_of_measured(
    requested: str, problem: Problem, measured: Measurement | None, operator: type[GemmOperator],
    is_captured: bool,
) -> Choice | None:  # fmt: skip
    """Return the result of ``choice_of``. Calls that a CUDA graph captures decide each time."""
    if preferred_strategy(requested, problem, measured, is_captured).name == "nccl":
        return None
    return operator.table(problem) if measured is None else measured.choice


def preferred_strategy(
    requested: str, problem: Problem, measured: Measurement | None, is_captured: bool = False
) -> Strategy:
    """Return the strategy for a problem that can be fused.

    Args:
        requested: ``auto`` or ``fused``.
        measured: result of tuning, if there is one.
        is_captured: whether a CUDA graph captures the call.

    Raises:
        TileWeaveError: every fused program gave wrong results in tuning.
    """
    if requested == "auto":
        return predicted_strategy(problem, is_captured) if measured is None else measured.strategy
    if requested == "fused" and measured is not None and measured.choice is None:
        raise TileWeaveError(
            f"{problem.op}: strategy='fused', but {measured.strategy.reason}; expected 'auto' or "
            "'nccl'"
        )
    return Strategy(requested, "asked for")


def predicted_strategy(problem: Problem, is_captured: bool = False) -> Strategy:
    """Return the strategy that the cost model predicts to be faster. A call by NCCL needs at least
    the time of the host, unless a CUDA graph captures it."""
    fused, nccl = OPERATORS[problem.op].predicted(problem)
    if problem.ranks > 1 and not is_captured:
        nccl = max(nccl, UNFUSED_HOST_US)
    name = "fused" if fused <= nccl else "nccl"
    return Strategy(name, f"predicted: fused {fused / 1e3:.3f} ms, nccl {nccl / 1e3:.3f} ms")


def _tuning_enabled() -> bool:
    value = os.environ.get(_VARIABLE, "0")
    if value not in ("0", "1"):
        raise TileWeaveError(f"{_VARIABLE}={value!r}; expected 0 or 1")
    return value == "1"


def arguments_of(call: Call) -> tuple[torch.Tensor, torch.Tensor, Epilogue]:
    """Return the arguments of a GEMM."""
    a, b, *tensors = call.inputs
    return a, b, Epilogue(*tensors, call.options[-1])


def operands_of(
    call: Call, decision: Decision
) -> tuple[torch.Tensor, torch.Tensor, Epilogue, torch.Tensor]:
    """Return the arguments of a GEMM as kernels can read them, and memory for the result."""
    problem, out = decision.problem, call.out
    a, b, epilogue = as_kernel_operands(problem, *arguments_of(call))
    if out is not None:
        return a, b, epilogue, with_packed_strides(out)
    return a, b, epilogue, a.new_empty(problem.shape, dtype=problem.out_dtype)


def _in_node(ranks: TwoLevels, requested: str) -> Multiply:
    """Return the function that calls operators of the ranks of this node, on tensors of any
    alignment."""

    def multiply(operator: type[GemmOperator], a, b, out, epilogue: Epilogue) -> None:
        *tensors, out_dtype = epilogue
        options = ranks.node_name, requested, out_dtype
        with writable(out) as memory:
            compute(operator.op, (readable(a), b, *tensors), memory, options)

    return multiply


def define_gemm(operator: type[GemmOperator]) -> None:
    """Register ``torch.ops.tileweave.name``, which returns one result of ``a @ b`` on each rank,
    and ``name_out``, which has no gradient."""
    name = operator.op

    def fake(inputs, out, options):
        (a, b, *tensors), (group, requested, out_dtype) = inputs, options
        epilogue = Epilogue(*tensors, out_dtype)
        problem = checked_problem(name, a, b, ranks_of(group).world_size, out, epilogue)
        note(problem, group, requested, a.device)
        return a.new_empty(problem.shape, dtype=problem.out_dtype) if out is None else None

    def check(inputs, out, options):
        a, b, *tensors = inputs
        epilogue = Epilogue(*tensors, options[-1])
        require_operands(name, a, b, out, epilogue)
        refuse_gradients(name, out, a, b, *epilogue.tensors)

    define_pair(
        name, "Tensor a, Tensor b", f"str group, str strategy, {EPILOGUE_SCHEMA}",
        partial(compute, name), fake, check, gradient=(_save, operator.gradients),
        casts=lowers("a", "b", "bias"),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    a, b, ctx.group, ctx.strategy, *_ = inputs
    ctx.save_for_backward(a, b)
