"""Options of all commands that compile programs: ranks, sizes and pass configurations."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from ..builtins.errors import TileWeaveError
from ..passes.ir.sizes import LARGEST, MAX_RANKS
from ..runtime.plans.parameters import dynamic_extents, parameters_of
from .program_files import PrimFunc, json_or_text

DEFAULT_RANKS = 4


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the number of ranks."""
    parser.add_argument(
        "--ranks",
        "--world-size",
        type=int,
        metavar="N",
        help=f"number of ranks; default: {DEFAULT_RANKS}",
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


def add_values(parser: Any, scalars: bool = True) -> None:
    """Add the values of dynamic extents, and of ``scalars``."""
    scalar = "a scalar, which may be `epoch`, the index of the launch, or of " if scalars else ""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"value of {scalar}a dynamic extent, or an argument of a function of tilelang.jit, "
        "such as M=4096",
    )


def values_of(options: argparse.Namespace, programs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``--set`` of scalars and of dynamic extents, by name."""
    values = dict(_parse_value(options.command, pair) for pair in options.set)
    legal: set[str] = set()
    for program in programs.values():
        parameters = _parameters(program)
        legal |= {p.name for p in parameters if p.shape is None} | set(_dynamic_extents(program))
    _require_legal(options.command, programs, values, legal)
    return values


def sizes_of(options: argparse.Namespace, programs: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the sizes of ``--set`` that apply to each program, keyed by program name."""
    sizes = dict(_parse_size(options.command, pair) for pair in options.set)
    extents = {key: list(_dynamic_extents(program)) for key, program in programs.items()}
    legal = {name for names in extents.values() for name in names}
    _require_legal(options.command, programs, sizes, legal)
    return {
        key: {name: sizes[name] for name in names if name in sizes}
        for key, names in extents.items()
    }


def _require_legal(
    command: str, programs: Mapping[str, Any], values: Mapping[str, Any], legal: set[str]
) -> None:
    """Raise an error for a value of a name that no program has."""
    for name in values.keys() - legal:
        expected = " or ".join(sorted(legal)) or "none, as nothing has a value"
        raise TileWeaveError(
            f"{command}: --set {name}, of {', '.join(programs)}; expected {expected}"
        )


def _parse_size(command: str, pair: str) -> tuple[str, int]:
    name, _, value = pair.partition("=")
    if not name or not value.isdecimal() or not 1 <= int(value) <= LARGEST:
        raise TileWeaveError(
            f"{command}: --set {pair}; expected NAME=VALUE, a positive integer up to {LARGEST}"
        )
    return name, int(value)


def _parse_value(command: str, pair: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    if value == "epoch":
        return name, lambda epoch: epoch
    try:
        return name, int(value) if value.lstrip("+-").isdigit() else float(value)
    except ValueError:
        raise TileWeaveError(
            f"{command}: --set {pair}; expected NAME=NUMBER or NAME=epoch"
        ) from None


def _parameters(program: Any) -> Iterable[Any]:
    return parameters_of(program) if isinstance(program, PrimFunc) else program.parameters


def _dynamic_extents(program: Any) -> Iterable[str]:
    return dynamic_extents(_parameters(program))


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
        configs[name] = json_or_text(value)
    return configs
