"""Functions that test_bench.py runs on each rank."""

from __future__ import annotations

import contextlib
import io

from tileweave.bench import command as bench


def benchmark(json: str) -> tuple[bool, str]:
    """Return whether ``tileweave bench decode`` finds all results right, and its output."""
    said = io.StringIO()
    # Three ranks can share 384 tokens of a sequence, but not 128.
    wanted = bench.BenchOptions(
        ["decode"], ["6x2x32"], (384, 128), (1, 3), warmups=1, runs=2, json=json
    )
    with contextlib.redirect_stdout(said):
        right = bench.run(wanted)
    return right, said.getvalue()
