"""Grouped GEMMs in plain torch: a loop over experts, for tests, CPUs and types without kernels."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..core.problem import refused


def slices_of(op: str, offsets: torch.Tensor, rows: int) -> list[slice]:
    """Return the rows of each expert. The host waits for ``offsets``.

    Raises:
        TileWeaveError: offsets decrease, or are not in [0, rows].
    """
    ends = [0, *offsets.tolist()]
    if ends != sorted(ends) or ends[-1] > rows:
        raise refused(op, f"offsets={ends[1:]}", f"ascending ends of rows, from 0 to {rows}")
    return [slice(*pair) for pair in pairwise(ends)]


def grouped_matmul(
    op: str, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the rows of x, (rows, K), times the weights of their experts, (E, N, K), to ``out``.

    Rows after those of all experts become zero.
    """
    slices = slices_of(op, offsets, len(x))
    for weight, rows in zip(w, slices, strict=True):
        torch.mm(x[rows], weight.t(), out=out[rows])
    out[slices[-1].stop :] = 0


def grouped_wgrad(
    op: str, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the gradient of the weights, (E, N, K), to ``out``."""
    for weight, rows in zip(out, slices_of(op, offsets, len(x)), strict=True):
        torch.mm(grad[rows].t(), x[rows], out=weight)
