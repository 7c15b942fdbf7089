"""Attention over a sequence of which each rank holds a part, by exchanging sequence for heads.

An all-to-all gives every rank the whole sequence of some heads, torch attends, and another one
brings the rows back to the ranks that asked for them. (Jacobs et al., DeepSpeed-Ulysses.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..collectives.collective import EXCHANGES, checked
from ..collectives.transport import chosen
from ..core.collective_problem import CollectiveProblem
from ..core.groups import group_of, name_of
from ..core.library import define_composite
from ..core.problem import agree, refused, require_dense
from .problem import AttentionProblem, checked_attention, checked_scale

NAME = "ulysses_attention"
_SEQUENCE, _HEADS = 1, 2
"""Axes of what a rank gives and gets."""
_TO_HEADS, _TO_SEQUENCE = (_HEADS, _SEQUENCE), (_SEQUENCE, _HEADS)
"""What is shared out among the ranks, and what they bring together."""
_EMPTY = torch.empty(0)


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None,
    ranks: int,
) -> AttentionProblem:  # fmt: skip
    """What a call asks.

    Raises:
        TileWeaveError: shapes, types or devices that do not fit.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise refused(NAME, f"{name} has shape {tuple(tensor.shape)}", "four extents")
    problem = checked_attention(q, k, v, ranks, causal=causal, softmax_scale=softmax_scale, op=NAME)
    if problem.heads % ranks:
        raise refused(
            NAME, f"q has {problem.heads} heads", f"a multiple of {ranks} for {ranks} ranks"
        )
    if problem.kv_heads % ranks and ranks % problem.kv_heads:
        legal = f"a multiple or a divisor of {ranks} for {ranks} ranks"
        raise refused(NAME, f"k has {problem.kv_heads} heads", legal)
    return problem


def copies_of(problem: AttentionProblem) -> int:
    """How often each head of k and v is given away: more than once if there are fewer of them than
    ranks, so that each rank gets that of its heads of q."""
    return max(1, problem.ranks // problem.kv_heads)


def exchanges_of(problem: AttentionProblem) -> list[CollectiveProblem]:
    """Of q, k, v and the result."""
    kv_heads = problem.kv_heads * copies_of(problem)
    given = [
        (problem.q_rows, problem.heads, problem.dim, _TO_HEADS),
        (problem.k_rows, kv_heads, problem.dim, _TO_HEADS),
        (problem.k_rows, kv_heads, problem.v_dim, _TO_HEADS),
        (problem.q_total, problem.heads // problem.ranks, problem.v_dim, _TO_SEQUENCE),
    ]
    return [
        checked(
            "all_to_all", torch.empty(problem.batch, *shape, dtype=problem.dtype, device="meta"),
            None, problem.ranks, axes,
        )
        for *shape, axes in given
    ]  # fmt: skip


def _aligned_at_ends(rows: int, keys: int) -> torch.Tensor:
    """``causal_lower_right(rows, keys)``, which would take memory for as many numbers, and cannot
    be traced."""
    # Imports torch._dynamo, which takes longer than all of this package.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    bias = torch.Tensor._make_subclass(CausalBias, _EMPTY)
    bias.variant = CausalVariant.LOWER_RIGHT
    bias.seq_len_q, bias.seq_len_kv = rows, keys
    return bias


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """Attention of one rank, by whichever of torch's kernels takes it.

    Args:
        q, k, v: (B, S, H, D); fewer heads of k and v than of q serve as many of these each.
        causal: aligned at the ends of the sequences.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": bool(q.shape[_HEADS] != k.shape[_HEADS]),
    }
    if causal and q.shape[_SEQUENCE] == k.shape[_SEQUENCE]:
        options["is_causal"] = True  # which all of torch's kernels know; it means the beginnings
    elif causal:
        options["attn_mask"] = _aligned_at_ends(q.shape[_SEQUENCE], k.shape[_SEQUENCE])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, **options)
    # The exchange wants rows of all heads. Fused kernels leave them so; others lay out as (B, H).
    return out.transpose(1, 2).contiguous()


def _ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None,
    group: str, transport: str,
) -> torch.Tensor:  # fmt: skip
    """See ``ulysses_attention``; all is checked before the first exchange."""
    ranks = group_of(group)
    problem = problem_of(q, k, v, causal, softmax_scale, ranks.world_size)
    for each in exchanges_of(problem) if transport != "auto" else ():  # which makes any exchange
        chosen(transport, replace(each, op=NAME), q.device, ranks, EXCHANGES[each.op])
    if not (torch.compiler.is_compiling() or isinstance(q.numel(), torch.SymInt)):
        agree(ranks, problem, transport)
    if (copies := copies_of(problem)) > 1:
        k, v = (x.repeat_interleave(copies, _HEADS) for x in (k, v))
    exchange = torch.ops.tileweave.all_to_all
    q, k, v = (exchange(x, *_TO_HEADS, group, transport) for x in (q, k, v))
    out = attend(q, k, v, causal, softmax_scale)
    return exchange(out, *_TO_SEQUENCE, group, transport)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    group: Any = None,
    transport: str = "auto",
) -> torch.Tensor:
    """Attention over a sequence of which each rank holds its part, in the order of the ranks.

    Every rank gets the whole sequence of its share of the heads (``all_to_all``), attends by
    ``torch.nn.functional.scaled_dot_product_attention``, and gives the rows back. Every rank calls
    it with the same shapes; the first call with new ones compiles, collectively.

    Args:
        q: (B, Sq / W, Hq, D); W, the number of ranks, divides Hq.
        k: (B, Sk / W, Hkv, D); Hkv divides Hq, and W divides Hkv or is a multiple of it. Of fewer
            heads than ranks each is given to several.
        v: (B, Sk / W, Hkv, Dv).
        causal: whether a query sees the keys up to its own place only, counted from the ends of
            both sequences: that at p of Sq sees Sk - Sq + p + 1.
        softmax_scale: by which products are multiplied; None for 1 / sqrt(D).
        group: as ``all_to_all`` takes it.
        transport: of the exchanges, as ``all_to_all`` takes it.

    Returns:
        (B, Sq / W, Hq, Dv), in the type of q. It has a gradient.

    Raises:
        TileWeaveError: arguments that do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    require_dense(NAME, q=q, k=k, v=v)
    if softmax_scale is not None and not torch.compiler.is_compiling():
        softmax_scale = checked_scale(NAME, 1, softmax_scale)
    return torch.ops.tileweave.ulysses_attention(
        q, k, v, bool(causal), softmax_scale, name_of(group), transport
    )


define_composite(
    f"{NAME}(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, str group, "
    "str transport) -> Tensor",
    _ulysses_attention,
)
