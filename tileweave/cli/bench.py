"""``tileweave bench``: time the operators and their alternatives."""

from __future__ import annotations

import argparse

from .bench_cases import add_cases, add_list, positive_integer, positive_integers, split_list
from .program_files import load_function


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "bench",
        help="time the operators, and GEMM, attention, NCCL and async-TP for comparison: "
        "torchrun --nproc-per-node=4 -m tileweave bench",
    )
    add = parser.add_argument
    add_cases(
        parser,
        "name in tileweave.ops, or gemm, collectives, attention, moe or decode; before the "
        "options; default: gemm",
        "what is fixed. GEMM: llama8b, llama70b (default), llama405b, qwen72b or MxNxK; attention "
        "and decode steps: HEADSxKV_HEADSxHEAD_DIM (default: 32x8x128); experts: deepseek-v3, "
        "qwen3-235b, mixtral-8x7b, mixtral-8x22b (not a default), gpt-oss-120b or "
        "EXPERTSxTOP_KxHIDDENxINTERMEDIATE",
        "what varies. GEMM: rows of each model; collectives: MiB of each rank; attention: rows of "
        "a sequence; experts: tokens of each rank; decode steps: cached tokens of a sequence",
    )
    add_list(
        parser, "batch", "B", "sequences of attention and decode steps; default: 1, or 1,16,64"
    )
    add(
        "--layout",
        default="zigzag",
        metavar="NAME",
        help="of attention: contiguous or zigzag; default: %(default)s",
    )
    add_list(
        parser,
        "routing",
        "NAME",
        "of experts: uniform (default), zipf (the i-th most popular expert in proportion to 1 / i) "
        "or hot (one expert of all tokens)",
        "uniform",
    )
    add(
        "--against",
        metavar="FILE:FUNCTION",
        help="also time this function, which gets the arguments of the operator and returns its "
        "result",
    )
    add(
        "--runs",
        type=positive_integer,
        default=20,
        metavar="N",
        help="timed iterations, after 5 untimed ones; default: %(default)s",
    )
    add("--json", metavar="OUT", help="also write the results to this file")
    add("--figure", metavar="OUT", help="draw the distance of each result from the ideal: .png")
    add(
        "--from",
        dest="file",
        metavar="IN",
        help="measure nothing; print (and with --figure draw) the results that --json wrote to "
        "this file",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Measure, or print earlier results; the exit status is 1 if a result of ours is wrong."""
    from ..bench import command as bench

    if options.file is not None:
        bench.again(options.file, options.figure)
        return
    selection = bench.BenchOptions(
        options.ops,
        split_list(options, "shapes"),
        positive_integers(options, "sizes"),
        positive_integers(options, "batch"),
        options.layout,
        split_list(options, "routing"),
        None if options.against is None else load_function("bench: --against", options.against),
        options.runs,
        json=options.json,
        figure=options.figure,
    )
    if not bench.run(selection):
        raise SystemExit(1)
