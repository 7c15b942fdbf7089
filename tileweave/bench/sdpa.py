"""Attention over a sharded sequence with PyTorch: its backends on one rank, after an all-gather,
and as ring attention. ``tileweave bench`` measures them and checks our results with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.attention.problem import AttentionProblem
from ..ops.core import nccl
from ..runtime.host.group import Group
from .case import Missing

_EVERY = slice(None)


class PartialAttention(NamedTuple):
    """Partial attention of rows of queries to some keys.

    Attributes:
        out: (batch, heads, rows, head_dim).
        lse: (batch, heads, rows), fp32, the logarithm of the sum of exponentials.
    """

    out: Tensor
    lse: Tensor

    def add(self, other: PartialAttention, rows: slice = _EVERY) -> None:
        """Merge the attention of ``rows`` to other keys, in place."""
        out, lse = self.out[:, :, rows], self.lse[:, :, rows]
        out.mul_(torch.sigmoid(lse - other.lse).unsqueeze(-1))
        out.addcmul_(other.out, torch.sigmoid(other.lse - lse).unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, other.lse))


@dataclass(frozen=True)
class Backend:
    """Backend of ``torch.nn.functional.scaled_dot_product_attention``, called by its own name,
    which also returns the logarithm of the sum.

    Attributes:
        call: accepts q, k, v (batch, heads, rows, head_dim), and whether the mask is causal.
        ends_together: whether a causal mask aligns the last query with the last key; else it aligns
            the first query with the first key.
    """

    call: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, ...]]
    ends_together: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> PartialAttention:
        """Return the attention of q to k and v, (batch, rows, heads, head_dim) each; in a causal
        mask the last query attends to the last key.

        For a backend that aligns the mask at the first key, the keys that all queries attend to are
        a separate call.
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        past = k.shape[2] - q.shape[2]
        if not causal or not past or self.ends_together:
            return self._attended(q, k, v, causal)
        attended = self._attended(q, k[:, :, :past], v[:, :, :past], False)
        attended.add(self._attended(q, k[:, :, past:], v[:, :, past:], True))
        return attended

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> PartialAttention:
        out, lse, *_ = self.call(q, k, v, causal)
        return PartialAttention(out, lse.view(q.shape[:3]))


_aten = torch.ops.aten
BACKENDS: dict[str, dict[str, Backend]] = {
    "cuda": {
        "flash": Backend(
            lambda q, k, v, causal: _aten._scaled_dot_product_flash_attention(
                q, k, v, is_causal=causal
            ),
            ends_together=True,
        ),
        "cudnn": Backend(
            lambda q, k, v, causal: _aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, is_causal=causal
            ),
            ends_together=False,
        ),
    },
    "cpu": {
        "flash": Backend(
            lambda q, k, v, causal: _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, is_causal=causal
            ),
            ends_together=False,
        )
    },
}
"""Backends by kind of device and name. ``torch.nn.attention.bias.causal_lower_right`` calls the
first one in the same way."""


def backend_of(name: str, device: torch.device) -> Backend:
    """Return a backend; raise ``Missing`` if torch has none for the device."""
    if name not in BACKENDS[device.type]:
        raise Missing(f"torch has none on {device.type}")
    return BACKENDS[device.type][name]


def of_rank(
    backend: Backend, problem: AttentionProblem, rank: int, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return the result of a rank, (batch, rows, heads, head_dim). With a causal mask, each of its
    chunks attends to the keys up to the chunk's end.

    Args:
        q: queries of the rank.
        k, v: keys and values of all ranks, in sequence order.
    """
    if not problem.causal:
        return backend(q, k, v, False).out.transpose(1, 2)
    outputs = []
    for part, chunk in enumerate(q.chunk(problem.sharding.parts, 1)):
        num_keys = (problem.sharding.chunk_of(part, rank) + 1) * chunk.shape[1]
        outputs.append(backend(chunk, k[:, :num_keys], v[:, :num_keys], True).out.transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


class Block(NamedTuple):
    """Rows of a rank and rows of another that they attend to: all of them, or causally."""

    queries: slice
    keys: slice
    causal: bool


def ring_block(problem: AttentionProblem, rank: int, owner: int) -> Block | None:
    """Return the part of the owner's keys to which a rank attends; None if all of them come later.

    In zigzag the second chunk of each rank comes after the first chunks of all ranks. So all
    queries attend to an earlier owner's first chunk, and none to its second. Of a later owner, only
    the second chunk of queries attends to keys, to both chunks.
    """
    if not problem.causal:
        return Block(_EVERY, _EVERY, False)
    if owner == rank:
        return Block(_EVERY, _EVERY, True)
    if problem.sharding.parts == 1:
        return Block(_EVERY, _EVERY, False) if owner < rank else None
    half = problem.q_rows // 2
    if owner < rank:
        return Block(_EVERY, slice(half), False)
    return Block(slice(half, None), _EVERY, False)


def ring(
    backend: Backend, problem: AttentionProblem, group: Group, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return ring attention, (batch, rows, heads, head_dim): keys and values move from each rank to
    the next while it computes with those that it holds. Collective."""
    ranks, rank = group.world_size, group.rank
    total: PartialAttention | None = None
    for step in range(ranks):
        owner = (rank - step) % ranks
        if step + 1 < ranks:
            coming = torch.empty_like(k), torch.empty_like(v)
            works = nccl.start_exchanges(
                (k, v), (rank + 1) % ranks, coming, (rank - 1) % ranks, group
            )
        if block := ring_block(problem, rank, owner):
            attended = backend(
                q[:, block.queries], k[:, block.keys], v[:, block.keys], block.causal
            )
            if total is None:
                # Merge in fp32 and round at the end, unless there is at most one merge.
                total = (
                    attended if ranks < 3 else PartialAttention(attended.out.float(), attended.lse)
                )
            else:
                total.add(attended, block.queries)
        if step + 1 < ranks:
            for work in works:
                work.wait()
            k, v = coming
    return total.out.to(q.dtype).transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return attention in fp32, (batch, rows, heads, head_dim), computed per head of keys.

    Args:
        seen: number of keys to which each row of q attends.
    """
    hidden = torch.arange(k.shape[1], device=k.device) >= seen[:, None]
    outputs = []
    for head, queries in enumerate(q.chunk(k.shape[2], 2)):
        keys, values = k[:, :, head].float(), v[:, :, head].float()
        scores = torch.einsum("bqhd,bkd->bhqk", queries.float(), keys) * q.shape[-1] ** -0.5
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("bhqk,bkd->bqhd", weights, values))
    return torch.cat(outputs, 2)


def row_error(result: Tensor, expected: Tensor) -> Tensor:
    """Return the relative error of the worst row and head, so that a tile that one row missed
    shows."""
    return ((result.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()


def by_rank(x: Tensor, group: Group) -> Tensor:
    """Return the rows of all ranks, (ranks, batch, rows, heads, head_dim). Collective."""
    return nccl.all_gather(x, group).unflatten(0, (group.world_size, len(x)))


def in_order(problem: AttentionProblem, rows: Tensor) -> Tensor:
    """Return whole sequences, (batch, length, heads, head_dim), from the rows of all ranks. Without
    a causal mask the order does not matter, and nothing is reordered."""
    parts = problem.sharding.parts
    if parts == 1 or not problem.causal:
        return rows.movedim(0, 1).flatten(1, 2)
    chunks = {
        problem.sharding.chunk_of(part, rank): chunk
        for rank, rank_rows in enumerate(rows)
        for part, chunk in enumerate(rank_rows.chunk(parts, 1))
    }
    return torch.cat([chunks[place] for place in sorted(chunks)], 1)
