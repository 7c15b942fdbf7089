"""The command line: ``tileweave emit``, ``explain``, ``simulate``, ``mutate``, ``bench``,
``tune`` and ``doctor``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tilelang import tvm

from .. import __version__, passes
from ..builtins.errors import SyncWarning, TileWeaveError
from ..emit import STAGES, emit
from ..explain.explain import explain, source_of
from ..passes.ir.sizes import LARGEST, MOST_RANKS
from ..runtime import Plan
from ..runtime.host.out_file import out_file, write_out
from ..runtime.kernel.configured import configured
from ..runtime.plans.parameters import dynamic_extents, parameters_of
from .builders import builders_in
from .failures import failure

PrimFunc = tvm.tirx.PrimFunc
_MOST_SECONDS = 600
"""Estimated time of a simulation that needs ``--force``."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status: 0 done, 1 a TileWeaveError, 2 wrong usage, 130 stopped."""
    options = _parser().parse_args(argv)
    options.running = "", None
    try:
        _check_ranks(options)
        options.run(options)
        sys.stdout.flush()
    except TileWeaveError as error:
        if _shows_traceback(options):
            raise
        print(f"tileweave: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tileweave: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not hasattr(options, "program") or _shows_traceback(options):
            raise
        text = failure(options.command, error, _file_of(options)[0], *options.running)
        print(f"tileweave: {text}", file=sys.stderr)
        return 1
    return 0


def _shows_traceback(options: argparse.Namespace) -> bool:
    return getattr(options, "traceback", False)


def _check_ranks(options: argparse.Namespace) -> None:
    """Refuse a number of ranks that no command can use."""
    ranks = getattr(options, "ranks", 1)
    if not 1 <= ranks <= MOST_RANKS:
        raise TileWeaveError(
            f"{options.command}: --ranks {ranks}; expected at least 1, and at most {MOST_RANKS}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tileweave", description="Stock TileLang across GPUs: look at programs and machines."
    )
    parser.add_argument("--version", action="version", version=f"tileweave {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    show = commands.add_parser(
        "emit", help="print what the programs of a file become; needs no GPU"
    )
    show.add_argument(
        "program", metavar="FILE[:NAME]", help="all module-level T.prim_funcs of FILE, or that one"
    )
    show.add_argument("--stage", choices=STAGES, default="cuda", help="default: %(default)s")
    show.add_argument("--arch", default="sm_90a", help="default: %(default)s")
    _add_ranks(show)
    _add_size(show)
    _add_config(show)
    show.set_defaults(run=_emit)

    why = commands.add_parser(
        "explain", help="say which signals, waits and fences a program gets, and why; needs no GPU"
    )
    why.add_argument(
        "program",
        metavar="FILE[:NAME]",
        help="all module-level tw.plans and T.prim_funcs of FILE, or that one",
    )
    _add_ranks(why)
    why.add_argument("--json", action="store_true", help="one JSON object for each program")
    why.add_argument("--html", metavar="OUT", help="write the source with what is put in: .html")
    _add_size(why)
    _add_config(why)
    why.set_defaults(run=_explain)

    run = commands.add_parser(
        "simulate", help="run the programs of a file on simulated ranks; needs no GPU"
    )
    _add_simulation(run)
    run.add_argument("--json", action="store_true", help="one JSON object for each program")
    run.add_argument(
        "--force",
        action="store_true",
        help=f"run even if that is estimated to take more than {_MOST_SECONDS // 60} minutes",
    )
    run.add_argument(
        "--timeline",
        metavar="OUT",
        help="draw the failing, else the last schedule: .html .svg .png",
    )
    _add_config(run)
    run.set_defaults(run=_simulate)

    change = commands.add_parser(
        "mutate", help="break the synchronisation of simulated programs; list what goes unnoticed"
    )
    _add_simulation(change)
    change.add_argument(
        "--equivalent",
        metavar="JSON",
        help="why mutants change nothing; default: x.equivalent.json beside x.py, if it exists",
    )
    change.add_argument("--json", action="store_true", help="one JSON object for each program")
    change.set_defaults(run=_mutate)

    _add_bench(commands)
    _add_tune(commands)

    doctor = commands.add_parser("doctor", help="say what this machine has, and what will not work")
    doctor.add_argument("--json", action="store_true", help="the same for programs")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time the operators beside GEMM, attention, NCCL and async-TP: torchrun "
        "--nproc-per-node=4 -m tileweave bench",
    )
    _add_products(bench)
    add = bench.add_argument
    add(
        "--sizes",
        nargs="+",
        default=[],
        metavar="MIB",
        help="MiB that a rank gives to a collective (all_gather, reduce_scatter, all_reduce, "
        "all_to_all), with commas or spaces; default: 1,16,64,256. Without an OPERATOR: of all "
        "collectives",
    )
    _add_attention(bench)
    add("--warmups", type=_count, default=5, help="default: %(default)s")
    add("--runs", type=_count, default=20, help="default: %(default)s")
    add("--json", metavar="OUT", help="write the results there, too")
    add("--figure", metavar="OUT", help="draw how far from the ideal each is: .png")
    add(
        "--from",
        dest="file",
        metavar="IN",
        help="measure nothing; print, and with --figure draw, what --json has written to this file",
    )
    bench.set_defaults(run=_bench)


