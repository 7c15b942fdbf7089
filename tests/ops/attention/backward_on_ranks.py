"""Functions that test_backward.py runs on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ops.on_ranks import numbers
from tileweave.ops.attention import backward as attention_backward
from tileweave.ops.attention.backward import sp_attention_backward
from tileweave.ops.attention.reference import gathered_attention

LENGTHS = [(0, 12), (12, 24), (18, 18), (6, 6)]
"""Of packed sequences: queries and keys."""


def inputs(packed: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return q, k, v and the gradient of the result of this rank; offsets if sequences
    are packed."""
    me, count = dist.get_rank(), dist.get_world_size()
    rows, keys = (sum(x) // count for x in zip(*LENGTHS, strict=True)) if packed else (8, 12)
    batch = () if packed else (2,)
    given = [
        numbers(*batch, n, heads, width, of=me, what=what)
        for n, heads, width, what in (
            (rows, 4, 8, "q"), (keys, 2, 8, "k"), (keys, 2, 6, "v"), (rows, 4, 6, "grad")
        )
    ]  # fmt: skip
    offsets = [
        torch.tensor([0, *lengths]).cumsum(0).int() for lengths in zip(*LENGTHS, strict=True)
    ]
    return given, offsets if packed else []


def differentiate(
    layout: str, causal: bool, packed: bool, dtype: torch.dtype, some: bool
) -> dict[str, bool]:
    """Compare gradients with those of the reference, by autograd.

    Args:
        some: compute for few queries at a time.
    """
    given, offsets = inputs(packed)
    *given, grad = (x.to(dtype) for x in given)
    options = {"causal": causal, "layout": layout, "softmax_scale": 0.3}
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False))
    leaves = [x.clone().requires_grad_() for x in given]
    out, lse = gathered_attention(*leaves, **options)
    expected = torch.autograd.grad(out, leaves, grad)
    before = attention_backward._MAX_SCORES
    attention_backward._MAX_SCORES = 200 if some else before
    try:
        actual = sp_attention_backward(grad, *given, out.detach(), lse.detach(), **options)
    finally:
        attention_backward._MAX_SCORES = before
    near = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    return {
        name: x.dtype == dtype and x.is_contiguous() and torch.allclose(x, y, near, near)
        for name, x, y in zip("qkv", actual, expected, strict=True)
    }


def compiled() -> bool:
    """Return whether the gradients can be traced."""
    given, _ = inputs(False)
    *given, grad = given
    out, lse = gathered_attention(*given, causal=True)

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return sp_attention_backward(*tensors, causal=True)

    actual = torch.compile(f, backend="aot_eager", fullgraph=True)(grad, *given, out, lse)
    expected = f(grad, *given, out, lse)
    return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
