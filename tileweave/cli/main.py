"""Parse the command line, run one command and report its errors."""

from __future__ import annotations

import argparse
import os
import sys
from bdb import BdbQuit

from .. import __version__
from ..builtins.errors import TileWeaveError, shows_frames
from . import bench, demo, doctor, emit, explain, mutate, simulate, trace, tune, validate
from . import run as run_script
from .compile_options import resolve_ranks
from .failures import failure
from .program_files import split_location
from .reports import ranks_hint, relative_paths

COMMANDS = (
    demo, emit, explain, simulate, validate, run_script, mutate, trace, bench, tune, doctor,
)  # fmt: skip
"""Commands in the order of ``--help``. ``add_parser`` declares the arguments of a command and
``run`` executes it."""

_REPLACED = {
    "--size": "--set",
    "--traceback": "TILEWEAVE_TRACEBACK=1",
    "--max-interleavings": "--exhaustive",
    **dict.fromkeys(("--rows", "--lengths", "--tokens", "--keys"), "--sizes"),
    **dict.fromkeys(("--models", "--heads", "--kv-heads", "--head-dim"), "--shapes"),
}
"""Removed options, and what to use instead."""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 success, 1 an error, 2 wrong usage, 130 interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    for argument in argv:
        if argument == "run":  # what follows are arguments of a script
            break
        if instead := _REPLACED.get(argument.partition("=")[0]):
            return _fail(f"{argument}: removed; expected {instead}", 2)
    options = _parser().parse_args(argv)
    options.running = "", None
    try:
        resolve_ranks(options)
        options.run(options)
        sys.stdout.flush()
    except TileWeaveError as error:
        if shows_frames():
            raise
        message = str(error)
        in_program = bool(options.running[0]) and "rank" in message
        return _fail(message + (ranks_hint(options) if in_program else ""), 1)
    except (KeyboardInterrupt, BdbQuit):
        return _fail("stopped", 130)
    except BrokenPipeError:  # the reader, such as `head`, needs no more output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not hasattr(options, "program") or shows_frames():
            raise
        file, _ = split_location(options.program)
        return _fail(failure(options.command, error, file, *options.running), 1)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tileweave",
        description="Inspect, simulate and time TileLang programs that run across GPUs.",
    )
    parser.add_argument("--version", action="version", version=f"tileweave {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands).set_defaults(run=command.run)
    return parser


def _fail(message: str, status: int) -> int:
    print(f"tileweave: {relative_paths(message)}", file=sys.stderr)
    return status
