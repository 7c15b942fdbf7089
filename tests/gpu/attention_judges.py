"""References of ``tileweave bench`` for attention: PyTorch back ends, all-gather and ring.

    torchrun --nproc-per-node=2 tests/gpu/attention_judges.py

Some rows of each result are compared with fp32, the others with PyTorch's flash. Without a GPU the
same checks run with gloo, and with one back end. The ring needs a GPU for each rank.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

from tileweave.bench.attention import IMPLEMENTATIONS, Inputs, problem_of
from tileweave.bench.case import LOCAL, OURS, RING, Buffers, Checker, implementations_of
from tileweave.bench.results import Length
from tileweave.ops.core.groups import group_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.on_gpus import GPU, Verdicts, main, parser_of, say

JUDGES = {name: make for name, make in IMPLEMENTATIONS.items() if name not in (OURS, LOCAL)}
ROWS, HEADS, KV_HEADS, HEAD_DIM = (1024, 32, 8, 128) if GPU else (32, 4, 2, 16)


def fault(shape: Length, group, wanted: dict) -> str:
    """Return what is wrong with the implementations ``wanted``, or ""."""
    problem = problem_of("sp_attention", shape, group.world_size, torch.bfloat16)
    given = next(Inputs.random(problem, group))
    judges, missing = implementations_of(Buffers(problem, group, None), given, 1, wanted)
    checker = Checker(judges)
    for name, implementation in judges.items():
        checker(name, given, implementation.call(given))
    wrong = {n: f"error {e:.1e}" for n, e in checker.errors.items() if not e <= shape.tolerance}
    return "; ".join(f"{name}: {why}" for name, why in (wrong | missing if GPU else wrong).items())


def verdicts(_: argparse.Namespace) -> Verdicts:
    group = group_of("")
    ranks, wanted = group.world_size, JUDGES
    if GPU and group.shares_gpus:
        say("ring: not run: ranks share a GPU")
        wanted = {name: make for name, make in JUDGES.items() if not name.startswith(RING)}
    for batch, causal, layout in product((1, 2), (True, False), ("contiguous", "zigzag")):
        shape = Length(batch, ROWS * ranks, HEADS, KV_HEADS, HEAD_DIM, causal, layout, ranks)
        yield str(shape), fault(shape, group, wanted)


if __name__ == "__main__":
    sys.exit(main(verdicts, parser_of(__doc__)))
