"""``tileweave validate``: compare programs with the device functions that they are lowered to."""

from __future__ import annotations

import argparse
from typing import Any

from .inputs import inputs_of, invented_hint
from .program_files import PLANS_AND_KERNELS, load_programs
from .reports import ranks_hint, relative_paths
from .simulation import (
    ARCH,
    Outcome,
    add_simulation,
    fault_of,
    run_each,
)


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "validate",
        help="compare programs with their lowered device functions on simulated ranks",
    )
    add_simulation(parser)
    parser.set_defaults(schedules=1, json=False)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the verdict of each program; the exit status is 1 if one has a fault or the levels
    differ."""
    programs = load_programs(options, PLANS_AND_KERNELS)
    outcomes = run_each(programs, _validate, options)
    for outcome in outcomes:
        print(relative_paths(_text(outcome, options)))
    if any(outcome["fault"] for outcome in outcomes):
        raise SystemExit(1)


def _validate(
    name: str, program: Any, scalars: dict[str, Any], options: argparse.Namespace
) -> Outcome:
    """Validate one program with the inputs of ``inputs_of``."""
    from ..simulator import SimulationError, validate

    fault, origins = None, {}
    try:
        inputs, origins = inputs_of(name, program, scalars, options)
        validate(
            program, options.ranks, inputs, ARCH, options.schedules, options.seed, progress=True,
        )  # fmt: skip
    except SimulationError as error:
        fault = fault_of(error)
    return {
        "name": name,
        "ranks": options.ranks,
        "arch": ARCH,
        "schedules": options.schedules,
        "fault": fault,
        "inputs": origins,
    }


def _text(outcome: Outcome, options: argparse.Namespace) -> str:
    if outcome["fault"]:
        report = "{name}: {fault[kind]}: {fault[report]}".format(**outcome)
        return report + invented_hint(outcome["inputs"]) + ranks_hint(options)
    return (
        "{name}: the device functions of {arch} agree with the program: "
        "{schedules} schedules of {ranks} ranks, no fault"
    ).format(**outcome)
