"""Options and the loop over programs that ``simulate`` and ``mutate`` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..builtins.errors import TileWeaveError
from ..runtime.kernel.configured import configured
from .compile_options import add_ranks, add_values, values_of
from .program_files import PLANS_AND_KERNELS, add_program
from .reports import relative_paths

if TYPE_CHECKING:
    from ..simulator import Debugger, SimulationError

_MAX_SECONDS = 600
"""Longest estimated time without ``--force``."""
ARCH = "sm_90a"
"""Architecture of the device functions."""
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
    add_values(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the level of the simulation, JSON as output, and the option that lifts the time limit."""
    add_level(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object per program")
    add(
        "--force",
        action="store_true",
        help=f"run even if the estimated time exceeds {_MAX_SECONDS // 60} minutes",
    )


def add_level(parser: argparse.ArgumentParser) -> None:
    """Add the level of the simulation."""
    parser.add_argument(
        "--level",
        choices=("tile", "device"),
        default="tile",
        help="simulate the program, or the device functions that it is lowered to; "
        "default: %(default)s",
    )


def add_debugging(parser: argparse.ArgumentParser) -> None:
    """Add the check for statements that make a NaN or an infinity, the number of blocks, and what
    the debugger shows."""
    parser.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help="number of blocks of each launch that run, among them the first and the last; "
        "default: all",
    )
    parser.add_argument(
        "--watch",
        action="append",
        default=[],
        metavar="NAME[, CONDITION]",
        help="print a tile or a variable after each statement that changes it, in block 0 of rank "
        "0 or where the condition holds; may be repeated",
    )
    parser.add_argument(
        "--break",
        dest="breakpoint",
        metavar="LINE[, CONDITION]",
        help="open pdb before the statements of a line, or of FILE:LINE, in block 0 of rank 0 or "
        "where the condition holds",
    )
    parser.add_argument(
        "--nan",
        action="store_true",
        help="stop at the first statement that makes a NaN or an infinity of other values",
    )


def debugger_of(options: argparse.Namespace) -> Debugger | None:
    """Return the debugger that ``add_debugging`` describes; None: it shows nothing.

    Raises:
        TileWeaveError: the level has no debugger.
    """
    from ..simulator import Debugger

    if not (options.watch or options.breakpoint):
        return None
    if options.level != "tile":
        option = "--watch" if options.watch else "--break"
        raise TileWeaveError(
            f"{options.command}: {option} with --level {options.level}; expected --level tile"
        )
    return Debugger(options.watch, options.breakpoint)


def print_unreached(debugger: Debugger | None) -> None:
    """Print to stderr what the debugger never showed, and lines that no block reached."""
    for text in [] if debugger is None else debugger.unreached():
        print(f"tileweave: {relative_paths(text)}", file=sys.stderr)


def time_limit_s(options: argparse.Namespace) -> float | None:
    """Return the largest estimated time of a run, in seconds; None if there is no limit."""
    return None if options.force else _MAX_SECONDS


def run_each(
    programs: dict[str, Any],
    run: Callable[[str, Any, dict[str, Any], argparse.Namespace], Outcome],
    options: argparse.Namespace,
    configs: Mapping[str, Any] | None = None,
    debugger: Debugger | None = None,
) -> list[Outcome]:
    """Run each program except kernels that a plan before them has launched.

    Args:
        run: called with the name, the executable, its scalars and ``options``.
        configs: ``pass_configs``.
        debugger: see ``executable_at``.
    """
    from ..simulator import executable_at

    if options.seed < 0:
        raise TileWeaveError(f"{options.command}: --seed {options.seed}; expected 0 or more")
    values = values_of(options, programs)
    outcomes: list[Outcome] = []
    launched: set[int] = set()
    for name, program in programs.items():
        if id(program) in launched:
            continue
        options.running = name, program
        executable = executable_at(
            configured(options.command, program, configs),
            options.ranks, getattr(options, "level", "tile"), ARCH, debugger,
        )  # fmt: skip
        outcomes.append(run(name, executable, values, options))
        launched |= executable.launched
    return outcomes


def fault_of(error: SimulationError) -> Outcome:
    """Return the fault of a simulation as ``--json`` prints it."""
    return {"kind": error.kind, "report": error.report, "seed": error.seed}
