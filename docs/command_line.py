"""Write ``docs/reference/command-line.md`` from the parsers. ``make docs`` runs it."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from textwrap import fill

from tileweave.cli.main import COMMANDS

PAGE = Path(__file__).resolve().with_name("reference") / "command-line.md"

INTRODUCTION = """\
# The command line

<!-- Written by docs/command_line.py from the parsers: change those, then `make docs`. -->

`tileweave COMMAND` or, in a checkout that is not installed, `PYTHONPATH=. python -m tileweave
COMMAND`. `tileweave --version` prints the version.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | an error, which stderr names; or the command found what it looks for, such as a fault |
| 2 | an argument is not legal |
| 130 | interrupted |

| command | what it does |
|---|---|
"""

EXAMPLES = {
    "demo": "tileweave demo",
    "emit": "tileweave emit examples/gemm_reduce_scatter.py --stage cuda",
    "explain": "tileweave explain examples/tutorial/02_all_gather.py --ranks 4",
    "simulate": "tileweave simulate examples/tutorial/01_first_program.py --schedules 50",
    "validate": "tileweave validate examples/tutorial/03_gemm_reduce_scatter.py --ranks 4",
    "run": "tileweave run examples/tilelang_softmax.py",
    "mutate": "tileweave mutate examples/tutorial/01_first_program.py --schedules 5",
    "trace": "tileweave trace run.json --timeline run.html",
    "bench": "torchrun --nproc-per-node=4 -m tileweave bench matmul_reduce_scatter",
    "tune": "torchrun --nproc-per-node=4 -m tileweave tune matmul_reduce_scatter",
    "doctor": "tileweave doctor",
}

BEFORE = {
    "trace": "$ tileweave simulate examples/tutorial/01_first_program.py --timeline run.json",
    "bench": "# not run in CI: needs 4 GPUs",
    "tune": "# not run in CI: needs 4 GPUs",
}
"""Lines before an example: what it needs."""

GUIDES = {
    "demo": "The program: [gemm_reduce_scatter.py](../../examples/gemm_reduce_scatter.py).",
    "emit": "The stages `tile` and `device` are the IR before and after TileLang's pipeline: "
    "[how it works](../how-it-works.md#from-program-to-kernel).",
    "explain": "How to read it: [synchronization](../guides/synchronization.md#one-program).",
    "simulate": "Inputs, model and reports: [the simulator](../guides/simulator.md).",
    "validate": "Levels and reports: "
    "[below the tile level](../guides/simulator.md#below-the-tile-level).",
    "run": "What it covers: [without a GPU](../guides/without-a-gpu.md).",
    "mutate": "Verdicts and sidecar files: "
    "[mutation testing](../guides/simulator.md#mutation-testing).",
    "trace": "How to read it: [traces](../guides/simulator.md#traces).",
    "bench": "Columns and method: [benchmarks](../guides/benchmarks.md).",
    "tune": "Candidates and stored results: [tuning](../guides/ops.md#tuning).",
    "doctor": "What to do about it: [running on a cluster](../guides/cluster.md).",
}


def page() -> str:
    """Return the whole page."""
    rows, sections = [], []
    for command, (parser, effect) in zip(COMMANDS, parsers().values(), strict=True):
        name = parser.prog.split()[-1]
        rows.append(f"| [`{name}`](#tileweave-{name}) | {effect.partition(': torchrun')[0]} |\n")
        sections.append(_section(name, parser, inspect.getdoc(command.run) or ""))
    return "\n".join([INTRODUCTION + "".join(rows), *sections])


def parsers() -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the parser and the one-line help of each command."""
    commands = argparse.ArgumentParser(prog="tileweave").add_subparsers()
    for command in COMMANDS:
        command.add_parser(commands)
    effects = {entry.dest: str(entry.help) for entry in commands._choices_actions}
    return {name: (parser, effects[name]) for name, parser in commands.choices.items()}


def _section(name: str, parser: argparse.ArgumentParser, manual: str) -> str:
    actions = [action for action in parser._actions if action.dest != "help"]
    operands = [_operand(action) for action in actions if not action.option_strings]
    has_options = any(action.option_strings for action in actions)
    words = [*operands, *(["[OPTION ...]"] if has_options else [])]
    if any(action.nargs == argparse.REMAINDER for action in actions):
        words = [words[-1], *words[:-1]]
    usage = " ".join(["tileweave", name, *words])
    effect = manual.partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    before = [BEFORE[name]] if name in BEFORE else []
    table = ["| argument | meaning |", "|---|---|", *map(_row, actions)]
    return "\n".join(
        [
            f"## tileweave {name}\n",
            f"```text\n{usage}\n```\n",
            f"{fill(f'{effect} {GUIDES[name]}', 100, break_on_hyphens=False)}\n",
            "\n".join(["```console", *before, f"$ {EXAMPLES[name]}", "```\n"]),
            *table,
            "",
        ]
    )


def _operand(action: argparse.Action) -> str:
    is_list = action.nargs in ("*", argparse.REMAINDER)
    return f"[{action.metavar} ...]" if is_list else str(action.metavar)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{_spelled(name, action)}`" for name in action.option_strings)
    text = str(action.help) % vars(action)
    if action.choices:
        text = f"{', '.join(f'`{choice}`' for choice in action.choices)}: {text}"
    return f"| {names or f'`{_operand(action)}`'} | {text} |"


def _spelled(name: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return name
    value = action.metavar or action.dest.upper()
    return f"{name} {value}{' ...' if action.nargs == '+' else ''}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name} written")
