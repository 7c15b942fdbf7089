"""``tileweave trace``: summarize or draw a recorded trace."""

from __future__ import annotations

import argparse
import json

from ..runtime.trace.chrome import read
from ..runtime.trace.render import writer
from ..runtime.trace.summary import summarize


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "trace", help="summarize or draw a trace of `simulate --timeline`; needs no GPU"
    )
    parser.add_argument("trace", metavar="RUN.json", help="trace, such as of `simulate --timeline`")
    parser.add_argument(
        "--summary",
        action="store_true",
        help="print shares of time by rank and kernel, and the critical path; the default without "
        "--timeline",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--timeline", metavar="OUT", help="draw the trace: .html .svg .png")
    return parser


def run(options: argparse.Namespace) -> None:
    """Print where the ranks spent their time and what held up the last one, or draw it."""
    write = None if options.timeline is None else writer(options.timeline, "trace: --timeline")
    trace = read(options.trace)
    if write is not None:
        write(trace)
    if options.summary or options.json or write is None:
        summary = summarize(trace)
        print(json.dumps(summary.as_json()) if options.json else summary)
