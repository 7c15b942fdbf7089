"""``tileweave emit``: print the code that the programs of a file are compiled to."""

from __future__ import annotations

import argparse

from ..emit import STAGES, emit
from .compile_options import add_config, add_ranks, add_values, configs_of, sizes_of
from .program_files import add_program, load_programs


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "emit", help="print the code that the programs of a file are compiled to; needs no GPU"
    )
    add_program(parser)
    parser.add_argument(
        "--stage",
        choices=STAGES,
        default="cuda",
        help="what to print; default: %(default)s",
    )
    parser.add_argument(
        "--arch", default="sm_90a", metavar="SM", help="GPU architecture; default: %(default)s"
    )
    add_ranks(parser)
    add_values(parser, scalars=False)
    add_config(parser)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print each program, with its name if there are several."""
    programs = load_programs(options)
    sizes = sizes_of(options, programs)
    configs = configs_of(options)
    comment = "//" if options.stage in ("cuda", "ptx") else "#"
    for name, program in programs.items():
        if len(programs) > 1:
            print(f"{comment} ==== {name}")
        options.running = name, program
        code = emit(program, options.stage, options.arch, options.ranks, configs, sizes[name])
        print(code)
