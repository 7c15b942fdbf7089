"""GEMM operators in ``tileweave bench``: ours, its two halves, and alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..builtins.errors import TileWeaveError
from ..ops.autotune.trial import Trial, problem_of
from ..ops.core import nccl
from ..ops.core.problem import Problem
from ..ops.core.registry import OPERATORS
from ..ops.core.strategy import Strategy
from ..ops.core.tiles import tiles_for
from ..ops.gemm.gemm_operator import GemmOperator, choice_of, unfused_gemm_strategy
from ..passes.ir.sizes import LARGEST
from ..runtime import compile
from ..runtime.host.group import Group
from .case import (
    ASYNC_TP,
    EXCHANGE,
    NCCL,
    OURS,
    PRODUCT,
    Buffers,
    Case,
    Constructor,
    Family,
    Implementation,
    Missing,
    by_copies,
    by_reference,
    require_gpu,
)
from .programs import matmul_program
from .results import Shape

if TYPE_CHECKING:
    from .selection import BenchOptions

MODELS = {
    "llama8b": (4096, 14336),
    "llama70b": (8192, 28672),
    "llama405b": (16384, 53248),
    "qwen72b": (8192, 29568),
}
"""Hidden and inner size of the MLP. Operators that gather compute its first product, the others its
second."""

ROWS = 1024, 2048, 4096, 8192, 16384
"""Default rows of a model."""


def cases(operator: type[GemmOperator], options: BenchOptions, ranks: int) -> list[Case]:
    """Return a case for each shape of the command line."""
    shapes = shapes_of(operator, options.shapes, options.sizes, options.command)
    return [
        Case(
            operator.op,
            shape,
            FAMILY,
            operations=2 * shape.M * shape.N * shape.K,
            symmetric_bytes=2 * operator.symmetric_elements(shape.M, shape.N, shape.K),
            gathered_bytes=2 * shape.M * shape.K if operator.gathers else 0,
            implementations=IMPLEMENTATIONS,
        )
        for shape in shapes
    ]


def shapes_of(
    operator: type[GemmOperator], names: Iterable[str], rows: Iterable[int], command: str = "bench"
) -> list[Shape]:
    """Return the shapes of the command line: names of models, each combined with all ``rows``, or
    ``MxNxK``. The defaults are one model and ``ROWS``.

    Raises:
        TileWeaveError: a name is neither.
    """
    shapes = []
    for name in names or ("llama70b",):
        sizes = name.split("x")
        if name in MODELS:
            hidden, inner = MODELS[name]
            N, K = (inner, hidden) if operator.gathers else (hidden, inner)
            shapes += [Shape(name, M, N, K) for M in rows or ROWS]
        elif len(sizes) == 3 and all(s.isdecimal() and 0 < int(s) <= LARGEST for s in sizes):
            shapes.append(Shape("", *map(int, sizes)))
        else:
            raise TileWeaveError(
                f"{command}: --shapes {name}; expected {', '.join(MODELS)} or MxNxK (operators "
                "precede the options)"
            )
    return shapes


@dataclass(frozen=True)
class Inputs:
    """Operands of one rank, and the expected results.

    Attributes:
        a, b: the operator's operands.
        rows: first operand of the product, (M, K): the rows of all ranks, or a.
        product: ``rows @ b``, (M, N), in fp32.
        part: ``product`` in the operands' type.
        result: expected result of the operator, in fp32.
    """

    a: Tensor
    b: Tensor
    rows: Tensor
    product: Tensor
    part: Tensor
    result: Tensor

    @staticmethod
    def random(trial: Trial) -> Inputs:
        """Create new inputs. Collective."""
        a, b = trial.inputs()
        rows = trial.rows_of(a)
        product = rows.float() @ b.float()
        return Inputs(a, b, rows, product, product.to(a.dtype), trial.sum_of(product))


def stage(problem: Problem, group: Group) -> tuple[dict[str, Tensor], Iterator[Inputs]]:
    """Return memory for the result and for the product, and inputs, as in ``Family``."""
    trial = Trial(problem, group)
    product = trial.c if problem.gathers else trial.new(problem.M, problem.N)
    inputs = iter(lambda: Inputs.random(trial), None)
    return {"result": trial.c, "product": product}, inputs


def product_program(problem: Problem) -> Any:
    """Return the program of one rank's product."""
    M, N, K = problem.M, problem.N, problem.K
    return matmul_program(M, N, K, problem.tile_dtype, problem.transposed, tiles_for(M, N, 1))


