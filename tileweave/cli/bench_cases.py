"""Options that select what ``bench`` and ``tune`` time: operators, shapes and types."""

from __future__ import annotations

import argparse

from ..builtins.errors import TileWeaveError
from ..passes.ir.sizes import LARGEST


def add_gemm_cases(parser: argparse.ArgumentParser) -> None:
    """Add the GEMM operators, their shapes and their type."""
    add = parser.add_argument
    add(
        "ops",
        nargs="*",
        metavar="OPERATOR",
        help="name in tileweave.ops; before the options; default: all GEMM operators",
    )
    add(
        "--shapes",
        nargs="+",
        default=["llama70b"],
        metavar="NAME",
        help="llama8b, llama70b, llama405b, qwen72b or MxNxK, separated by commas or spaces; "
        "default: llama70b",
    )
    add(
        "--rows",
        nargs="+",
        default=["1024,2048,4096,8192,16384"],
        metavar="M",
        help="rows of each model, separated by commas or spaces; "
        "default: 1024,2048,4096,8192,16384",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="type of the operands; default: %(default)s",
    )


def positive_integer(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text}; expected a positive integer up to {LARGEST}")
    return int(text)


def split_list(options: argparse.Namespace, name: str) -> list[str]:
    """Return the items of option ``name``, which commas or spaces separate."""
    arguments = getattr(options, name)
    items = [item for argument in arguments for item in argument.split(",") if item]
    if arguments and not items:
        raise TileWeaveError(
            f"{options.command}: --{name} {' '.join(arguments)}; expected at least one, with "
            "commas or spaces between them"
        )
    return items


def positive_integers(options: argparse.Namespace, name: str) -> list[int]:
    """Return the positive integers of option ``name``, which commas or spaces separate."""
    try:
        return [positive_integer(item) for item in split_list(options, name)]
    except argparse.ArgumentTypeError as error:
        raise TileWeaveError(
            f"{options.command}: --{name} {error} (operators precede the options)"
        ) from None
