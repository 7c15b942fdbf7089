"""Gradients of attention over a sharded sequence, by torch's flash attention.

Keys and values of all ranks are gathered. Each rank computes the contributions of its own queries
to all gradients, one chunk of queries at a time, because each chunk sees a prefix of the keys. The
gradients of keys and values are then reduce-scattered to their owners. Nothing is overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ...runtime.kernel.kernel import capturing
from ..core.agreement import agree
from ..core.checks import refused, require_bools, require_dense, require_dense_or_none, require_like
from ..core.groups import name_of, ranks_of
from ..core.library import define
from .problem import DTYPES, OP, AttentionProblem, checked_attention, checked_maxima

NAME = "sp_attention_backward"
_MAX_SCORES = 1 << 26
"""Products of q and k that ``by_definition`` keeps in memory at a time."""
_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 8, 256
"""Flash attention accepts head dimensions that are multiples of the first, up to the second."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Rows(NamedTuple):
    """Queries, the output and its gradient: (B, rows, Hq, D) or Dv; ``lse`` is (B, Hq, rows)."""

    grad_out: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def part(self, rows: slice) -> Rows:
        """Return some of the rows."""
        return Rows(self.grad_out[:, rows], self.q[:, rows], self.out[:, rows], self.lse[..., rows])


def gradients_of_rows(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Gradients:
    """Return the contributions of queries to the gradients of q, k and v.

    Args:
        k, v: (B, keys, Hkv, D) and (B, keys, Hkv, Dv): the keys that the last query sees.
        causal: whether each query sees one key less than the next query.
    """
    widest = max(k.shape[-1], v.shape[-1])
    if k.is_cuda and k.dtype in DTYPES and widest <= _MAX_HEAD_DIM:
        return by_flash(rows, k, v, causal, scale)
    return by_definition(rows, k, v, causal, scale)


def by_flash(rows: Rows, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Gradients:
    """Compute ``gradients_of_rows`` with torch's flash attention, in the types of q, k and v.

    The causal mask of flash attention is aligned at the last query and the last key. All heads have
    the same dimension, so smaller ones are padded with zeros.
    """
    width = -(-max(k.shape[-1], v.shape[-1]) // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    grad_out, q, out, keys, values = (
        x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
        for x in (*rows[:3], k, v)
    )  # fmt: skip
    seed = torch.empty(2, dtype=torch.uint64, device=k.device)  # unused: the dropout is 0
    gradients = torch.ops.aten._flash_attention_backward(
        grad_out, q, keys, values, out, rows.lse.contiguous(), None, None, q.shape[1],
        keys.shape[1], 0.0, causal, seed, seed, scale=scale,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (
        x[..., : operand.shape[-1]] for x, operand in zip(gradients, (rows.q, k, v), strict=True)
    )
    return grad_q, grad_k, grad_v


def by_definition(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Gradients:
    """Compute ``gradients_of_rows`` in plain torch, some queries at a time, in fp32 or fp64."""
    wide, count, keys = torch.promote_types(k.dtype, torch.float32), rows.q.shape[1], k.shape[1]
    k, v = k.to(wide), v.to(wide)
    grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, _MAX_SCORES // (rows.lse.shape[0] * rows.lse.shape[1] * keys))
    for first in range(0, count, step):
        grad_out, q, out, lse = (
            x.to(wide) for x in rows.part(slice(first, min(first + step, count)))
        )
        # h: heads of k and v, g: those of q that share one
        grad_out, q, out = (x.unflatten(2, (k.shape[2], -1)) for x in (grad_out, q, out))
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * scale
        if causal:
            last = torch.arange(q.shape[1], device=k.device) + first + keys - count
            hidden = torch.arange(keys, device=k.device) > last[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = (scores - lse.unflatten(1, (k.shape[2], -1)).unsqueeze(-1)).exp()
        mean = torch.einsum("bqhgd,bqhgd->bhgq", grad_out, out).unsqueeze(-1)
        grad_weights = torch.einsum("bqhgd,bkhd->bhgqk", grad_out, v)
        grad_scores = weights * (grad_weights - mean) * scale
        grad_q.append(torch.einsum("bhgqk,bkhd->bqhgd", grad_scores, k).flatten(2, 3))
        grad_k += torch.einsum("bhgqk,bqhgd->bkhd", grad_scores, q)
        grad_v += torch.einsum("bhgqk,bqhgd->bkhd", weights, grad_out)
    return torch.cat(grad_q, 1), grad_k, grad_v


@dataclass(frozen=True)
class Sequences:
    """A batch of sequences of equal lengths, or one of several packed sequences.

    Attributes:
        rows, keys: slices of a rank's rows of q and of k that belong to the sequences.
    """

    problem: AttentionProblem
    rows: slice
    keys: slice

    @property
    def chunks(self) -> list[tuple[int, slice]]:
        """Owner of each chunk of the keys, and its slice of the owner's keys, in sequence order."""
        sharding = self.problem.sharding
        size = (self.keys.stop - self.keys.start) // sharding.parts
        places = {
            sharding.chunk_of(part, owner): (owner, self.keys.start + part * size)
            for owner in range(sharding.ranks)
            for part in range(sharding.parts)
        }
        return [(owner, slice(row, row + size)) for _, (owner, row) in sorted(places.items())]

    def gathered(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Return all keys in sequence order, (B, length, ...), from (W, B, keys, ...)."""
        return torch.cat([by_rank[owner, :, place] for owner, place in self.chunks], 1)

    def scatter(self, ordered: torch.Tensor, by_rank: torch.Tensor) -> None:
        """Write ``ordered`` to ``by_rank``: the inverse of ``gathered``."""
        chunks = self.chunks
        for (owner, place), chunk in zip(chunks, ordered.chunk(len(chunks), 1), strict=True):
            by_rank[owner, :, place] = chunk

    def blocks(self, rank: int) -> Iterator[tuple[slice, int]]:
        """Yield slices of consecutive queries of a rank, and the keys that the last one sees."""
        sharding, rows = self.problem.sharding, self.rows.stop - self.rows.start
        keys = (self.keys.stop - self.keys.start) * sharding.ranks
        if rows == 0:
            return
        if not self.problem.causal:
            yield self.rows, keys
            return
        size, prefix = rows // sharding.parts, keys - rows * sharding.ranks
        for part in range(sharding.parts):
            first = self.rows.start + part * size
            end = (sharding.chunk_of(part, rank) + 1) * size
            yield slice(first, first + size), end + prefix


def _sequences(
    problem: AttentionProblem, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None
) -> list[Sequences]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [Sequences(problem, slice(0, problem.q_rows), slice(0, problem.k_rows))]
    if capturing():
        raise refused(
            problem.op, "cu_seqlens_q is given while a CUDA graph is captured",
            "none, as the host reads it",
        )  # fmt: skip
    offsets = cu_seqlens_q.cpu(), cu_seqlens_k.cpu()
    checked_maxima(problem, *offsets)
    q_lengths, k_lengths = (
        [slice(*ends) for ends in pairwise((cu_seqlens // problem.ranks).tolist())]
        for cu_seqlens in offsets
    )
    return [Sequences(problem, *lengths) for lengths in zip(q_lengths, k_lengths, strict=True)]


def sp_attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    layout: str = "contiguous",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    group: Any = None,
    transport: str = "auto",
) -> Gradients:
    """Return the gradients of q, k and v from that of ``sp_attention``'s ``out``.

    Every rank calls it. Flash attention rounds the contributions of each chunk of queries to the
    gradients of k and v; these are summed over chunks and ranks in fp32.

    Args:
        grad_out: gradient of ``out``.
        out, lse: results of ``sp_attention`` for the other arguments, with ``return_lse``.
        q, k, v, causal, layout, cu_seqlens_q, cu_seqlens_k, softmax_scale, group: arguments of that
            call; the host waits for ``cu_seqlens_*``.
        transport: transport of keys and gradients, as in ``all_gather``.

    Returns:
        The gradients of q, k and v, in their types.

    Raises:
        TileWeaveError: arguments are invalid or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    require_bools(NAME, causal=causal)
    require_dense(NAME, grad_out=grad_out, q=q, k=k, v=v, out=out, lse=lse)
    require_dense_or_none(NAME, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return torch.ops.tileweave.sp_attention_backward(
        grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, layout,
        softmax_scale, name_of(group), transport,
    )  # fmt: skip


def _checked_problem(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, ranks: int, **options: Any,
) -> AttentionProblem:  # fmt: skip
    problem = checked_attention(q, k, v, ranks, op=NAME, **options)
    for name, tensor, shape, dtype in (
        ("grad_out", grad_out, problem.shape, q.dtype), ("out", out, problem.shape, q.dtype),
        ("lse", lse, problem.lse_shape, problem.wide_dtype),
    ):  # fmt: skip
        if tuple(tensor.shape) != shape:
            raise refused(NAME, f"{name} has shape {tuple(tensor.shape)}", f"{shape}")
        require_like(NAME, name, tensor, "q", q, dtype)
    return problem


def _backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    causal: bool, layout: str, softmax_scale: float | None, group: str, transport: str,
) -> Gradients:  # fmt: skip
    """Implement ``sp_attention_backward``."""
    ranks = ranks_of(group)
    problem = _checked_problem(
        grad_out, q, k, v, out, lse, ranks.world_size, causal=causal, layout=layout,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, softmax_scale=softmax_scale,
    )  # fmt: skip
    sequences = _sequences(problem, cu_seqlens_q, cu_seqlens_k)
    agree(ranks, problem, transport)
    gather, scatter = torch.ops.tileweave.all_gather, torch.ops.tileweave.reduce_scatter
    by_rank = [gather(x, group, transport).unflatten(0, (problem.ranks, -1)) for x in (k, v)]
    rows = Rows(grad_out.contiguous(), q, out, lse)
    if problem.packed:  # a batch of one
        by_rank = [x.unsqueeze(1) for x in by_rank]
        rows = Rows(*(x.unsqueeze(0) for x in rows))
    grad_q, sums = _contributions(problem, sequences, ranks.rank, rows, by_rank)
    grad_k, grad_v = (
        scatter(x.flatten(0, 2 if problem.packed else 1), group, transport).to(q.dtype)
        for x in sums
    )
    return grad_q.view(q.shape), grad_k, grad_v


def _contributions(
    problem: AttentionProblem, sequences: list[Sequences], rank: int, rows: Rows,
    by_rank: list[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Return the gradient of a rank's q, and its contributions to those of all ranks' k and v.

    Args:
        by_rank: k and v of all ranks, (W, B, keys, Hkv, D) and Dv.
    """
    grad_q = torch.empty(rows.q.shape, dtype=rows.q.dtype, device=rows.q.device)
    sums = [torch.empty_like(x, dtype=rows.lse.dtype) for x in by_rank]
    for sequence in sequences:
        ordered = [sequence.gathered(x) for x in by_rank]
        totals = [torch.zeros_like(x, dtype=rows.lse.dtype) for x in ordered]
        for queries, num_keys in sequence.blocks(rank):
            k, v = (x[:, :num_keys] for x in ordered)
            grad_q[:, queries], *parts = gradients_of_rows(
                rows.part(queries), k, v, problem.causal, problem.scale
            )
            for total, part in zip(totals, parts, strict=True):
                total[:, :num_keys] += part
        for total, by_owner in zip(totals, sums, strict=True):
            sequence.scatter(total, by_owner)
    return grad_q, sums


def _fake(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    causal: bool, layout: str, softmax_scale: float | None, group: str, transport: str,
) -> Gradients:  # fmt: skip
    _checked_problem(
        grad_out, q, k, v, out, lse, ranks_of(group).world_size, causal=causal, layout=layout,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, softmax_scale=softmax_scale,
    )  # fmt: skip
    gather, scatter = torch.ops.tileweave.all_gather, torch.ops.tileweave.reduce_scatter
    for x in (k, v):  # they note their problems
        scatter(torch.empty_like(gather(x, group, transport), dtype=lse.dtype), group, transport)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    return grad_q, grad_k, grad_v


def _save_nothing(ctx: Any, inputs: tuple, output: tuple) -> None: ...


def _no_second_gradient(ctx: Any, *_: torch.Tensor) -> tuple:
    raise refused(
        OP, "a gradient of its gradient is asked for",
        "create_graph=False, or SequenceParallelAttention(reference=True)",
    )  # fmt: skip


define(
    f"{NAME}(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool causal, str layout, float? softmax_scale, "
    "str group, str transport) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake,
    (_save_nothing, _no_second_gradient),
)
