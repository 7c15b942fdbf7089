"""Reference of attention over a sharded sequence in plain torch, for comparison with fused results.

The keys of all ranks are gathered and put in sequence order. Positions are explicit, and keys that
a query must not see are masked. The reference uses no arithmetic of the fused operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...runtime.kernel.kernel import capturing
from ..collectives.all_gather import all_gather
from ..core.agreement import agree
from ..core.checks import refused, require_dense, require_dense_or_none
from ..core.groups import name_of, ranks_of
from .problem import OP, AttentionProblem, checked_attention, checked_maxima
from .sequence import shard_sequence, unshard_sequence

_MAX_SCORES = 1 << 26
"""Products of q and k that are kept in memory at a time."""
Result = tuple[torch.Tensor, torch.Tensor]


def reference_attention(
    problem: AttentionProblem,
    rank: int,
    q: torch.Tensor,
    ks: Sequence[torch.Tensor],
    vs: Sequence[torch.Tensor],
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> Result:
    """Compute the result of one rank from k and v of all ranks; nothing is communicated.

    Args:
        problem: checked problem.
        rank: the rank that holds ``q``.
        ks, vs: k and v of rank 0, rank 1, and so on.
        cu_seqlens_q, cu_seqlens_k: offsets, if sequences are packed.

    Returns:
        The result in the type of ``q``, and the natural logarithms of the sums of exponentials.
        Both are computed in fp32 (fp64 for fp64) and are differentiable.
    """
    packed = problem.packed
    join = torch.cat if packed else torch.stack
    wide = torch.promote_types(q.dtype, torch.float32)
    whole_sequences = [
        unshard_sequence(shards, problem.layout, 0 if packed else 1, cu_seqlens_k).to(wide)
        for shards in (ks, vs)
    ]
    queries = _sequences(q.to(wide), cu_seqlens_q, problem.ranks)
    keys, values = (_sequences(x, cu_seqlens_k, 1) for x in whole_sequences)
    parts = [
        _attend(x, k, v, _limits(problem, rank, x, k), problem.scale)
        for x, k, v in zip(queries, keys, values, strict=True)
    ]
    out, lse = zip(*parts, strict=True)
    return join(out).to(q.dtype), join(lse, dim=1 if packed else 0)


def _sequences(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, ranks: int
) -> Sequence[torch.Tensor]:
    """Split ``x``, the part of one of ``ranks`` ranks, into the sequences of its batch."""
    if cu_seqlens is None:
        return x.unbind()
    return x.split((cu_seqlens.diff() // ranks).tolist())


def _limits(problem: AttentionProblem, rank: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the number of keys that each of a rank's queries of one sequence sees."""
    if not problem.causal:
        return torch.full((len(q),), len(k), device=q.device)
    positions = torch.arange(len(q) * problem.ranks, device=q.device)
    own_positions = shard_sequence(positions, rank, problem.ranks, problem.layout, dim=0)
    return own_positions + 1 + len(k) - len(positions)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limits: torch.Tensor, scale: float
) -> Result:
    """Attend in one sequence, some queries at a time: (rows, heads, v_dim) and (heads, rows)."""
    rows = max(1, _MAX_SCORES // (q.shape[1] * max(1, len(k))))
    blocks = [
        checkpoint(
            _attend_block, x, k, v, limit, scale, use_reentrant=False, preserve_rng_state=False
        )
        for x, limit in zip(q.split(rows), limits.split(rows), strict=True)
    ]
    out, lse = zip(*blocks, strict=True)
    return torch.cat(out), torch.cat(lse, 1)


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limits: torch.Tensor, scale: float
) -> Result:
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
    hidden = torch.arange(len(k), device=q.device) >= limits[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hgqk,khd->qhgd", (scores - lse.unsqueeze(-1)).exp(), v)
    return out.flatten(1, 2), lse.flatten(0, 1)


def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    group: Any = None,
    **options: Any,
) -> Result:
    """Compute ``reference_attention`` on all ranks of a group, each with its part of q, k and v.

    Args:
        options: further arguments of ``checked_attention``.

    Raises:
        TileWeaveError: arguments are invalid or differ between ranks.
    """
    require_dense(OP, q=q, k=k, v=v)
    require_dense_or_none(OP, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    ranks = ranks_of(name_of(group))
    packing = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    problem = checked_attention(q, k, v, ranks.world_size, **packing, **options)
    agree(ranks, problem, "reference")
    return attend_gathered(
        problem, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, group
    )


def attend_gathered(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, max_q: int | None, max_k: int | None,
    group: Any,
) -> Result:  # fmt: skip
    """Compute ``gathered_attention`` of a problem that is checked and equal on all ranks.

    Offsets are checked here; the host reads them.

    Raises:
        TileWeaveError: a CUDA graph is captured.
    """
    if capturing():
        raise refused(
            problem.op, "the path by torch.distributed is called while a CUDA graph is captured",
            "another strategy, as the host computes the positions of rows",
        )  # fmt: skip
    ranks = ranks_of(name_of(group))
    cu_q, cu_k = (None if cu is None else cu.cpu() for cu in (cu_q, cu_k))
    checked_maxima(problem, cu_q, cu_k, max_q, max_k)
    wide = problem.wide_dtype
    ks, vs = (
        all_gather(x.to(wide), group, transport="nccl").chunk(ranks.world_size) for x in (k, v)
    )
    return reference_attention(problem, ranks.rank, q, ks, vs, cu_q, cu_k)
