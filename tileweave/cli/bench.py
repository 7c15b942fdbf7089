"""``tileweave bench``: time the operators and their alternatives."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .bench_cases import add_gemm_cases, positive_integer, positive_integers, split_list

if TYPE_CHECKING:
    from ..bench.attention import Lengths
    from ..bench.decode import Steps
    from ..bench.moe_shapes import Mixtures


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "bench",
        help="time the operators, and GEMM, attention, NCCL and async-TP for comparison: "
        "torchrun --nproc-per-node=4 -m tileweave bench",
    )
    add = parser.add_argument
    add_gemm_cases(parser)
    add(
        "--sizes",
        nargs="+",
        default=[],
        metavar="MIB",
        help="input of each rank to a collective in MiB, separated by commas or spaces; default: "
        "1,16,64,256. Without an OPERATOR, all collectives are timed",
    )
    _add_attention(parser)
    _add_moe(parser)
    _add_decode(parser)
    add(
        "--warmups",
        type=positive_integer,
        default=5,
        metavar="N",
        help="untimed iterations; default: %(default)s",
    )
    add(
        "--runs",
        type=positive_integer,
        default=20,
        metavar="N",
        help="timed iterations; default: %(default)s",
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


def _add_attention(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("attention and decode steps").add_argument
    add(
        "--lengths",
        nargs="+",
        default=[],
        metavar="ROWS",
        help="rows of each sequence over all ranks, separated by commas or spaces; default: the "
        "powers of two from 8192 to 262144. Without an OPERATOR, attention is timed",
    )
    add(
        "--batch",
        nargs="+",
        default=[],
        metavar="B",
        help="number of sequences; default: 1, and 1,16,64 for decode steps",
    )
    add(
        "--heads",
        type=positive_integer,
        default=32,
        metavar="N",
        help="query heads; default: %(default)s",
    )
    add(
        "--kv-heads",
        type=positive_integer,
        default=8,
        metavar="N",
        help="heads of keys and values; default: %(default)s",
    )
    add(
        "--head-dim",
        type=positive_integer,
        default=128,
        metavar="N",
        help="width of a head; default: %(default)s",
    )
    add(
        "--layout",
        default="zigzag",
        metavar="NAME",
        help="contiguous or zigzag; default: %(default)s",
    )
    add("--causal", action="store_true", help="only causal masks; default: causal and full")
    add("--full", action="store_true", help="only full masks")


def _add_moe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("mixtures of experts").add_argument
    add(
        "--models",
        nargs="+",
        default=["deepseek-v3,qwen3-235b,mixtral-8x7b,gpt-oss-120b"],
        metavar="NAME",
        help="deepseek-v3, qwen3-235b, mixtral-8x7b, mixtral-8x22b, gpt-oss-120b or "
        "EXPERTSxTOP_KxHIDDENxINTERMEDIATE, separated by commas or spaces; default: all but "
        "mixtral-8x22b",
    )
    add(
        "--tokens",
        nargs="+",
        default=[],
        metavar="T",
        help="tokens of each rank, separated by commas or spaces; default: "
        "1,16,128,1024,4096,8192. Without an OPERATOR, all of mixtures of experts are timed, as by "
        "the name `moe`",
    )
    add(
        "--routing",
        nargs="+",
        default=["uniform"],
        metavar="NAME",
        help="uniform, zipf (the i-th most popular expert in proportion to 1 / i) or hot (one "
        "expert of all tokens), separated by commas or spaces; default: uniform",
    )


def _add_decode(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("decode steps").add_argument
    add(
        "--keys",
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="cached tokens of each sequence on all ranks, separated by commas or spaces; default: "
        "4096,32768,131072. Without an OPERATOR, decode steps are timed, as by the name `decode`",
    )
    add(
        "--page-size",
        type=positive_integer,
        default=64,
        metavar="TOKENS",
        help="tokens of a page of the cache; default: %(default)s",
    )


def run(options: argparse.Namespace) -> None:
    """Measure, or print earlier results; the exit status is 1 if a result of ours is wrong."""
    from ..bench import command as bench

    if options.file is not None:
        bench.again(options.file, options.figure)
        return
    wanted = bench.Wanted(
        options.ops,
        split_list(options, "shapes"),
        positive_integers(options, "rows"),
        options.dtype,
        options.warmups,
        options.runs,
        options.json,
        options.figure,
        sizes=positive_integers(options, "sizes"),
        attention=_lengths(options),
        moe=_mixtures(options),
        decode=_steps(options),
    )
    if not bench.run(wanted):
        raise SystemExit(1)


def _lengths(options: argparse.Namespace) -> Lengths:
    from ..bench.attention import Lengths

    masks = [mask for mask, selected in ((True, options.causal), (False, options.full)) if selected]
    return Lengths(
        tuple(positive_integers(options, "lengths")),
        tuple(positive_integers(options, "batch")) or Lengths.batches,
        options.heads,
        options.kv_heads,
        options.head_dim,
        options.layout,
        tuple(masks) or Lengths.masks,
    )


def _steps(options: argparse.Namespace) -> Steps:
    from ..bench.decode import Steps

    return Steps(
        tuple(positive_integers(options, "keys")),
        tuple(positive_integers(options, "batch")) or Steps.batches,
        options.heads,
        options.kv_heads,
        options.head_dim,
        options.page_size,
    )


def _mixtures(options: argparse.Namespace) -> Mixtures:
    from ..bench.moe_shapes import Mixtures

    return Mixtures(
        tuple(split_list(options, "models")),
        tuple(positive_integers(options, "tokens")),
        tuple(split_list(options, "routing")),
    )
