"""``tileweave simulate``: run the programs of a file on simulated ranks."""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

from ..builtins.errors import SyncWarning, TileWeaveError
from ..emit import emit
from ..passes import needs_sizes
from .compile_options import add_config, configs_of
from .failures import message_of
from .inputs import inputs_of, invented_hint
from .program_files import PLANS_AND_KERNELS, load_programs
from .reports import ranks_hint, relative_paths
from .simulation import (
    ARCH,
    Outcome,
    add_debugging,
    add_run_options,
    add_simulation,
    debugger_of,
    fault_of,
    print_unreached,
    run_each,
    time_limit_s,
)


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "simulate", help="run the programs of a file on simulated ranks; needs no GPU"
    )
    add_simulation(parser)
    parser.add_argument(
        "--epochs",
        type=int,
        default=3,
        metavar="N",
        help="launches per schedule; default: %(default)s",
    )
    parser.add_argument(
        "--resident-blocks",
        type=int,
        metavar="N",
        help="blocks of a rank that fit on its GPU; default: tileweave.resident_blocks, 132",
    )
    add_run_options(parser)
    add_debugging(parser)
    parser.add_argument(
        "--timeline",
        metavar="OUT",
        help="write the failing schedule, or else the last one: a drawing (.html) or a trace for "
        "Perfetto (.json)",
    )
    parser.add_argument(
        "--exhaustive",
        type=int,
        nargs="?",
        const=2000,
        metavar="N",
        help="explore all interleavings of a small program, instead of --schedules at random; end "
        "after N, with exit status 1; default of N: %(const)s",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="number of processes that share the schedules; default: the usable cores, if the "
        "schedules take longer than a second",
    )
    add_config(parser)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the verdict of each program; the exit status is 1 if one has a fault."""
    programs = load_programs(options, PLANS_AND_KERNELS)
    if options.timeline and len(programs) > 1:
        raise TileWeaveError(
            f"simulate: --timeline of {', '.join(programs)}; expected one program, FILE:NAME"
        )
    if options.exhaustive is not None and options.level != "tile":
        raise TileWeaveError(
            f"simulate: --exhaustive with --level {options.level}; expected --level tile"
        )
    options.debugger = debugger_of(options)
    outcomes = run_each(programs, _simulate, options, configs_of(options), options.debugger)
    print_unreached(options.debugger)
    for outcome in outcomes:
        print(json.dumps(outcome) if options.json else relative_paths(_text(outcome, options)))
    if any(outcome["fault"] or not outcome.get("complete", True) for outcome in outcomes):
        raise SystemExit(1)


def _simulate(
    name: str, program: Any, scalars: dict[str, Any], options: argparse.Namespace
) -> Outcome:
    """Simulate one program with the inputs of ``inputs_of``."""
    from ..simulator import SimulationError, SimulationWarning, simulate

    categories = SimulationWarning, SyncWarning
    fault, origins, explored = None, {}, {}
    with warnings.catch_warnings(record=True) as caught:
        for category in categories:
            warnings.simplefilter("always", category)
        try:
            inputs, origins = inputs_of(name, program, scalars, options)
            if options.exhaustive is not None:
                explored = _explore(program, inputs, options)
            else:
                simulate(
                    program, options.ranks, inputs, options.schedules, options.seed,
                    options.epochs, options.resident_blocks, progress=True,
                    timeline=options.timeline,
                    most_seconds=time_limit_s(options), jobs=options.jobs, arch=ARCH,
                    nan=options.nan, blocks=options.blocks, debugger=options.debugger,
                )  # fmt: skip
        except SimulationError as error:
            fault = fault_of(error)
            if options.exhaustive is not None:
                explored = {"interleavings": error.interleavings, "complete": False}
    messages = [str(w.message) for w in caught if issubclass(w.category, categories)]
    if fault is None and options.level == "tile":
        messages += _refusals(program)
    return {
        "name": name,
        "ranks": options.ranks,
        "schedules": options.schedules if options.exhaustive is None else None,
        "seed": options.seed,
        "verdict": "fault" if fault else "no fault",
        "fault": fault,
        **explored,
        "inputs": origins,
        "warnings": list(dict.fromkeys(messages)),
    }


def _refusals(executable: Any) -> list[str]:
    """Return how the compiler refuses kernels, which a simulation of tiles does not show."""
    from ..simulator import refused

    texts = []
    for func in executable.functions:
        if needs_sizes(func):  # the compiler needs the sizes of the call
            continue
        name = func.attrs["global_symbol"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                emit(func, "device", ARCH, executable.world_size)
        except TileWeaveError as error:
            texts.append(f"{executable.plan.name}: {refused(name, ARCH, error)}")
        except Exception as error:
            text = f"{type(error).__name__}: {message_of(error)}"
            texts.append(f"{executable.plan.name}: {refused(name, ARCH, text)}")
    return texts


def _explore(program: Any, inputs: Any, options: argparse.Namespace) -> Outcome:
    """Explore all interleavings; return their number and the verdict as a sentence."""
    from ..simulator import simulate

    result = simulate(
        program, options.ranks, inputs, epochs=options.epochs,
        resident_blocks=options.resident_blocks, timeline=options.timeline,
        exhaustive=True, max_interleavings=options.exhaustive, arch=ARCH,
        nan=options.nan, blocks=options.blocks,
    )  # fmt: skip
    number, complete = result.interleavings, result.complete
    return {"interleavings": number, "complete": complete, "summary": str(result)}


def _text(outcome: Outcome, options: argparse.Namespace) -> str:
    if outcome["fault"]:
        report = "{name}: {fault[kind]}: {fault[report]}".format(**outcome)
        return report + invented_hint(outcome["inputs"]) + ranks_hint(options)
    verdict = "{name}: {schedules} schedules of {ranks} ranks, no fault".format(**outcome)
    if options.exhaustive is not None:
        verdict = outcome["summary"]
    return "\n".join([verdict, *(f"warning: {text}" for text in outcome["warnings"])])
