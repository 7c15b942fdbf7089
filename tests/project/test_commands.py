"""CI runs the commands that README, tutorial, guides and reference print, and compares the output.

A command that needs GPUs, a cluster or an installation has ``# not run in CI: <reason>`` before it.
"""

from __future__ import annotations

import re
import runpy
import shlex

import pytest
import torch

from tests.project.commands import CHECKOUT, NOT_RUN, PAGES, README, Command, blocks_of, commands_of
from tileweave.cli.main import main
from tileweave.simulator.report.errors import KINDS

COMMANDS = [command for page in PAGES for command in commands_of(page)]
LONG = "patterns.md", "tileweave mutate", "tileweave validate", "tileweave demo"
"""Pages and commands that take longest: `make test-long` runs them."""
NEEDS = re.compile(r"\b(torchrun|docker|srun|pip|bench)\b")
"""Programs that CI lacks, or lacks the GPUs for."""


def _marks(command: Command) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if any(name in command.place for name in LONG) else []


def test_every_printed_command_is_in_a_console_block():
    assert len(COMMANDS) > 60
    blocks = [block for page in PAGES for block in blocks_of(page)]
    for block in blocks:
        count = len(re.findall(r"^\$ ", block.text, re.M))
        where = f"{block.page.name}:{block.line}"
        assert count == 0 or block.language == "console", where
        assert block.language not in ("bash", "sh") or NOT_RUN in block.text, where
    assert len(COMMANDS) == sum(len(re.findall(r"^\$ ", b.text, re.M)) for b in blocks)


def test_a_command_that_is_not_run_needs_what_ci_lacks():
    not_run = [command for command in COMMANDS if command.not_run]
    assert [command.place for command in not_run if not NEEDS.search(command.text)] == []
    assert [c.place for c in COMMANDS if re.search("torchrun|docker|srun", c.text)] == [
        c.place for c in not_run if re.search("torchrun|docker|srun", c.text)
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run in a folder with the examples, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "examples").symlink_to(CHECKOUT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(CHECKOUT / "examples" / "tutorial")
    return tmp_path


def _status(text: str) -> int:
    name, *arguments = shlex.split(text)
    try:
        if name == "python":
            runpy.run_path(arguments[0], run_name="__main__")
            return 0
        assert name == "tileweave", text
        return main(arguments)
    except SystemExit as end:
        return end.code or 0


def _lines(text: str) -> list[str]:
    """Return the lines without empty ones, the padding of tables, and the folders of files."""
    text = re.sub(r"--> \S*/", "--> ", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _is_printed(shown: list[str], printed: list[str]) -> bool:
    """Return whether ``shown``, in which ``...`` stands for any text, is ``printed``."""
    pattern = "\n".join(re.escape(line) for line in shown)
    pattern = pattern.replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, "\n".join(printed), re.S) is not None


def _expected_status(command: Command) -> int:
    has_fault = any(f": {kind}: " in command.shown for kind in KINDS)
    return int(has_fault or bool(re.search(r"\d survived$", command.shown.strip())))


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=c.place, marks=_marks(c)) for c in COMMANDS if not c.not_run],
)
def test_command_prints_what_the_page_shows(command, folder, capsys):
    for file in re.findall(r"(?<![\w/])\w+\.py", command.block.text):
        program = README_PROGRAM if file == "readme.py" else command.program
        (folder / file).write_text(program)
    for earlier in _earlier(command):
        _status(earlier.text)
    capsys.readouterr()
    assert _status(command.text) == _expected_status(command)
    out = capsys.readouterr().out
    if command.shown:
        shown, printed = _lines(command.shown), _lines(out)
        if "tileweave demo" in command.text:  # its numbers are random
            shown, printed = ([re.sub(r"\d+", "#", x) for x in t] for t in (shown, printed))
        assert _is_printed(shown, printed), out


README_PROGRAM = next(block.text for block in blocks_of(README) if block.language == "python")


def _earlier(command: Command) -> list[Command]:
    """Return the commands of the same block before this one."""
    block = [other for other in COMMANDS if other.block == command.block]
    return block[: block.index(command)]
