"""``tileweave tune``: run ``tw.tune`` for the GEMM cases that ``tileweave bench`` would time."""

from __future__ import annotations

import argparse

from .bench_cases import add_gemm_cases, positive_integers, split_list


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest tiles and strategy, and store them on disk: torchrun "
        "--nproc-per-node=4 -m tileweave tune",
    )
    add_gemm_cases(parser)
    parser.add_argument(
        "--row-major", action="store_true", help="b is a row-major (K, N), not a transposed (N, K)"
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Tune each case. Rank 0 prints the results and the file that stores them.

    Collective: under torchrun every process calls it.

    Raises:
        TileWeaveError: an unknown operator or shape, or no GPU.
    """
    import torch

    from .. import ops
    from ..bench.command import join
    from ..bench.selection import Wanted
    from ..ops.autotune.store import file_of
    from ..runtime import finalize

    shapes, rows = split_list(options, "shapes"), positive_integers(options, "rows")
    cases = Wanted(options.ops, shapes, rows, options.dtype, command="tune").cases()
    group = join(cases, at_once=2)  # the best configuration so far, and its competitor
    dtype, transposed = getattr(torch, options.dtype), not options.row_major
    for case in cases:
        shape = case.shape.M, case.shape.N, case.shape.K
        (tuned,) = ops.tune(case.op, [shape], dtype, transposed=transposed)
        if group.rank == 0:
            print(tuned, flush=True)
    if group.rank == 0:
        print(f"stored in {file_of(group)}")
    if group.device.type == "cuda":
        finalize()