def _add_attention(bench: argparse.ArgumentParser) -> None:
    """What says of which attention ``sp_attention`` is timed."""
    add = bench.add_argument_group("sp_attention").add_argument
    add(
        "--lengths",
        nargs="+",
        default=[],
        metavar="ROWS",
        help="rows of each sequence, of all ranks together, with commas or spaces; default: 8192 "
        "and its doubles up to 262144. Without an OPERATOR: of sp_attention",
    )
    add("--batch", nargs="+", default=["1"], metavar="B", help="sequences; default: 1")
    add("--heads", type=_count, default=32, help="of queries; default: %(default)s")
    add("--kv-heads", type=_count, default=8, help="default: %(default)s")
    add("--head-dim", type=_count, default=128, help="default: %(default)s")
    add("--layout", default="zigzag", help="contiguous or zigzag; default: %(default)s")
    add("--causal", action="store_true", help="only this; default: causal and full")
    add("--full", action="store_true", help="only this")


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="find the fastest tiles and strategy, and keep them on disk: torchrun "
        "--nproc-per-node=4 -m tileweave tune",
    )
    _add_products(tune)
    tune.add_argument(
        "--row-major", action="store_true", help="b is a row-major (K, N), not a transposed (N, K)"
    )
    tune.set_defaults(run=_tune)


def _add_products(parser: argparse.ArgumentParser) -> None:
    """What says which products are computed."""
    add = parser.add_argument
    add(
        "ops",
        nargs="*",
        metavar="OPERATOR",
        help="such as all_gather_matmul; before the options; default: all that multiply",
    )
    add(
        "--shapes",
        nargs="+",
        default=["llama70b"],
        metavar="NAME",
        help="llama8b, llama70b, llama405b, qwen72b or MxNxK, with commas or spaces between them; "
        "default: llama70b",
    )
    add(
        "--rows",
        nargs="+",
        default=["1024,2048,4096,8192,16384"],
        metavar="M",
        help="rows of each model, with commas or spaces; default: 1024,2048,4096,8192,16384",
    )
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")


def _count(text: str) -> int:
    """A positive integer of the command line."""
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text}; expected a positive integer up to {LARGEST}")
    return int(text)


def _listed(options: argparse.Namespace, name: str) -> list[str]:
    """What is between commas or spaces."""
    given = getattr(options, name)
    words = [word for text in given for word in text.split(",") if word]
    if given and not words:
        raise TileWeaveError(
            f"{options.command}: --{name} {' '.join(given)}; expected at least one, with commas or "
            "spaces between them"
        )
    return words


def _bench(options: argparse.Namespace) -> None:
    from ..bench import command as bench

    if options.file is not None:
        bench.again(options.file, options.figure)
        return
    wanted = bench.Wanted(
        options.ops, _listed(options, "shapes"), _counts(options, "rows"), options.dtype,
        options.warmups, options.runs, options.json, options.figure,
        sizes=_counts(options, "sizes"), attention=_attention(options),
    )  # fmt: skip
    if not bench.run(wanted):
        raise SystemExit(1)


def _attention(options: argparse.Namespace) -> Any:
    from ..bench.attention import Lengths

    masks = [mask for mask, asked in ((True, options.causal), (False, options.full)) if asked]
    return Lengths(
        tuple(_counts(options, "lengths")), tuple(_counts(options, "batch")), options.heads,
        options.kv_heads, options.head_dim, options.layout, tuple(masks) or Lengths.masks,
    )  # fmt: skip


def _tune(options: argparse.Namespace) -> None:
    from . import tune as tuning

    tuning.run(
        options.ops, _listed(options, "shapes"), _counts(options, "rows"), options.dtype,
        options.row_major,
    )  # fmt: skip


