"""Functions that the tests of attention run on each rank, in its own process, on a CPU."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ops.on_ranks import numbers
from tileweave import ops
from tileweave.ops.attention.problem import checked_attention
from tileweave.ops.core.agreement import agree
from tileweave.ops.core.groups import group_of


def differ() -> None:
    """Rank 1 alone asks for a causal result."""
    group = group_of("")
    q = torch.zeros(1, 4, 2, 8)
    problem = checked_attention(q, q, q, group.world_size, causal=dist.get_rank() == 1)
    agree(group, problem, "auto")


def attend_and_differentiate(layout: str, packed: bool) -> dict[str, bool]:
    """The reference on every rank, with gradients, against torch's attention of one process."""
    me, count = dist.get_rank(), dist.get_world_size()
    lengths = [(2 * count, 4 * count), (4 * count, 4 * count)] if packed else [(24, 36), (24, 36)]
    begins = [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True)]
    whole = [
        numbers(n, heads, width, of=0, what=what).requires_grad_()
        for n, heads, width, what in (
            (begins[0][-1], 4, 8, "q"), (begins[1][-1], 2, 8, "k"), (begins[1][-1], 2, 6, "v")
        )
    ]  # fmt: skip
    expected = torch.cat([
        attended(*(x[i:j] for x, (i, j) in zip(whole, places, strict=True)))
        for places in zip(*(pairwise(begins[n].tolist()) for n in (0, 1, 1)), strict=True)
    ])  # fmt: skip
    weight = numbers(*expected.shape, of=0, what="weight")
    gradients = torch.autograd.grad((expected * weight).sum(), whole)

    def mine(x: torch.Tensor, which: int) -> torch.Tensor:
        x = ops.shard_sequence(x, me, count, layout, 0, begins[which])
        return x if packed else x.unflatten(0, (2, -1))

    module = ops.SequenceParallelAttention(causal=True, layout=layout, reference=True)
    given = [
        mine(x.detach(), which).requires_grad_() for x, which in zip(whole, (0, 1, 1), strict=True)
    ]
    out = module(*given, *(begins if packed else ()))
    grads = torch.autograd.grad((out * mine(weight, 0)).sum(), given)
    right = {"out": torch.allclose(out, mine(expected, 0))}
    for name, x, y, which in zip("qkv", grads, gradients, (0, 1, 1), strict=True):
        right[name] = torch.allclose(x, mine(y, which))
    return right


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of one whole sequence, causal, by torch."""
    hides = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, hides, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
