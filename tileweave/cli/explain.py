"""``tileweave explain``: list the synchronization of the programs of a file, with reasons."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ..builtins.errors import TileWeaveError
from ..explain.explain import explain
from ..explain.source import source_of
from ..runtime.host.out_file import out_file, write_out
from .compile_options import add_config, add_ranks, add_values, configs_of, sizes_of
from .program_files import PLANS_AND_KERNELS, PrimFunc, add_program, load_programs


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "explain",
        help="list the signals, waits and fences of a program, and their reasons; needs no GPU",
    )
    add_program(parser, PLANS_AND_KERNELS)
    add_ranks(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per program")
    parser.add_argument(
        "--html", metavar="OUT", help="write the source with the inserted operations: .html"
    )
    add_values(parser, scalars=False)
    add_config(parser)
    return parser


def run(options: argparse.Namespace) -> None:
    """Explain plans together with their kernels, then the kernels of no plan."""
    programs = load_programs(options, PLANS_AND_KERNELS)
    if options.html is not None:
        _require_page(options.html, programs)
    sizes = sizes_of(options, programs)
    configs = configs_of(options)
    explained: set[tuple] = set()
    for name, program in programs.items():
        if isinstance(program, PrimFunc) and source_of(program) in explained:
            continue
        options.running = name, program
        explanation = explain(program, options.ranks, configs, sizes=sizes[name])
        explanation = replace(explanation, name=name)
        if options.html is not None:
            write_out("explain: --html", options.html, explanation.html())
        separator = "\n" if explained and not options.json else ""
        print(separator + (explanation.as_json() if options.json else str(explanation)))
        explained.update(tuple(place) for _, *place in explanation.sources)


def _require_page(file: str, programs: dict[str, Any]) -> None:
    """Raise an error if one page cannot show the programs."""
    if len(programs) > 1:
        raise TileWeaveError(
            f"explain: --html of {', '.join(programs)}; expected one program, FILE:NAME"
        )
    if out_file("explain: --html", file).suffix != ".html":
        raise TileWeaveError(f"explain: --html {file}; expected a name that ends in .html")
