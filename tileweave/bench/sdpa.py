"""Attention over a sharded sequence with what PyTorch has: its back ends, alone, behind an
all-gather, and in a ring. ``tileweave bench`` measures them, and judges ours by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.attention.problem import AttentionProblem
from ..ops.core import nccl
from ..runtime.host.group import Group

_EVERY = slice(None)


class Attended(NamedTuple):
    """What rows of queries have got from some keys.

    Attributes:
        out: (batch, heads, rows, head_dim).
        lse: (batch, heads, rows), fp32, the logarithm of the sum of exponentials.
    """

    out: Tensor
    lse: Tensor

    def add(self, other: Attended, rows: slice = _EVERY) -> None:
        """What ``rows`` have got from other keys, in place."""
        out, lse = self.out[:, :, rows], self.lse[:, :, rows]
        out.mul_(torch.sigmoid(lse - other.lse).unsqueeze(-1))
        out.addcmul_(other.out, torch.sigmoid(other.lse - lse).unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, other.lse))


@dataclass(frozen=True)
class Backend:
    """One of those of ``torch.nn.functional.scaled_dot_product_attention``, called by its own name,
    which also gives the logarithm of the sum.

    Attributes:
        call: of q, k, v (batch, heads, rows, head_dim), and whether the mask is causal.
        ends_together: whether the last query sees the last key where the mask is causal; else the
            first one sees the first key.
    """

    call: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, ...]]
    ends_together: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
        """(batch, rows, heads, head_dim) each; the last query sees the last key. Where the back end
        has it otherwise, keys that all queries see are another call."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        past = k.shape[2] - q.shape[2]
        if not causal or not past or self.ends_together:
            return self._attended(q, k, v, causal)
        got = self._attended(q, k[:, :, :past], v[:, :, :past], False)
        got.add(self._attended(q, k[:, :, past:], v[:, :, past:], True))
        return got

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
        out, lse, *_ = self.call(q, k, v, causal)
        return Attended(out, lse.view(q.shape[:3]))


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
"""By kind of device and name. ``torch.nn.attention.bias.causal_lower_right`` calls the first one in
the same way."""


def of_rank(
    backend: Backend, problem: AttentionProblem, rank: int, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """What a rank computes, (batch, rows, heads, head_dim): where the mask is causal, each of its
    chunks beside the keys up to the chunk's end.

    Args:
        q: of the rank.
        k, v: of all, in order.
    """
    if not problem.causal:
        return backend(q, k, v, False).out.transpose(1, 2)
    found = []
    for part, chunk in enumerate(q.chunk(problem.sharding.parts, 1)):
        seen = (problem.sharding.chunk_of(part, rank) + 1) * chunk.shape[1]
        found.append(backend(chunk, k[:, :seen], v[:, :seen], True).out.transpose(1, 2))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


class Block(NamedTuple):
    """Rows of a rank beside rows of another: all see all, or those before them and themselves."""

    queries: slice
    keys: slice
    causal: bool


def ring_block(problem: AttentionProblem, rank: int, owner: int) -> Block | None:
    """What of the owner's keys a rank attends to; None where all come later.

    In zigzag the second chunk of either rank lies behind the first of both. So all queries see an
    earlier owner's first chunk, and none its second; a later owner's are seen by the second chunk
    of queries alone, both of them.
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
    """Ring attention, (batch, rows, heads, head_dim): keys and values go round, from each rank to
    the next, while it computes with those it has. Collective."""
    ranks, rank = group.world_size, group.rank
    total: Attended | None = None
    for step in range(ranks):
        owner = (rank - step) % ranks
        if step + 1 < ranks:
            coming = torch.empty_like(k), torch.empty_like(v)
            works = nccl.start_exchanges(
                (k, v), (rank + 1) % ranks, coming, (rank - 1) % ranks, group
            )
        if block := ring_block(problem, rank, owner):
            found = backend(q[:, block.queries], k[:, block.keys], v[:, block.keys], block.causal)
            if total is None:
                # In the type of the result where there is one sum at most, else rounded at the end.
                total = found if ranks < 3 else Attended(found.out.float(), found.lse)
            else:
                total.add(found, block.queries)
        if step + 1 < ranks:
            for work in works:
                work.wait()
            k, v = coming
    return total.out.to(q.dtype).transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention in fp32, (batch, rows, heads, head_dim), head by head of keys.

    Args:
        seen: of each row of q how many keys it sees.
    """
    hidden = torch.arange(k.shape[1], device=k.device) >= seen[:, None]
    found = []
    for head, queries in enumerate(q.chunk(k.shape[2], 2)):
        keys, values = k[:, :, head].float(), v[:, :, head].float()
        scores = torch.einsum("bqhd,bkd->bhqk", queries.float(), keys) * q.shape[-1] ** -0.5
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        found.append(torch.einsum("bhqk,bkd->bqhd", weights, values))
    return torch.cat(found, 2)


def row_error(found: Tensor, right: Tensor) -> Tensor:
    """Of the worst row and head, relative: a tile that one row did not see is seen."""
    return ((found.float() - right).norm(dim=-1) / right.norm(dim=-1)).max()


def by_rank(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, (ranks, batch, rows, heads, head_dim). Collective."""
    return nccl.all_gather(x, group).unflatten(0, (group.world_size, len(x)))


def in_order(problem: AttentionProblem, rows: Tensor) -> Tensor:
    """Whole sequences, (batch, length, heads, head_dim), of the rows of all ranks, as far as their
    order matters: copied once where they do not lie so, or not at all."""
    parts = problem.sharding.parts
    if parts == 1 or not problem.causal:
        return rows.movedim(0, 1).flatten(1, 2)
    chunks = {
        problem.sharding.chunk_of(part, rank): chunk
        for rank, held in enumerate(rows)
        for part, chunk in enumerate(held.chunk(parts, 1))
    }
    return torch.cat([chunks[place] for place in sorted(chunks)], 1)