def programs(problem: Problem, group: Group) -> list[Any]:
    """Return the programs that our implementations launch, as in ``Family``."""
    launched = [product_program(problem)]
    if not unfused_gemm_strategy("auto", problem, group.device, group):
        fused = choice_of("auto", problem, group)
        if fused is not None:
            launched += OPERATORS[problem.op].compiled_programs(problem, fused)
    return launched


def choice(problem: Problem, inputs: Inputs) -> Strategy:
    """Return the strategy of our operator, and the reason."""
    return ops.strategy_of(problem.op, inputs.a, inputs.b)


def _operator(buffers: Buffers, strategy: str) -> Implementation:
    operator = getattr(ops, buffers.problem.op)
    return buffers.into(
        "result", lambda inputs, out: operator(inputs.a, inputs.b, out=out, strategy=strategy)
    )


def _cublas(buffers: Buffers) -> Implementation:
    return buffers.into("product", lambda inputs, out: torch.mm(inputs.rows, inputs.b, out=out))


def _tilelang(buffers: Buffers) -> Implementation:
    require_gpu(buffers)
    kernel = compile(product_program(buffers.problem))
    stored = buffers.problem.stored
    return buffers.into("product", lambda inputs, out: kernel(inputs.rows, stored(inputs.b), out))


def _nccl_exchange(buffers: Buffers) -> Implementation:
    problem, group = buffers.problem, buffers.group
    if problem.gathers:
        return Implementation(
            lambda inputs: nccl.all_gather(inputs.a, group), lambda inputs: inputs.rows
        )
    return by_reference(buffers, OPERATORS[problem.op].collective, lambda inputs: inputs.part)


def _copies(buffers: Buffers) -> Implementation:
    problem, plan = buffers.problem, None
    if problem.gathers:
        elements = problem.rows_per_rank * problem.K
        plan = OPERATORS[problem.op].collective.copies(elements, problem.ranks, problem.tile_dtype)
    return by_copies(
        buffers, plan, lambda inputs: inputs.a, expected=lambda inputs: inputs.rows.view(-1)
    )


def _async_tp(buffers: Buffers) -> Implementation:
    """Return PyTorch's async-TP, which overlaps copies and cuBLAS."""
    problem, group = buffers.problem, buffers.group
    require_gpu(buffers)
    if group.process_group is None or group.world_size == 1:
        raise Missing("there is one rank")
    if not (problem.gathers or problem.scatters):
        raise Missing(f"PyTorch has none for {problem.op}")
    import torch.distributed._symmetric_memory  # declares torch.ops.symm_mem

    name = group.process_group.group_name
    try:
        gather = torch.ops.symm_mem.fused_all_gather_matmul
        scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
    except AttributeError as error:
        raise Missing(str(error)) from None
    if problem.gathers:
        # With return_A torch never gathers by NVLink multicast, which our operators do not use.
        return Implementation(
            lambda inputs: gather(inputs.a, [inputs.b], 0, name, return_A=True),
            result=lambda returned: returned[1][0],
        )
    return Implementation(lambda inputs: scatter(inputs.a, inputs.b, "sum", 0, name))


IMPLEMENTATIONS: dict[str, Constructor] = {
    OURS: partial(_operator, strategy="auto"),
    f"{PRODUCT}cublas": _cublas,
    f"{PRODUCT}tilelang": _tilelang,
    f"{EXCHANGE}nccl": _nccl_exchange,
    f"{EXCHANGE}copies": _copies,
    NCCL: partial(_operator, strategy="nccl"),
    ASYNC_TP: _async_tp,
}


FAMILY = Family(
    base=GemmOperator,
    kind=Shape,
    name="gemm",
    example="--shapes 256x512x512",
    cases=cases,
    problem=lambda op, shape, ranks, dtype: problem_of(op, shape.M, shape.N, shape.K, ranks, dtype),
    stage=stage,
    programs=programs,
    choice=choice,
    arguments=lambda problem, inputs: ((inputs.a, inputs.b), {}),
)
