"""``tileweave run``: run a Python script with its TileLang kernels in the simulator."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from unittest.mock import patch

from ..builtins.errors import TileWeaveError
from ..simulator.device.program import ARCHITECTURES
from ..simulator.report.errors import SimulationError
from .reports import relative_paths
from .simulation import add_debugging, add_level, debugger_of, print_unreached


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "run", help="run a TileLang script with its kernels in the simulator; needs no GPU"
    )
    add = parser.add_argument
    add_level(parser)
    add_debugging(parser)
    add(
        "--arch",
        choices=ARCHITECTURES,
        default="sm_90a",
        help="GPU architecture that the script sees; default: %(default)s",
    )
    add(
        "--schedules",
        type=int,
        default=1,
        metavar="N",
        help="number of interleavings of each call; default: %(default)s",
    )
    add("script", metavar="SCRIPT", help="a Python file; its device cuda is the CPU")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script")
    return parser


def run(options: argparse.Namespace) -> None:
    """Run a script of TileLang, whose device cuda is the CPU. A fault of a kernel ends it with
    exit status 1."""
    from ..cpu_devices import cuda_is_cpu
    from ..interpreter import interpret

    path = os.path.abspath(options.script)
    if not os.path.isfile(path):
        raise TileWeaveError(f"run: there is no file {options.script}; expected a Python file")
    debugger = debugger_of(options)
    settings = (
        options.level, options.arch, options.schedules, options.nan, options.blocks, debugger
    )  # fmt: skip
    argv, places = [options.script, *options.arguments], [os.path.dirname(path), *sys.path]
    with patch.multiple(sys, argv=argv, path=places), interpret(*settings) as calls:
        try:
            with cuda_is_cpu(options.arch):
                runpy.run_path(path, run_name="__main__")
        except SimulationError as error:
            print(relative_paths(f"{options.script}: {error}"))
            raise SystemExit(1) from None
        finally:
            names = ", ".join(f"{name} x {count}" for name, count in calls.items())
            text = f"simulated calls at the {options.level} level: {names or 'none'}"
            print(f"tileweave: {text}", file=sys.stderr)
            print_unreached(debugger)
