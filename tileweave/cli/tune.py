"""``tileweave tune``: ``tw.tune`` for the products that ``tileweave bench`` would time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import ops
from ..bench.command import Wanted, join
from ..ops.autotune.store import file_of
from ..runtime import finalize


def run(
    names: Sequence[str], shapes: Sequence[str], rows: Sequence[int], dtype: str, row_major: bool
) -> None:
    """Tune, and say on rank 0 what was found out, and where it is kept.

    Collective: under torchrun every process calls it.

    Args:
        names, shapes, rows, dtype: as of ``bench.Wanted``.
        row_major: whether b is a row-major (K, N), else a transposed (N, K).

    Raises:
        TileWeaveError: an operator or a shape that there is not; no GPU.
    """
    cases = Wanted(names, shapes, rows, dtype, command="tune").cases()
    group = join(cases, at_once=2)  # the best so far, and the one that it meets
    say = print if group.rank == 0 else lambda *_, **__: None
    for case in cases:
        shape = case.shape.M, case.shape.N, case.shape.K
        (tuned,) = ops.tune(case.op, [shape], getattr(torch, dtype), transposed=not row_major)
        say(tuned, flush=True)
    say(f"kept in {file_of(group)}")
    if group.device.type == "cuda":
        finalize()
