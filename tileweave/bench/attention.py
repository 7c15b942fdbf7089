"""Attention in ``tileweave bench``: our operator, the kernel of one rank without communication, and
alternatives for a sharded sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..builtins.errors import TileWeaveError
from ..ops.attention.flash import tiles_for
from ..ops.attention.problem import AttentionProblem, checked_attention
from ..ops.attention.sequence import Sharding, require_chunks
from ..ops.attention.sp_attention import SpAttention, sp_attention_plan
from ..ops.core.strategy import Strategy
from ..passes.ir.sizes import LARGEST
from ..runtime.host.group import Group
from .case import (
    GATHER,
    LOCAL,
    OURS,
    RING,
    SDPA,
    Buffers,
    Case,
    Constructor,
    Family,
    Implementation,
    Missing,
    by_call,
    require_gpu,
)
from .programs import local_attention_plan
from .results import Length
from .sdpa import BACKENDS, backend_of, by_rank, exact, in_order, of_rank, ring, row_error

if TYPE_CHECKING:
    from .selection import BenchOptions

LENGTHS = tuple(1 << power for power in range(13, 19))
"""Default lengths: rows of all ranks together, 8k to 256k."""
_SAMPLE = 64
"""Number of rows per rank whose expected results are computed in fp32."""


def cases(operator: type[SpAttention], options: BenchOptions, ranks: int) -> list[Case]:
    """Return a case for each length, batch and mask of the command line."""
    return [
        Case(
            operator.op,
            shape,
            FAMILY,
            operations=4 * shape.batch * shape.heads * shape.length**2 * shape.head_dim,
            symmetric_bytes=2 * gathered_bytes(shape),
            gathered_bytes=gathered_bytes(shape),
            implementations=IMPLEMENTATIONS,
        )
        for shape in shapes_of(options, ranks)
    ]


def shapes_of(options: BenchOptions, ranks: int) -> list[Length]:
    """Return the shapes of the command line, with causal and with full masks."""
    return [
        Length(batch, length, *heads, causal, options.layout, ranks)
        for causal in (True, False)
        for heads in heads_of(options.shapes)
        for batch in options.batches or (1,)
        for length in options.sizes or LENGTHS
    ]


def heads_of(shapes: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return heads of queries, heads of keys and values, and their dimension, of each shape.

    Raises:
        TileWeaveError: a shape has another form.
    """
    legal = []
    for shape in shapes or ("32x8x128",):
        numbers = shape.split("x")
        if len(numbers) != 3 or not all(n.isdecimal() and 0 < int(n) <= LARGEST for n in numbers):
            raise TileWeaveError(f"bench: --shapes {shape}; expected HEADSxKV_HEADSxHEAD_DIM")
        heads, kv_heads, head_dim = map(int, numbers)
        legal.append((heads, kv_heads, head_dim))
    return legal


def gathered_bytes(shape: Length) -> int:
    """Return the bytes of the keys and values of all ranks, in 2-byte values."""
    return 2 * 2 * shape.batch * shape.length * shape.kv_heads * shape.head_dim