def _counts(options: argparse.Namespace, name: str) -> list[int]:
    """The positive integers of an option."""
    try:
        return [_count(text) for text in _listed(options, name)]
    except argparse.ArgumentTypeError as error:
        raise TileWeaveError(
            f"{options.command}: --{name} {error} (operators stand before the options)"
        ) from None


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the number of ranks, and what every command that compiles programs has."""
    parser.add_argument(
        "--ranks", "--world-size", type=int, default=4, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show all frames of an error, of C++ ones, too"
    )


def _add_size(parser: argparse.ArgumentParser) -> None:
    """What says for which sizes programs are compiled."""
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="size of a dynamic extent, such as M=4096",
    )


def _sizes(options: argparse.Namespace, programs: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The sizes of the command line that each of ``programs`` has, by its name."""
    given: dict[str, int] = {}
    for pair in options.size:
        name, _, value = pair.partition("=")
        if not name or not value.isdecimal() or not 1 <= int(value) <= LARGEST:
            raise TileWeaveError(
                f"{options.command}: --size {pair}; expected NAME=VALUE, a positive integer up to "
                f"{LARGEST}"
            )
        given[name] = int(value)
    names = {key: _dynamic_sizes(program) for key, program in programs.items()}
    every = dict.fromkeys(name for of_one in names.values() for name in of_one)
    for name, value in given.items():
        if name not in every:
            legal = " or ".join(every) or "no size: there is no dynamic extent"
            raise TileWeaveError(
                f"{options.command}: --size {name}={value} of {', '.join(programs)}; expected "
                f"{legal}"
            )
    return {key: {n: given[n] for n in names[key] if n in given} for key in programs}


def _dynamic_sizes(program: Any) -> Iterable[str]:
    if isinstance(program, Plan):
        return dynamic_extents(program.parameters)
    return passes.dynamic_sizes(program)


def _add_config(parser: argparse.ArgumentParser) -> None:
    """What says how programs are compiled."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one of pass_configs, such as tileweave.reuse=credit; JSON, or a word",
    )


def _configs(options: argparse.Namespace) -> dict[str, Any]:
    """``pass_configs`` of the command line."""
    found: dict[str, Any] = {}
    for pair in options.config:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise TileWeaveError(f"{options.command}: --config {pair}; expected NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    """What says which programs run on which simulated ranks, and how often."""
    add = parser.add_argument
    add(
        "program",
        metavar="FILE[:NAME]",
        help="all module-level tw.plans and T.prim_funcs of FILE, or that one",
    )
    _add_ranks(parser)
    add("--schedules", type=int, default=20, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the first; default: %(default)s")
    add("--epochs", type=int, default=3, help="launches; default: %(default)s")
    add(
        "--resident-blocks",
        type=int,
        help="blocks of a rank that fit on its GPU; default: tileweave.resident_blocks, 132",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a scalar, a number or `epoch` (the number of the launch), or of a dynamic "
        "extent",
    )
    _add_size(parser)


def _emit(options: argparse.Namespace) -> None:
    programs = _programs(options)
    sizes = _sizes(options, programs)
    comment = "//" if options.stage in ("cuda", "ptx") else "#"
    for name, program in programs.items():
        if len(programs) > 1:
            print(f"{comment} ==== {name}")
        configs = _configs(options)
        options.running = name, program
        print(emit(
            program, options.stage, options.arch, options.ranks, configs, sizes[name]
        ))  # fmt: skip


def _explain(options: argparse.Namespace) -> None:
    """Plans first, each with its kernels."""
    programs = _programs(options, (Plan, PrimFunc))
    if options.html is not None and len(programs) > 1:
        raise TileWeaveError(
            f"explain: --html of {', '.join(programs)}; expected one program, FILE:NAME"
        )
    if options.html is not None and out_file("explain: --html", options.html).suffix != ".html":
        raise TileWeaveError(f"explain: --html {options.html}; expected a name that ends in .html")
    sizes = _sizes(options, programs)
    told: set[tuple] = set()
    for name, program in programs.items():
        if isinstance(program, PrimFunc) and source_of(program) in told:
            continue
        options.running = name, program
        found = explain(program, options.ranks, _configs(options), sizes=sizes[name])
        found = replace(found, name=name)
        if options.html is not None:
            write_out("explain: --html", options.html, found.html())
        separator = "\n" if told and not options.json else ""
        print(separator + (found.as_json() if options.json else str(found)))
        told.update(tuple(place) for _, *place in found.sources)


def _simulate(options: argparse.Namespace) -> None:
    """Run with inputs of ``described_inputs``."""
    programs = _programs(options, (Plan, PrimFunc))
    if options.timeline and len(programs) > 1:
        raise TileWeaveError(
            f"simulate: --timeline of {', '.join(programs)}; expected one program, FILE:NAME"
        )
    found = _of_each(programs, _simulated, options)
    for outcome in found:
        print(json.dumps(outcome) if options.json else _in_words(outcome))
    if any(outcome["fault"] for outcome in found):
        raise SystemExit(1)


def _of_each(
    programs: dict[str, Any], run: Callable[..., dict[str, Any]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The outcome of each program, but for kernels of a plan, which has run them."""
    from ..simulator import Executable

    if options.seed < 0:
        raise TileWeaveError(f"{options.command}: --seed {options.seed}; expected 0 or more")
    scalars = dict(_value_of_scalar(pair, options.command) for pair in options.set)
    _require_parameters(programs, scalars, options.command)
    sizes = _sizes(options, programs)
    found, launched = [], set()
    for name, program in programs.items():
        if id(program) not in launched:
            options.running = name, program
            if options.command == "simulate":
                program = configured("simulate", program, _configs(options))
            executable = Executable(program, options.ranks)
            found.append(run(name, executable, scalars | sizes[name], options))
            launched |= executable.launched
    return found


