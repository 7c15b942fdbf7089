"""Options that select what ``bench`` and ``tune`` time: operators, shapes and sizes."""

from __future__ import annotations

import argparse

from ..builtins.errors import TileWeaveError
from ..passes.ir.sizes import LARGEST


def add_cases(parser: argparse.ArgumentParser, names: str, shapes: str, sizes: str) -> None:
    """Add operators, shapes and sizes.

    Args:
        names: help text of the operators.
        shapes, sizes: legal values, for the help.
    """
    add = parser.add_argument
    add("ops", nargs="*", metavar="OPERATOR", help=names)
    add_list(parser, "shapes", "SHAPE", shapes)
    add_list(parser, "sizes", "N", sizes)


def add_list(
    parser: argparse.ArgumentParser, name: str, metavar: str, text: str, default: str = ""
) -> None:
    """Add an option whose values commas or spaces separate."""
    parser.add_argument(
        f"--{name}",
        nargs="+",
        default=[default] if default else [],
        metavar=metavar,
        help=f"{text}; separated by commas or spaces",
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
