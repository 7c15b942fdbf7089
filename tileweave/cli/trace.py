"""``tileweave trace``: record a program on GPUs, or summarize or draw a recorded trace."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..builtins.errors import TileWeaveError
from ..runtime.trace.chrome import read
from ..runtime.trace.render import writer
from ..runtime.trace.summary import summarize
from .compile_options import add_config, add_size, configs_of, sizes_of
from .program_files import PLANS_AND_KERNELS, load_programs
from .simulation import parsed_scalars


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "trace",
        help="record a program on GPUs under torchrun, or summarize or draw a recorded trace",
    )
    add = parser.add_argument
    add(
        "trace",
        metavar="RUN.json|FILE[:NAME]",
        help="a recorded trace, which needs no GPU; or the T.prim_func or tw.plan to record, with "
        "the inputs of its file, or invented ones",
    )
    add(
        "--summary",
        action="store_true",
        help="print shares of time by rank and kernel, and the critical path; the default without "
        "--timeline",
    )
    add("--json", action="store_true", help="print the summary as JSON")
    add("--timeline", metavar="OUT", help="draw the trace: .html .svg .png")
    recording = parser.add_argument_group("recording")
    recording.add_argument(
        "--out", default="trace.json", help="file of the trace; default: %(default)s"
    )
    recording.add_argument(
        "--launches", type=int, default=3, metavar="N", help="calls; default: %(default)s"
    )
    recording.add_argument(
        "--events",
        type=int,
        metavar="N",
        help="number of events of a rank for which there is memory",
    )
    recording.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the inputs; default: %(default)s"
    )
    recording.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a scalar: a number, or `epoch`, the index of the launch",
    )
    add_size(recording)
    add_config(recording)
    parser.add_argument(
        "--traceback", action="store_true", help="show all Python and C++ frames of an error"
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Print where the ranks spent their time and what held up the last one, or draw it."""
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
    if options.summary or options.json or write is None:
        summary = summarize(trace)
        print(json.dumps(summary.as_json()) if options.json else summary)


def _record(options: argparse.Namespace) -> bool:
    """Record the program of a file; return whether this is rank 0, which reports."""
    from ..runtime import finalize, init
    from ..runtime.trace.recording import EVENTS, trace
    from .generated_call import GeneratedCall

    if options.launches < 1:
        raise TileWeaveError(f"trace: --launches {options.launches}; expected 1 or more")
    options.program = options.trace
    programs = load_programs(options, PLANS_AND_KERNELS)
    if len(programs) > 1:
        raise TileWeaveError(
            f"trace: {', '.join(programs)} of {options.program}; expected one program, FILE:NAME"
        )
    ((name, program),) = programs.items()
    options.running = name, program
    scalars = parsed_scalars(options, programs) | sizes_of(options, programs)[name]
    session = init()
    call: Any = GeneratedCall(name, program, session, configs_of(options), scalars, options)
    events = EVENTS if options.events is None else options.events
    with trace(options.out, events=events):
        for launch in range(options.launches):
            call(launch)
    finalize()
    return session.group.rank == 0