def _require_parameters(programs: dict[str, Any], scalars: dict[str, Any], command: str) -> None:
    """Refuse values of what no program takes."""
    legal: set[str] = set()
    for program in programs.values():
        every = program.parameters if isinstance(program, Plan) else parameters_of(program)
        legal |= {p.name for p in every if p.shape is None} | set(dynamic_extents(every))
    for name in scalars.keys() - legal:
        raise TileWeaveError(
            f"{command}: --set {name}, of {', '.join(programs)}; expected "
            f"{' or '.join(sorted(legal)) or 'none, as there are no scalars'}"
        )


def _simulated(
    name: str, program: Any, scalars: dict, options: argparse.Namespace
) -> dict[str, Any]:
    """What ``--json`` prints of one program."""
    from ..simulator import SimulationError, SimulationWarning, described_inputs, simulate

    fault, made = None, {}
    with warnings.catch_warnings(record=True) as caught:
        for category in (SimulationWarning, SyncWarning):
            warnings.simplefilter("always", category)
        try:
            inputs, made = described_inputs(program, options.seed, scalars)
            if made and not options.json:
                print(f"simulate: {name}: inputs: {_kinds_of(made)}", file=sys.stderr)
            simulate(
                program, options.ranks, inputs, options.schedules, options.seed, options.epochs,
                options.resident_blocks, progress=True,
                timeline=options.timeline, most_seconds=None if options.force else _MOST_SECONDS,
            )  # fmt: skip
        except SimulationError as error:
            fault = {"kind": error.kind, "report": error.report, "seed": error.seed}
    return {
        "name": name,
        "ranks": options.ranks,
        "schedules": options.schedules,
        "seed": options.seed,
        "verdict": "fault" if fault else "no fault",
        "fault": fault,
        "inputs": made,
        "warnings": list(
            dict.fromkeys(
                str(w.message)
                for w in caught
                if issubclass(w.category, (SimulationWarning, SyncWarning))
            )
        ),
    }


def _kinds_of(made: dict[str, str]) -> str:
    """Return ``zeros in F, G; random numbers in A``."""
    tensors: dict[str, list[str]] = {}
    for name, kind in made.items():
        tensors.setdefault(kind, []).append(name)
    return "; ".join(f"{kind} in {', '.join(names)}" for kind, names in tensors.items())


def _in_words(outcome: dict[str, Any]) -> str:
    if outcome["fault"]:
        return "{name}: {fault[kind]}: {fault[report]}".format(**outcome)
    lines = ["{name}: {schedules} schedules of {ranks} ranks, no fault".format(**outcome)]
    return "\n".join([*lines, *(f"warning: {text}" for text in outcome["warnings"])])


