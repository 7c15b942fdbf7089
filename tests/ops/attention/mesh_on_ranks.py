"""Functions that test_across_nodes.py runs: processes on a CPU are the ranks of several nodes."""

from __future__ import annotations

from itertools import pairwise

import torch

import tileweave as tw
from tests.ops.attention.on_ranks import attended
from tests.ops.meshes import NODES, Nodes, in_order, mesh_of
from tests.ops.on_ranks import numbers
from tileweave import ops

BATCH, HEADS, KV_HEADS, DIM, V_DIM = 2, 4, 2, 8, 6


def whole(rows: int, keys: int) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the result of all ranks, equal on each."""
    return [
        numbers(BATCH, length, heads, width, of=0, what=what)
        for length, heads, width, what in (
            (rows, HEADS, DIM, "q"), (keys, KV_HEADS, DIM, "k"), (keys, KV_HEADS, V_DIM, "v"),
            (rows, HEADS, V_DIM, "grad"),
        )
    ]  # fmt: skip


def by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention of whole sequences, by torch."""
    if causal:
        return torch.stack([attended(*x) for x in zip(q, k, v, strict=True)])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out.transpose(1, 2)


def log_sum_exps(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(HEADS // KV_HEADS, 2))
    scores = scores * DIM**-0.5
    if causal:
        hides = torch.ones(q.shape[1], k.shape[1]).triu(1).bool()
        scores = scores.masked_fill(hides, -torch.inf)
    return scores.logsumexp(-1)


def attend(nodes: Nodes, causal: bool, layout: str, longer: bool, compiled: bool) -> dict:
    """Compare results and gradients with one process that has the whole sequence.

    Args:
        longer: whether there are more keys than queries.
    """
    me, count = in_order(nodes)
    *given, grad = whole(4 * count, (6 if longer else 4) * count)
    given = [x.requires_grad_() for x in given]
    out = by_one(*given, causal)
    rights = torch.autograd.grad(out, given, grad)
    mesh = mesh_of(nodes)

    def mine(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return ops.shard_sequence(x, me, count, layout, dim).detach()

    def f(q, k, v):
        options = {"causal": causal, "layout": layout, "group": mesh}
        return ops.sp_attention(q, k, v, return_lse=True, **options)

    torch.compiler.reset()
    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    leaves = [mine(x).requires_grad_() for x in given]
    actual, lse = f(*leaves)
    gradients = torch.autograd.grad(actual, leaves, mine(grad))
    return {
        "out": torch.allclose(actual, mine(out)),
        "lse": torch.allclose(lse, mine(log_sum_exps(*given[:2], causal), 2)),
    } | {
        name: torch.allclose(x, mine(y))
        for name, x, y in zip("qkv", gradients, rights, strict=True)
    }


def module(nodes: Nodes) -> dict[str, bool]:
    """Compare the module, by its reference too, and Ulysses with one process."""
    me, count = in_order(nodes)
    *given, _ = (x.float() for x in whole(4 * count, 4 * count))
    right = by_one(*given, True)[:, 4 * me : 4 * me + 4]
    given = [x[:, 4 * me : 4 * me + 4] for x in given]
    results = {
        f"reference={reference}": ops.SequenceParallelAttention(
            causal=True, group=mesh_of(nodes), reference=reference
        )(*given)
        for reference in (False, True)
    }
    results["ulysses"] = ops.ulysses_attention(*given, causal=True, group=mesh_of(nodes))
    return {name: torch.allclose(x, right, atol=1e-6) for name, x in results.items()}


def packed_gradients() -> dict[str, bool]:
    """Gradients of packed sequences on several nodes, which only the backward supports."""
    nodes = NODES["2 x 2"]
    (me, count), lengths = in_order(nodes), [8, 16]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    *given, grad = (x[0] for x in whole(24, 24))
    given = [x.requires_grad_() for x in given]
    ends = [*pairwise(offsets.tolist())]
    out = torch.cat([attended(*(x[i:j] for x in given)) for i, j in ends])
    rights = torch.autograd.grad(out, given, grad)

    def mine(x: torch.Tensor) -> torch.Tensor:
        return ops.shard_sequence(x, me, count, "zigzag", 0, offsets).detach()

    module = ops.SequenceParallelAttention(
        causal=True, layout="zigzag", group=mesh_of(nodes), reference=True
    )
    leaves = [mine(x).requires_grad_() for x in given]
    actual = module(*leaves, offsets, offsets)
    gradients = torch.autograd.grad(actual, leaves, mine(grad))
    return {
        name: torch.allclose(x, mine(y))
        for name, x, y in zip(("out", *"qkv"), (actual, *gradients), (out, *rights), strict=True)
    }


def refusals() -> list[str]:
    """Return the messages of illegal calls."""
    mesh, said = mesh_of(NODES["2 x 2"]), []
    q, k = torch.ones(1, 4, 2, 8), torch.ones(1, 8, 2, 8)
    offsets = torch.tensor([0, 16], dtype=torch.int32)
    for call in (
        lambda: ops.sp_attention(q, k, k, causal=True, group=mesh),
        lambda: ops.sp_attention(
            q[0], q[0], q[0], causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets, group=mesh
        ),
        lambda: ops.sp_attention(q, q, q, causal=True, strategy="fused", group=mesh),
        lambda: ops.ulysses_attention(
            *[torch.ones(1, 4, 4, 8)] * 3, causal=True, transport="ldst", group=mesh
        ),
    ):
        try:
            call()
            said.append("")
        except tw.TileWeaveError as error:
            said.append(str(error))
    return said
