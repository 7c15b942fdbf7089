"""Options of all commands that compile programs: ranks, sizes and pass configurations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from .. import passes
from ..builtins.errors import TileWeaveError
from ..passes.ir.sizes import LARGEST, MAX_RANKS
from ..runtime import MeshPlan, Plan
from ..runtime.plans.parameters import dynamic_extents

DEFAULT_RANKS = 4


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the number of ranks and ``--traceback``."""
    parser.add_argument(
        "--ranks",
        "--world-size",
        type=int,
        metavar="N",
        help=f"number of ranks; default: {DEFAULT_RANKS}",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show all Python and C++ frames of an error"
    )


def resolve_ranks(options: argparse.Namespace) -> None:
    """Set the default number of ranks; raise an error for a number that no command supports."""
    if not hasattr(options, "ranks"):
        return
    options.ranks_by_default = options.ranks is None
    if options.ranks is None:
        options.ranks = DEFAULT_RANKS
    if not 1 <= options.ranks <= MAX_RANKS:
        raise TileWeaveError(
            f"{options.command}: --ranks {options.ranks}; expected at least 1, and at most "
            f"{MAX_RANKS}"
        )


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of dynamic extents."""
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="size of a dynamic extent, such as M=4096",
    )


def sizes_of(options: argparse.Namespace, programs: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the sizes that apply to each program, keyed by program name."""
    sizes = dict(_parse_size(options.command, pair) for pair in options.size)
    extents = {key: list(_dynamic_extents(program)) for key, program in programs.items()}
    legal = dict.fromkeys(name for names in extents.values() for name in names)
    for name, size in sizes.items():
        if name not in legal:
            expected = " or ".join(legal) or "no size: there is no dynamic extent"
            raise TileWeaveError(
                f"{options.command}: --size {name}={size} of {', '.join(programs)}; expected "
                f"{expected}"
            )
    return {
        key: {name: sizes[name] for name in names if name in sizes}
        for key, names in extents.items()
    }


def _parse_size(command: str, pair: str) -> tuple[str, int]:
    name, _, value = pair.partition("=")
    if not name or not value.isdecimal() or not 1 <= int(value) <= LARGEST:
        raise TileWeaveError(
            f"{command}: --size {pair}; expected NAME=VALUE, a positive integer up to {LARGEST}"
        )
    return name, int(value)


def _dynamic_extents(program: Any) -> Iterable[str]:
    if isinstance(program, Plan | MeshPlan):
        return dynamic_extents(program.parameters)
    return passes.dynamic_sizes(program)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the entries of ``pass_configs``."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="entry of pass_configs, such as tileweave.reuse=credit; VALUE is JSON or plain text",
    )


def configs_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return ``pass_configs`` of the command line."""
    configs: dict[str, Any] = {}
    for pair in options.config:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise TileWeaveError(f"{options.command}: --config {pair}; expected NAME=VALUE")
        try:
            configs[name] = json.loads(value)
        except json.JSONDecodeError:
            configs[name] = value
    return configs
