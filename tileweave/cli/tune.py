"""``tileweave tune``: run ``tw.tune`` for the GEMM cases that ``tileweave bench`` would time."""

from __future__ import annotations

import argparse

from .bench_cases import add_cases, positive_integers, split_list


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest tiles and strategy, and store them on disk: torchrun "
        "--nproc-per-node=4 -m tileweave tune",
    )
    add_cases(
        parser,
        "name of a GEMM operator in tileweave.ops; before the options; default: all",
        "llama8b, llama70b (default), llama405b, qwen72b or MxNxK",
        "rows of each model; default: 1024,2048,4096,8192,16384",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Tune each case. Rank 0 prints the results and the file that stores them.

    Collective: under torchrun every process calls it.

    Raises:
        TileWeaveError: an unknown operator or shape, or no GPU.
    """
    from .. import ops
    from ..bench.command import join
    from ..bench.selection import DTYPE, BenchOptions
    from ..ops.autotune.store import file_of
    from ..runtime import finalize

    shapes, sizes = split_list(options, "shapes"), positive_integers(options, "sizes")
    cases = BenchOptions(options.ops, shapes, sizes, command="tune").cases()
    group = join(cases, at_once=2)  # the best configuration so far, and its competitor
    for case in cases:
        shape = case.shape.M, case.shape.N, case.shape.K
        (tuned,) = ops.tune(case.op, [shape], DTYPE)
        if group.rank == 0:
            print(tuned, flush=True)
    if group.rank == 0:
        print(f"stored in {file_of(group)}")
    if group.device.type == "cuda":
        finalize()
