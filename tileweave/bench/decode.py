"""Attention of a decode step in ``tileweave bench``: our operator beside PyTorch's back ends, whose
partial results NCCL gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..ops.core import nccl
from ..ops.core.strategy import Strategy
from ..ops.decode.decode_attention import DecodeAttention
from ..ops.decode.kernels.config import INTERLEAVED
from ..ops.decode.problem import DecodeProblem, checked_problem
from ..ops.decode.problem import Inputs as Arguments
from ..runtime.host.group import Group
from .attention import heads_of
from .case import (
    OURS,
    SDPA,
    Buffers,
    Case,
    Constructor,
    Family,
    Implementation,
    by_call,
)
from .results import DecodeShape
from .sdpa import BACKENDS, backend_of, row_error

if TYPE_CHECKING:
    from .selection import BenchOptions

BATCHES = 1, 16, 64
KEYS = 4096, 32768, 131072
"""Default numbers of sequences, and of the tokens of each on all ranks."""
PAGE_SIZE = 64
"""Tokens of a page of the cache."""
ITEMSIZE = 2
"""Bytes of an element of the cache."""


def cases(operator: type[DecodeAttention], options: BenchOptions, ranks: int) -> list[Case]:
    """Return a case for each number of sequences and of tokens."""
    return [
        Case(
            operator.op,
            shape,
            FAMILY,
            operations=4 * shape.batch * shape.heads * shape.keys * shape.head_dim,
            symmetric_bytes=symmetric_bytes(shape),
            gathered_bytes=0,
            implementations=IMPLEMENTATIONS,
            device_bytes=device_bytes(shape),
            obstacle=obstacle_of(shape),
        )
        for shape in shapes_of(options, ranks)
    ]


def shapes_of(options: BenchOptions, ranks: int) -> list[DecodeShape]:
    """Return the shapes of the command line."""
    return [
        DecodeShape(batch, keys, *heads, PAGE_SIZE, ranks)
        for heads in heads_of(options.shapes)
        for batch in options.batches or BATCHES
        for keys in options.sizes or KEYS
    ]


def obstacle_of(shape: DecodeShape) -> str | None:
    """Return why the ranks cannot share the tokens equally, with what is expected; None if they
    can."""
    run = shape.page_size * shape.ranks
    if shape.keys % run == 0:
        return None
    return (
        f"{shape.keys} tokens of a sequence; expected a multiple of {run} for {shape.ranks} ranks "
        f"and pages of {shape.page_size}"
    )


def symmetric_bytes(shape: DecodeShape) -> int:
    """Return the symmetric memory for the parts of all splits and of all ranks."""
    if obstacle_of(shape) is not None:
        return 0
    config = problem_of(DecodeAttention.op, shape, shape.ranks, torch.bfloat16).config
    parts = config.splits + 4 * shape.ranks
    return 4 * parts * shape.batch * shape.heads * config.sections * config.columns


def device_bytes(shape: DecodeShape) -> int:
    """Return the memory of the pages, of their tokens in the order of the sequences, and of one
    sequence in fp32."""
    return shape.moved_bytes * 2 + shape.moved_bytes // shape.batch * 4 // ITEMSIZE


def problem_of(op: str, shape: DecodeShape, ranks: int, dtype: torch.dtype) -> DecodeProblem:
    """Return the problem of each rank.

    Raises:
        TileWeaveError: the heads do not fit.
    """
    pages = shape.keys // ranks // shape.page_size
    extents = shape.batch * pages, shape.page_size, shape.kv_heads, shape.head_dim
    q = torch.empty(shape.batch, shape.heads, shape.head_dim, dtype=dtype, device="meta")
    table = q.new_empty(shape.batch, pages, dtype=torch.int32)
    arguments = Arguments(q, q.new_empty(extents), q.new_empty(extents), table, table[:, 0])
    return checked_problem(arguments, shape.head_dim**-0.5, INTERLEAVED, False, ranks)


@dataclass(frozen=True)
class Inputs:
    """Operands of one rank, its tokens in the order of each sequence, and the expected result.

    Attributes:
        q: queries, equal on all ranks, (batch, heads, dim).
        k_cache, v_cache: pages of the rank, (pages, page_size, kv_heads, dim).
        table: pages of each sequence, in random order, (batch, pages) int32.
        lengths: tokens of each sequence on all ranks, (batch,) int32.
        k, v: tokens of the rank, (batch, tokens, kv_heads, dim).
        result: expected result, (batch, heads, dim) fp32.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lengths: Tensor
    k: Tensor
    v: Tensor
    result: Tensor

    @staticmethod
    def random(problem: DecodeProblem, group: Group) -> Iterator[Inputs]:
        """Yield new queries for one cache, whose elements are from N(0, 1). Collective."""
        own, common = (
            torch.Generator(group.device).manual_seed(seed) for seed in (1 + group.rank, 0)
        )
        options: dict[str, Any] = {"dtype": problem.dtype, "device": group.device}
        pages = problem.pages, problem.page_size, problem.kv_heads, problem.dim
        k_cache, v_cache = (torch.empty(pages, **options).normal_(generator=own) for _ in range(2))
        order = torch.randperm(problem.pages, generator=own, device=group.device)
        table = order.int().view(problem.batch, problem.table)
        tokens = problem.ranks * problem.table * problem.page_size
        lengths = torch.full((problem.batch,), tokens, dtype=torch.int32, device=group.device)
        k, v = (cache[table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
        while True:
            extents = problem.batch, problem.heads, problem.dim
            q = torch.empty(extents, **options).normal_(generator=common)
            parts = [exact(*sequence, problem.scale) for sequence in zip(q, k, v, strict=True)]
            result = merged(torch.stack(parts), group)
            yield Inputs(q, k_cache, v_cache, table, lengths, k, v, result)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention of a sequence to the tokens of a rank in fp32 and its log-sum-exp, (heads,
    dim + 1)."""
    keys, values = (x.float().transpose(0, 1) for x in (k, v))
    scores = q.float().view(len(keys), -1, q.shape[-1]) @ keys.transpose(1, 2) * scale
    part = torch.cat([scores.softmax(-1) @ values, scores.logsumexp(-1, keepdim=True)], -1)
    return part.flatten(0, 1)


def merged(part: Tensor, group: Group) -> Tensor:
    """Return attention to the tokens of all ranks, given a rank's result and log-sum-exp, (batch,
    heads, dim + 1) fp32. Collective."""
    parts = nccl.all_gather(part[None], group)
    return (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0)


def programs(problem: DecodeProblem, group: Group) -> list[Any]:
    """Return the program that our operator launches, as in ``Family``; none if torch computes."""
    return [] if problem.obstacle() else [DecodeAttention.program(problem)]


def choice(problem: DecodeProblem, inputs: Inputs) -> Strategy:
    """Return the strategy of our operator, and the reason."""
    if inputs.q.device.type != "cuda":
        return Strategy("nccl", f"the tensors are on {inputs.q.device.type}; expected cuda")
    if obstacle := problem.obstacle():
        return Strategy("nccl", obstacle)
    return Strategy("fused", "asked for")


def arguments(problem: DecodeProblem, inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the arguments of the operator, as in ``Family``."""
    options = {"block_table": inputs.table, "seq_lens": inputs.lengths}
    return (inputs.q, inputs.k_cache, inputs.v_cache), options


def _ours(buffers: Buffers) -> Implementation:
    return by_call(buffers, getattr(ops, buffers.problem.op), arguments, row_error)


def _sdpa(buffers: Buffers, name: str) -> Implementation:
    group = buffers.group
    backend = backend_of(name, group.device)

    def call(inputs: Inputs) -> Tensor:
        attended = backend(inputs.q[:, None], inputs.k, inputs.v, False)
        if group.world_size == 1:
            return attended.out[:, :, 0]
        part = torch.cat([attended.out.float(), attended.lse[..., None]], -1)[:, :, 0]
        return merged(part, group).to(inputs.q.dtype)

    return Implementation(call, error=row_error)


IMPLEMENTATIONS: dict[str, Constructor] = {
    OURS: _ours,
    **{f"{SDPA}{name}": partial(_sdpa, name=name) for name in BACKENDS["cuda"]},
}

FAMILY = Family(
    base=DecodeAttention,
    kind=DecodeShape,
    name="decode",
    example="--sizes 512 --batch 2",
    cases=cases,
    problem=problem_of,
    stage=lambda problem, group: ({}, Inputs.random(problem, group)),
    programs=programs,
    choice=choice,
    arguments=arguments,
    error=row_error,
)
