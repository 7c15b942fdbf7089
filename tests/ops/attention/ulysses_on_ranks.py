"""Functions that test_ulysses.py runs on each rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.ops.on_ranks import numbers, part_of_the_world
from tileweave import ops


class Shape(NamedTuple):
    """Extents of one rank's tensors."""

    batch: int = 1
    rows: int = 4
    keys: int = 4
    heads: int = 6
    kv_heads: int = 6
    width: int = 8
    v_width: int = 8

    def tensors(self, of: int) -> list[torch.Tensor]:
        """Return q, k and v of a rank, and weights for its result."""
        shapes = {
            "q": (self.rows, self.heads, self.width),
            "k": (self.keys, self.kv_heads, self.width),
            "v": (self.keys, self.kv_heads, self.v_width),
            "weight": (self.rows, self.heads, self.v_width),
        }
        return [numbers(self.batch, *shape, of=of, what=what) for what, shape in shapes.items()]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """Return attention of the whole sequence, one head after the other, by its definition."""
    heads = []
    rows, keys = q.shape[1], k.shape[1]
    seen = torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows
    for h in range(q.shape[2]):
        of = h * k.shape[2] // q.shape[2]
        scores = q[:, :, h] @ k[:, :, of].mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            scores = scores.masked_fill(~seen, -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, :, of])
    return torch.stack(heads, 2)


def attend(
    shape: Shape, causal: bool, scale: float | None, form: str | None, compiled: bool
) -> dict[str, bool]:
    """Compare ``ulysses_attention`` and its gradients with one process that has the
    whole sequence."""
    group = part_of_the_world(form) if form else None
    me, count = dist.get_rank(), 2 if form else dist.get_world_size()
    every = [shape.tensors(of=r) for r in range(count)]
    *given, weights = (torch.cat(part, 1) for part in zip(*every, strict=True))
    given = [x.requires_grad_() for x in given]
    whole = attention(*given, causal, scale)
    wholes = [whole, *torch.autograd.grad((whole * weights).sum(), given)]

    def f(q, k, v):
        return ops.ulysses_attention(q, k, v, causal=causal, softmax_scale=scale, group=group)

    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    *mine, weight = every[me] if me < count else shape.tensors(of=me)
    mine = [x.requires_grad_() for x in mine]
    result = f(*mine)
    gradients = [result, *torch.autograd.grad((result * weight).sum(), mine)]
    return {
        name: torch.allclose(one, all_of_them.chunk(count, 1)[me])
        for name, one, all_of_them in zip(("out", "q", "k", "v"), gradients, wholes, strict=True)
    }


def differ() -> None:
    """Call with another number of keys on every rank."""
    q, k, v, _ = Shape(width=16, keys=4 + dist.get_rank()).tensors(of=0)
    ops.ulysses_attention(q, k, v, causal=False)
