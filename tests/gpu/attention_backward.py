"""Gradients of attention over a sharded sequence between real GPUs, against the reference.

    torchrun --nproc-per-node=4 tests/gpu/attention_backward.py [--transport ldst]

Without a GPU the same on small shapes with gloo: that tries this file.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from tileweave.ops.attention.backward import sp_attention_backward
from tileweave.ops.attention.reference import gathered_attention
from tileweave.ops.core.groups import group_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.on_gpus import GPU, Verdicts, main, parser_of

HEAP_BYTES = 6 << 30
UNIT = 128 if GPU else 4
"""Number of rows that divides each rank's part of a sequence."""
ERROR = 2e-2
"""Relative norm, of inputs drawn from N(0, 1)."""


class Case(NamedTuple):
    """``lengths`` of q and k are a rank's, in units: of each sequence of a batch, or of those that
    are packed."""

    lengths: list[tuple[int, int]]
    heads: int
    kv_heads: int
    width: int
    v_width: int
    dtype: torch.dtype = torch.bfloat16
    batch: int = 0


CASES = [
    Case([(16, 16)], 8, 2, 128, 128, batch=1),
    Case([(8, 8)], 4, 4, 64, 64, torch.float16, batch=3),
    Case([(4, 12)], 8, 1, 128, 128, batch=2),
    Case([(8, 8)], 4, 4, 192, 128, batch=1),
    Case([(2, 2), (5, 5), (1, 7), (0, 3)], 8, 2, 128, 128),
    Case([(4, 4)], 4, 2, 80, 48, torch.float32, batch=1),
]


def fault(case: Case, causal: bool, layout: str, transport: str) -> str:
    """Return what is wrong, or ""."""
    group, device = group_of(""), "cuda" if GPU else "cpu"
    q_rows, k_rows = (UNIT * sum(x) for x in zip(*case.lengths, strict=True))
    batch = (case.batch,) if case.batch else ()
    q, k, v, grad = (
        torch.randn(*batch, *shape, dtype=case.dtype, device=device)
        for shape in (
            (q_rows, case.heads, case.width), (k_rows, case.kv_heads, case.width),
            (k_rows, case.kv_heads, case.v_width), (q_rows, case.heads, case.v_width),
        )
    )  # fmt: skip
    options = {"causal": causal, "layout": layout}
    if not case.batch:
        offsets = torch.tensor([(0, 0), *case.lengths], device=device).cumsum(0)
        offsets = (offsets * UNIT * group.world_size).int()
        options |= {"cu_seqlens_q": offsets[:, 0].clone(), "cu_seqlens_k": offsets[:, 1].clone()}
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out, lse = gathered_attention(*leaves, **options)
    expected = torch.autograd.grad(out, leaves, grad.float())
    out = out.detach().to(case.dtype)
    for _ in range(3):
        actual = sp_attention_backward(
            grad, q, k, v, out, lse.detach(), transport=transport, **options
        )
        for name, x, y in zip("qkv", actual, expected, strict=True):
            if x.shape != y.shape or x.dtype != case.dtype:
                return f"gradient of {name}: {tuple(x.shape)} {x.dtype}"
            error = ((x.float() - y).norm() / y.norm()).item()
            if not error <= ERROR:
                return f"gradient of {name}: relative error {error:.1e}"
    return ""


def verdicts(options: argparse.Namespace) -> Verdicts:
    torch.manual_seed(group_of("").rank)
    for case, layout, causal in product(CASES, ("contiguous", "zigzag"), (False, True)):
        mask = "causal" if causal else "full"
        yield f"{layout}, {mask}: {case}", fault(case, causal, layout, options.transport)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--transport", default="auto")
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
