"""Functions that test_bench.py runs on each rank."""

from __future__ import annotations

import contextlib
import io

from tileweave.bench import command as bench
from tileweave.bench.decode import Steps

SMALL = Steps((384, 128), (1, 3), heads=6, kv_heads=2, head_dim=32, page_size=16)
"""Three ranks can share 384 tokens of a sequence, but not 128."""


def benchmark(json: str) -> tuple[bool, str]:
    """Return whether ``tileweave bench decode`` finds all results right, and its output."""
    said = io.StringIO()
    wanted = bench.Wanted(["decode"], [], [], warmups=1, runs=2, json=json, decode=SMALL)
    with contextlib.redirect_stdout(said):
        right = bench.run(wanted)
    return right, said.getvalue()
