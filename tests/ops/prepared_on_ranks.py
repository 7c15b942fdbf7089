"""``tw.prepare`` on ranks that are processes, which need different products in several groups."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave import ops
from tileweave.ops import preparation
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.runtime.executor.compile_ahead import Compilation

PAIRS = (0, 1), (1, 2)
NEEDED = {0: (("all", 8), ("01", 16)), 1: (("12", 24), ("01", 16), ("all", 8), ("12", 40))}
NEEDED[2] = ("all", 32), ("12", 40), ("12", 24), ("all", 8)
"""Group and rows of the products of each rank, in the order of its calls."""


def prepared() -> list[tuple[int, list[int]]]:
    """Return for each call of ``tw.prepare`` its result, and the rows of what was compiled
    together."""
    groups = {"all": None} | {f"{a}{b}": dist.new_group([a, b]) for a, b in PAIRS}
    compiled: list[int] = []

    def step(*products: tuple[str, int]) -> None:
        for name, rows in products:
            a, b = torch.ones(rows, 16), torch.ones(16, 16)
            ops.all_gather_matmul(a, b, groups[name])

    def choose(problem, ranks, requested, device):
        assert len(set(ranks.exchange("choose", str(problem)))) == 1
        return requested

    def compile_ahead(problems):
        compiled.extend(problem.rows for problem, _ in problems)
        return Compilation(len(problems))

    results = []
    with (
        patch.object(GemmOperator, "choose", choose),
        patch.object(
            preparation, "op_cache_of", lambda _: SimpleNamespace(compile_ahead=compile_ahead)
        ),
    ):
        for products in (NEEDED[dist.get_rank()], (("all", 32),), ()):
            compiled.clear()
            results.append((tw.prepare(step, *products).kernels, [*compiled]))
    return results


def prepared_where_one_fails() -> list[str]:
    """Return what calls of ``tw.prepare`` raise; its function fails on rank 1, then on none."""

    def step(fails: bool) -> None:
        if fails and dist.get_rank() == 1:
            raise ValueError("no such layer")

    raised = []
    for fails in (True, False):
        try:
            tw.prepare(step, fails)
        except (tw.TileWeaveError, ValueError) as error:
            raised.append(str(error))
    return raised
