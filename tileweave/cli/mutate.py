"""``tileweave mutate``: break the synchronization of programs and list undetected mutants."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .inputs import inputs_of, invented_hint
from .program_files import PLANS_AND_KERNELS, load_programs
from .reports import relative_paths
from .simulation import (
    ARCH,
    Outcome,
    add_run_options,
    add_simulation,
    fault_of,
    run_each,
    time_limit_s,
)


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "mutate",
        help="break the synchronization of simulated programs; list the undetected mutants",
    )
    add_simulation(parser)
    add_run_options(parser)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the mutants; the exit status is 1 if a program fails or a mutant is unaccounted."""
    programs = load_programs(options, PLANS_AND_KERNELS)
    outcomes = run_each(programs, _mutate, options)
    for outcome in outcomes:
        print(json.dumps(outcome) if options.json else relative_paths(_text(outcome)))
    if any(outcome["fault"] or outcome["unaccounted"] for outcome in outcomes):
        raise SystemExit(1)


def _mutate(
    name: str, program: Any, scalars: dict[str, Any], options: argparse.Namespace
) -> Outcome:
    """Simulate the mutants of one program with the inputs of ``inputs_of``."""
    from ..simulator import SimulationError, mutate

    fault, origins, mutants = None, {}, []
    try:
        inputs, origins = inputs_of(name, program, scalars, options)
        mutants = mutate(
            program.plan, options.ranks, inputs, options.schedules, options.seed, progress=True,
            level=options.level, arch=ARCH, most_seconds=time_limit_s(options),
        )  # fmt: skip
    except SimulationError as error:
        fault = fault_of(error)
    return {
        "name": name,
        "level": options.level,
        "arch": ARCH if options.level == "device" else None,
        "ranks": options.ranks,
        "schedules": options.schedules,
        "seed": options.seed,
        "fault": fault,
        "inputs": origins,
        "mutants": [asdict(mutant) for mutant in mutants],
        "unaccounted": sum(not mutant.is_accounted_for for mutant in mutants),
    }


def _text(outcome: Outcome) -> str:
    if outcome["fault"]:
        report = "{name}: without a mutation: {fault[kind]}: {fault[report]}".format(**outcome)
        return report + invented_hint(outcome["inputs"])
    counts = Counter(mutant["verdict"] for mutant in outcome["mutants"])
    total = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())) or "no mutants"
    at = " at the device level of {arch}".format(**outcome) if outcome["arch"] else ""
    summary = "{name}{at}: {ranks} ranks, {schedules} schedules: ".format(at=at, **outcome) + total
    return "\n".join([*map(_line, outcome["mutants"]), summary])


def _line(mutant: dict[str, Any]) -> str:
    seed = "" if mutant["seed"] is None else f" (seed {mutant['seed']})"
    text = "{line}: {op} {change}: {verdict}: {why}".format(**mutant)
    return f"{Path(mutant['file']).name}:{text}{seed}"