def _value_of_scalar(pair: str, command: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    if value == "epoch":
        return name, lambda epoch: epoch
    try:
        return name, int(value) if value.lstrip("+-").isdigit() else float(value)
    except ValueError:
        raise TileWeaveError(
            f"{command}: --set {pair}; expected NAME=NUMBER or NAME=epoch"
        ) from None


def _mutate(options: argparse.Namespace) -> None:
    """Run with the inputs of ``simulate``; a mutant that nobody accounts for is a failure."""
    found = _of_each(_programs(options, (Plan, PrimFunc)), _mutated, options)
    for outcome in found:
        print(json.dumps(outcome) if options.json else _mutants_in_words(outcome))
    if any(outcome["fault"] or outcome["unaccounted"] for outcome in found):
        raise SystemExit(1)


def _mutated(name: str, program: Any, scalars: dict, options: argparse.Namespace) -> dict[str, Any]:
    """What ``--json`` prints of the mutants of one program."""
    from ..simulator import SimulationError, mutate, random_inputs

    fault, mutants = None, []
    try:
        inputs = random_inputs(program, options.seed, scalars)
        mutants = mutate(
            program.plan, options.ranks, inputs, options.schedules, options.seed, options.epochs,
            options.resident_blocks, progress=True, equivalent=options.equivalent,
        )  # fmt: skip
    except SimulationError as error:
        fault = {"kind": error.kind, "report": error.report, "seed": error.seed}
    return {
        "name": name,
        "ranks": options.ranks,
        "schedules": options.schedules,
        "seed": options.seed,
        "fault": fault,
        "mutants": [asdict(m) for m in mutants],
        "unaccounted": sum(not m.is_accounted_for for m in mutants),
    }


def _mutants_in_words(outcome: dict[str, Any]) -> str:
    if outcome["fault"]:
        return "{name}: without a mutation: {fault[kind]}: {fault[report]}".format(**outcome)
    lines = []
    for m in outcome["mutants"]:
        seed = "" if m["seed"] is None else f" (seed {m['seed']})"
        line = "{line}: {op} {change}: {verdict}: {why}".format(**m)
        lines.append(f"{Path(m['file']).name}:{line}{seed}")
    count = Counter(m["verdict"] for m in outcome["mutants"])
    each = ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items())) or "no mutants"
    return "\n".join(
        [*lines, "{name}: {ranks} ranks, {schedules} schedules: ".format(**outcome) + each]
    )


def _doctor(options: argparse.Namespace) -> None:
    from .doctor import examine

    report = examine()
    print(report.as_json() if options.json else report)


_KINDS = {PrimFunc: "T.prim_func", Plan: "tw.plan"}


def _programs(options: argparse.Namespace, kinds: tuple[type, ...] = (PrimFunc,)) -> dict[str, Any]:
    """What of these kinds is at the top level of ``FILE``, or that of ``FILE:NAME``, by name; in
    the order of the kinds."""
    op = options.command
    words = " or ".join(_KINDS[kind] for kind in kinds)
    path, name = _file_of(options)
    if not os.path.isfile(path):  # Path's own raises for a name that is too long
        raise TileWeaveError(f"{op}: there is no file {path}; expected FILE or FILE:NAME")
    found: dict[str, Any] = {}
    values = vars(_load(op, path))
    for kind in kinds:
        for key, value in values.items():
            if isinstance(value, kind) and not any(value is f for f in found.values()):
                found[key] = value
    if not found or (name and name not in found):
        what = f"{op}: {path} has no {words}{f' {name}' if name else ''}"
        raise TileWeaveError(f"{what}; expected {_legal(path, name, found)}")
    return {name: found[name]} if name else found


def _legal(path: Path, name: str, found: dict[str, Any]) -> str:
    """Return what could have been asked for: programs, or results of functions that make them."""
    builders = builders_in(path)
    if name in builders:
        return f"the result of this function at module level: example = {name}(...)"
    if found:
        return " or ".join(found)
    if not builders:
        return "one at module level"
    calls = " or ".join(f"example = {builder}(...)" for builder in builders)
    return f"one at module level, so that a builder must be called there: {calls}"


def _file_of(options: argparse.Namespace) -> tuple[Path, str]:
    """Return ``FILE`` and ``NAME``, or ""."""
    where = options.program
    file, _, name = (where, "", "") if os.path.isfile(where) else where.rpartition(":")
    return Path(file or where), name


def _load(op: str, path: Path) -> ModuleType:
    """The Python file ``path``, run as a module that finds its neighbours."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    if spec is None or spec.loader is None:
        raise TileWeaveError(f"{op}: {path} is no Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    sys.path.insert(0, str(path.resolve().parent))
    # It prints the Python it generates for a program it cannot trace; the error says what matters.
    logging.getLogger("tilelang.language.eager.builder").disabled = True
    spec.loader.exec_module(module)
    return module
