"""Attention over a sharded sequence by all-to-alls between sequence and heads.

An all-to-all gives every rank the whole sequence of some heads. Torch attends, and another
all-to-all returns the rows to the ranks that hold their queries. (Jacobs et al.,
DeepSpeed-Ulysses.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...builtins.errors import brief_errors
from ..collectives.all_to_all import AllToAll
from ..collectives.collective import checked_problem, transport_within
from ..core.agreement import agree
from ..core.autocast import lowers
from ..core.checks import refused, require_bools, require_dense
from ..core.collective_problem import CollectiveProblem
from ..core.groups import name_of, ranks_of
from ..core.library import define_composite, is_traced
from ..core.registry import RegisteredOp, TableRow
from .problem import AttentionProblem, checked_attention, checked_scale

NAME = "ulysses_attention"
_SEQUENCE, _HEADS = 1, 2
"""Axes of the tensors that a rank sends and receives."""
_TO_HEADS, _TO_SEQUENCE = (_HEADS, _SEQUENCE), (_SEQUENCE, _HEADS)
"""The axis that an all-to-all scatters, and the axis that it gathers."""
_EMPTY = torch.empty(0)


class Ulysses(RegisteredOp, op=NAME):
    """Attention by all-to-alls. It has no kernel of its own."""

    arguments = ("q", "k", "v")
    row = TableRow(
        inputs="the rank's rows of `q`, `k`, `v`, (B, S / W, H, D), `contiguous`",
        result="the rank's rows of attention to all keys, by [all-to-alls](#ulysses)",
    )


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None,
    ranks: int,
) -> AttentionProblem:  # fmt: skip
    """Return the problem of a call.

    Raises:
        TileWeaveError: shapes, types or devices are invalid.
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
    """Return the number of copies of each head of k and v that are sent.

    It is more than 1 if there are fewer heads than ranks: each rank then receives the head that its
    heads of q need.
    """
    return max(1, problem.ranks // problem.kv_heads)


def exchanges_of(problem: AttentionProblem) -> list[CollectiveProblem]:
    """Return the all-to-alls of q, k, v and the result."""
    kv_heads = problem.kv_heads * copies_of(problem)
    exchanges = [
        (problem.q_rows, problem.heads, problem.dim, _TO_HEADS),
        (problem.k_rows, kv_heads, problem.dim, _TO_HEADS),
        (problem.k_rows, kv_heads, problem.v_dim, _TO_HEADS),
        (problem.q_total, problem.heads // problem.ranks, problem.v_dim, _TO_SEQUENCE),
    ]
    return [
        checked_problem(
            AllToAll.op, torch.empty(problem.batch, *shape, dtype=problem.dtype, device="meta"),
            None, problem.ranks, axes,
        )
        for *shape, axes in exchanges
    ]  # fmt: skip


def _causal_lower_right_bias(rows: int, keys: int) -> torch.Tensor:
    """Return the bias ``causal_lower_right(rows, keys)`` without its tensor of rows x keys.

    Unlike the function of torch, this can be traced.
    """
    # This imports torch._dynamo, which needs more time than the import of this package.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    bias = _EMPTY.as_subclass(CausalBias)
    bias.variant = CausalVariant.LOWER_RIGHT
    bias.seq_len_q, bias.seq_len_kv = rows, keys
    return bias


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """Attend on one rank, with the kernel that torch selects.

    Args:
        q, k, v: (B, S, H, D); a head of k and v may serve several heads of q.
        causal: whether to mask, aligned at the ends of the sequences.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": bool(q.shape[_HEADS] != k.shape[_HEADS]),
    }
    if causal and q.shape[_SEQUENCE] == k.shape[_SEQUENCE]:
        options["is_causal"] = True  # all kernels of torch support it; aligned at the starts
    elif causal:
        options["attn_mask"] = _causal_lower_right_bias(q.shape[_SEQUENCE], k.shape[_SEQUENCE])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, **options)
    # The exchange needs rows of all heads. Fused kernels return them; others return (B, H, S, D).
    return out.transpose(1, 2).contiguous()


def _ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None,
    group: str, transport: str,
) -> torch.Tensor:  # fmt: skip
    """Implement ``ulysses_attention``; all arguments are checked before the first exchange."""
    ranks = ranks_of(group)
    problem = problem_of(q, k, v, causal, softmax_scale, ranks.world_size)
    # Transport "auto" supports every exchange.
    for exchange in exchanges_of(problem) if transport != "auto" else ():
        transport_within(transport, exchange, q.device, ranks, NAME)
    if not is_traced(q):
        agree(ranks, problem, transport)
    if (copies := copies_of(problem)) > 1:
        k, v = (x.repeat_interleave(copies, _HEADS) for x in (k, v))
    all_to_all = torch.ops.tileweave.all_to_all
    q, k, v = (all_to_all(x, *_TO_HEADS, group, transport) for x in (q, k, v))
    out = attend(q, k, v, causal, softmax_scale)
    return all_to_all(out, *_TO_SEQUENCE, group, transport)


@brief_errors
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
    """Attend over a sequence that is sharded in the order of the ranks.

    Every rank receives the whole sequence of its heads (``all_to_all``), attends with
    ``torch.nn.functional.scaled_dot_product_attention``, and returns the rows. Every rank calls it
    with the same shapes. The first call with new shapes compiles, collectively.

    Args:
        q: (B, Sq / W, Hq, D); W, the number of ranks, divides Hq.
        k: (B, Sk / W, Hkv, D); Hkv divides Hq, and W divides Hkv or is a multiple of it. If there
            are fewer heads than ranks, several ranks receive each head.
        v: (B, Sk / W, Hkv, Dv).
        causal: whether a query sees only the keys up to its own position, counted from the ends of
            both sequences: the query at p of Sq sees Sk - Sq + p + 1 keys.
        softmax_scale: factor of the products; None for 1 / sqrt(D).
        group: see ``all_to_all``.
        transport: transport of the exchanges, see ``all_to_all``.

    Returns:
        (B, Sq / W, Hq, Dv), in the type of q. It has a gradient.

    Raises:
        TileWeaveError: arguments are invalid or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    require_bools(NAME, causal=causal)
    require_dense(NAME, q=q, k=k, v=v)
    if softmax_scale is not None and not torch.compiler.is_compiling():
        softmax_scale = checked_scale(NAME, 1, softmax_scale)
    return _attend(q, k, v, causal, softmax_scale, name_of(group), transport)


_attend = define_composite(
    f"{NAME}(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, str group, "
    "str transport) -> Tensor",
    _ulysses_attention,
    lowers("q", "k", "v"),
)
