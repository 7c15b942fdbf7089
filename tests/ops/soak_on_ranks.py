"""Functions that test_soak.py runs on each rank, in its own process, on a CPU."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch

from tests.gpu import soak
from tests.ops.on_ranks import dist
from tileweave import ops


def visits(seed: int, count: int, wrong_on: int | None = None) -> tuple[int, int, set[str], str]:
    """Make ``count`` visits; return the launches, the wrong results, the operators and the output.

    Args:
        wrong_on: rank on which all operators with ``out`` change the last element of a result once.
    """
    said, soaked = io.StringIO(), soak.Soak(seed)
    originals = dict(vars(ops))
    left = [1]
    if wrong_on == dist.get_rank():
        for name in OPERATORS:
            setattr(ops, name, _wrong_once(originals[name], left))
    try:
        with contextlib.redirect_stdout(said):
            for number in range(count):
                soaked.visit(number)
    finally:
        for name in OPERATORS:
            setattr(ops, name, originals[name])
    names = {soaked.problems[index].name.split()[0] for index in soaked.used}
    return soaked.launches, soaked.wrong, names, said.getvalue()


OPERATORS = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather",
    "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "combine", "grouped_matmul",
)  # fmt: skip


def _wrong_once(operator: Any, left: list[int]) -> Any:
    """Return ``operator``, whose next result has a wrong last element."""

    def call(*args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        operator(*args, out=out, **options)
        if left:
            left.pop()
            out.view(-1)[-1] += 1
        return out

    return call
