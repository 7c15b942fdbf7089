"""``tileweave trace``: record a program on GPUs, or summarize and draw a recorded trace."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..builtins.errors import TileWeaveError
from ..runtime.trace.chrome import read
from ..runtime.trace.render import writer
from ..runtime.trace.summary import summarize
from .compile_options import add_values, values_of
from .program_files import PLANS_AND_KERNELS, load_programs

_LAUNCHES = 3
"""Recorded calls of the program."""


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "trace",
        help="record a program on GPUs under torchrun, or summarize and draw a recorded trace",
    )
    add = parser.add_argument
    add(
        "trace",
        metavar="RUN.json|FILE[:NAME]",
        help="a recorded trace, which needs no GPU; or the T.prim_func or tw.plan to record, with "
        "the inputs of its file, or invented ones",
    )
    add("--json", action="store_true", help="print the summary as JSON")
    add("--timeline", metavar="OUT", help="also draw the trace: .html")
    add("--out", default="trace.json", help="file of a recorded trace; default: %(default)s")
    add(
        "--events",
        type=int,
        metavar="N",
        help="number of events of a rank for which there is memory when recording",
    )
    add_values(parser)
    parser.set_defaults(seed=0)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print where the ranks spent their time and what held up the last one; draw it if asked."""
    write = None if options.timeline is None else writer(options.timeline, "trace: --timeline")
    path = options.trace
    if not path.endswith(".json"):
        if not options.out.endswith(".json"):
            raise TileWeaveError(f"trace: --out {options.out}; expected a name that ends in .json")
        if not _record(options):
            return
        path = options.out
    trace = read(path)
    if write is not None:
        write(trace)
    summary = summarize(trace)
    print(json.dumps(summary.as_json()) if options.json else summary)


def _record(options: argparse.Namespace) -> bool:
    """Record the program of a file; return whether this is rank 0, which reports."""
    from ..runtime import finalize, init
    from ..runtime.trace.recording import EVENTS, trace
    from .generated_call import GeneratedCall

    options.program = options.trace
    programs = load_programs(options, PLANS_AND_KERNELS)
    if len(programs) > 1:
        raise TileWeaveError(
            f"trace: {', '.join(programs)} of {options.program}; expected one program, FILE:NAME"
        )
    ((name, program),) = programs.items()
    options.running = name, program
    values = values_of(options, programs)
    session = init()
    call: Any = GeneratedCall(name, program, session, values, options)
    events = EVENTS if options.events is None else options.events
    with trace(options.out, events=events):
        for launch in range(_LAUNCHES):
            call(launch)
    finalize()
    return session.group.rank == 0
