"""Options and the loop over programs that ``simulate`` and ``mutate`` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from ..builtins.errors import TileWeaveError
from ..runtime.kernel.configured import configured
from ..runtime.plans.parameters import dynamic_extents, parameters_of
from .compile_options import add_ranks, add_size, sizes_of
from .program_files import PLANS_AND_KERNELS, PrimFunc, add_program

_MAX_SECONDS = 600
"""Longest estimated time without ``--force``."""
Outcome = dict[str, Any]
"""Result of one program; ``--json`` prints it."""


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Add the programs, the simulated ranks, the schedules and the inputs."""
    add = parser.add_argument
    add_program(parser, PLANS_AND_KERNELS)
    add_ranks(parser)
    add(
        "--schedules",
        type=int,
        default=20,
        metavar="N",
        help="number of interleavings; default: %(default)s",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the first schedule; default: %(default)s",
    )
    add(
        "--epochs",
        type=int,
        default=3,
        metavar="N",
        help="launches per schedule; default: %(default)s",
    )
    add(
        "--resident-blocks",
        type=int,
        metavar="N",
        help="blocks of a rank that fit on its GPU; default: tileweave.resident_blocks, 132",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a scalar or of a dynamic extent: a number, or `epoch`, the index of the "
        "launch",
    )
    add_size(parser)


def add_level(parser: argparse.ArgumentParser) -> None:
    """Add the level of the simulation, and the architecture below the tile level."""
    parser.add_argument(
        "--level",
        choices=("tile", "device"),
        default="tile",
        help="simulate the program, or the device functions that it is lowered to; "
        "default: %(default)s",
    )
    add_arch(parser)


def add_arch(parser: argparse.ArgumentParser) -> None:
    """Add the architecture of the device functions."""
    parser.add_argument(
        "--arch",
        choices=("sm_80", "sm_90a"),
        default="sm_90a",
        help="architecture of the device functions; default: %(default)s",
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option that lifts the time limit."""
    parser.add_argument(
        "--force",
        action="store_true",
        help=f"run even if the estimated time exceeds {_MAX_SECONDS // 60} minutes",
    )


def most_seconds(options: argparse.Namespace) -> float | None:
    """Return the time limit."""
    return None if options.force else _MAX_SECONDS


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that prints outcomes as JSON."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per program")


def run_each(
    programs: dict[str, Any],
    run: Callable[[str, Any, dict[str, Any], argparse.Namespace], Outcome],
    options: argparse.Namespace,
    configs: Mapping[str, Any] | None = None,
) -> list[Outcome]:
    """Run each program except kernels that a plan before them has launched.

    Args:
        run: called with the name, the executable, its scalars and ``options``.
        configs: ``pass_configs``.
    """
    from ..simulator import executable_at

    if options.seed < 0:
        raise TileWeaveError(f"{options.command}: --seed {options.seed}; expected 0 or more")
    scalars = parsed_scalars(options, programs)
    sizes = sizes_of(options, programs)
    outcomes: list[Outcome] = []
    launched: set[int] = set()
    for name, program in programs.items():
        if id(program) in launched:
            continue
        options.running = name, program
        executable = executable_at(
            configured(options.command, program, configs),
            getattr(options, "mesh", None) or options.ranks,
            getattr(options, "level", "tile"), getattr(options, "arch", ""),
        )  # fmt: skip
        outcomes.append(run(name, executable, scalars | sizes[name], options))
        launched |= executable.launched
    return outcomes


def parsed_scalars(options: argparse.Namespace, programs: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``--set`` by name; refuse those of unknown parameters."""
    scalars = dict(_parse_scalar(options.command, pair) for pair in options.set)
    _require_parameters(options.command, programs, scalars)
    return scalars


def fault_of(error: Any) -> Outcome:
    """Return the fault of a ``SimulationError`` as ``--json`` prints it."""
    return {"kind": error.kind, "report": error.report, "seed": error.seed}


def _parse_scalar(command: str, pair: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    if value == "epoch":
        return name, lambda epoch: epoch
    try:
        return name, int(value) if value.lstrip("+-").isdigit() else float(value)
    except ValueError:
        raise TileWeaveError(
            f"{command}: --set {pair}; expected NAME=NUMBER or NAME=epoch"
        ) from None


def _require_parameters(command: str, programs: dict[str, Any], scalars: dict[str, Any]) -> None:
    """Raise an error for a value of a parameter that no program has."""
    legal: set[str] = set()
    for program in programs.values():
        is_kernel = isinstance(program, PrimFunc)
        parameters = parameters_of(program) if is_kernel else program.parameters
        legal |= {p.name for p in parameters if p.shape is None} | set(dynamic_extents(parameters))
    for name in scalars.keys() - legal:
        expected = " or ".join(sorted(legal)) or "none, as there are no scalars"
        raise TileWeaveError(
            f"{command}: --set {name}, of {', '.join(programs)}; expected {expected}"
        )