def problem_of(op: str, shape: Length, ranks: int, dtype: torch.dtype) -> AttentionProblem:
    """Return the problem of each rank.

    Raises:
        TileWeaveError: the number of ranks does not divide the rows, or the heads do not fit.
    """
    sharding = Sharding.checked(op, shape.layout, ranks)
    require_chunks(op, f"length={shape.length}", shape.length, sharding)
    rows = shape.length // ranks
    q, k, v = (
        torch.empty(shape.batch, rows, heads, shape.head_dim, dtype=dtype, device="meta")
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return checked_attention(q, k, v, ranks, causal=shape.causal, layout=shape.layout)


@dataclass(frozen=True)
class Inputs:
    """Operands of one rank, keys and values of all ranks, and the expected result.

    Attributes:
        q, k, v: tensors of the rank, (batch, rows, heads, head_dim).
        k_by_rank, v_by_rank: keys and values of all ranks in the order of an all-gather,
            (ranks, batch, rows, heads, head_dim).
        k_all, v_all: keys and values in sequence order, (batch, length, heads, head_dim).
        result: expected result of the rank, in fp32: some rows by ``exact``, the others by PyTorch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_by_rank: Tensor
    v_by_rank: Tensor
    k_all: Tensor
    v_all: Tensor
    result: Tensor

    @staticmethod
    def random(problem: AttentionProblem, group: Group) -> Iterator[Inputs]:
        """Yield new inputs from N(0, 1). Collective."""
        generator = torch.Generator(group.device).manual_seed(group.rank)

        def normal(heads: int) -> Tensor:
            extents = problem.batch, problem.q_rows, heads, problem.dim
            return torch.empty(extents, dtype=problem.dtype, device=group.device).normal_(
                generator=generator
            )

        while True:
            q, k, v = (
                normal(heads) for heads in (problem.heads, problem.kv_heads, problem.kv_heads)
            )
            k_by_rank, v_by_rank = (by_rank(x, group) for x in (k, v))
            k_all, v_all = (in_order(problem, x) for x in (k_by_rank, v_by_rank))
            sample = torch.randperm(problem.q_rows, generator=generator, device=group.device)
            sample = sample[:_SAMPLE]
            sample[0], sample[-1] = 0, problem.q_rows - 1
            result = expected_of(problem, group, q, k_all, v_all, sample)
            yield Inputs(q, k, v, k_by_rank, v_by_rank, k_all, v_all, result)


def expected_of(
    problem: AttentionProblem, group: Group, q: Tensor, k: Tensor, v: Tensor, sample: Tensor
) -> Tensor:
    """Return a rank's expected result: rows of ``sample`` in fp32 by ``exact``, the others by
    PyTorch."""
    backend, *_ = BACKENDS[group.device.type].values()
    result = of_rank(backend, problem, group.rank, q, k, v).float()
    length = problem.k_total
    num_keys = torch.full_like(sample, length)
    if problem.causal:
        num_keys = problem.sharding.position(sample, group.rank, length) + 1
    result[:, sample] = exact(q[:, sample], k, v, num_keys)
    return result


def programs(problem: AttentionProblem, group: Group) -> list[Any]:
    """Return the plans that our implementations launch, as in ``Family``."""
    tiles = tiles_for(problem)
    return [sp_attention_plan(problem, tiles), local_attention_plan(problem, tiles)]


def _strategy(device: torch.device) -> Strategy:
    """Return the strategy of our operator, and the reason."""
    if device.type == "cuda":
        return Strategy("fused", "asked for")
    return Strategy("nccl", f"the tensors are on {device.type}; expected cuda")


def arguments(
    problem: AttentionProblem, inputs: Inputs
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the arguments of the operator, as in ``Family``."""
    return (inputs.q, inputs.k, inputs.v), {"causal": problem.causal, "layout": problem.layout}


def _ours(buffers: Buffers) -> Implementation:
    strategy = _strategy(buffers.group.device).name
    operator = partial(getattr(ops, buffers.problem.op), strategy=strategy)
    return by_call(buffers, operator, arguments, row_error)


def _local(buffers: Buffers) -> Implementation:
    """Return our kernel with the keys and values of all ranks present from the start."""
    problem, group = buffers.problem, buffers.group
    require_gpu(buffers)
    if buffers.gathered is None:
        raise Missing("the symmetric heap has no room")
    run = local_attention_plan(problem, tiles_for(problem))
    parts, width = problem.sharding.parts, problem.kv_heads * problem.dim
    shape = problem.ranks, problem.batch, problem.k_rows, width
    room = buffers.gathered.all[:, : 2 * prod(shape)].unflatten(1, (2, *shape))
    k_all, v_all = room[:, 0], room[:, 1]

    def prepare(inputs: Inputs) -> None:
        for memory, rows in ((k_all, inputs.k_by_rank), (v_all, inputs.v_by_rank)):
            memory[group.rank].copy_(rows.flatten(3))

    def call(inputs: Inputs) -> Tensor:
        out = torch.empty_like(inputs.q)
        lse = out.new_empty(problem.lse_shape, dtype=torch.float32)
        q, o = (x.unflatten(1, (parts, -1)) for x in (inputs.q, out))
        run(q, k_all, v_all, o, lse.unflatten(2, (parts, -1)))
        return out

    return Implementation(call, prepare=prepare, error=row_error)


def _sdpa(buffers: Buffers, name: str) -> Implementation:
    problem, rank = buffers.problem, buffers.group.rank
    backend = backend_of(name, buffers.group.device)
    return Implementation(
        lambda inputs: of_rank(backend, problem, rank, inputs.q, inputs.k_all, inputs.v_all),
        error=row_error,
    )


def _gather(buffers: Buffers, name: str) -> Implementation:
    backend, problem, group = backend_of(name, buffers.group.device), buffers.problem, buffers.group

    def call(inputs: Inputs) -> Tensor:
        k, v = (in_order(problem, by_rank(x, group)) for x in (inputs.k, inputs.v))
        return of_rank(backend, problem, group.rank, inputs.q, k, v)

    return Implementation(call, error=row_error)


def _ring(buffers: Buffers, name: str) -> Implementation:
    backend, problem, group = backend_of(name, buffers.group.device), buffers.problem, buffers.group
    if group.device.type == "cuda" and group.shares_gpus:
        raise Missing("ranks share a GPU, and gloo cannot send from its memory")
    return Implementation(
        lambda inputs: ring(backend, problem, group, inputs.q, inputs.k, inputs.v), error=row_error
    )


IMPLEMENTATIONS: dict[str, Constructor] = {
    OURS: _ours,
    LOCAL: _local,
    **{f"{SDPA}{name}": partial(_sdpa, name=name) for name in BACKENDS["cuda"]},
    **{f"{GATHER}{name}": partial(_gather, name=name) for name in BACKENDS["cuda"]},
    **{f"{RING}{name}": partial(_ring, name=name) for name in BACKENDS["cuda"]},
}

FAMILY = Family(
    base=SpAttention,
    kind=Length,
    name="attention",
    example="--sizes 256",
    cases=cases,
    problem=problem_of,
    stage=lambda problem, group: ({}, Inputs.random(problem, group)),
    programs=programs,
    choice=lambda problem, inputs: _strategy(inputs.q.device),
    arguments=arguments,
    error=row_error,
)
