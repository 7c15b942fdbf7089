"""``tileweave completion``: bash runs its script; those of zsh and fish are read as text."""

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.modules import load_module
from tileweave.cli.main import main

CHECKOUT = Path(__file__).resolve().parents[2]
PARSERS = {
    command: parser
    for command, (parser, _) in load_module(CHECKOUT / "docs" / "command_line.py").parsers().items()
}
OPTIONS = {
    (command, name)
    for command, parser in PARSERS.items()
    for action in parser._actions
    for name in action.option_strings
}
"""(Command, option) of the whole command line."""

COMPLETE = """\
source "$1"; shift
compopt() { printf '%s\\n' "<$2>"; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_tileweave
printf '%s\\n' "${COMPREPLY[@]}"
complete -p tileweave >&2
"""
"""Print what completes the last argument; ``<default>`` stands for the names of files."""


@pytest.fixture
def script(capsys):
    def printed(shell: str) -> str:
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def completed(script, tmp_path):
    """Return the words with which bash completes a line, from its last word on."""
    (tmp_path / "tileweave").write_text(script("bash"))

    def complete(line: str) -> set[str]:
        words = line.split(" ")
        command = ["bash", "-c", COMPLETE, "bash", str(tmp_path / "tileweave"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == "complete -F _tileweave tileweave\n"
        return set(done.stdout.split())

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tileweave si", {"simulate"}),
        ("tileweave --", {"--help", "--version"}),
        ("tileweave emit --st", {"--stage"}),
        ("tileweave emit --stage ", {"tile", "device", "cuda", "ptx"}),
        ("tileweave emit --stage c", {"cuda"}),
        ("tileweave emit ", {"<default>"}),
        ("tileweave emit a.py --ra", {"--ranks"}),
        ("tileweave emit a.py --ranks ", set()),
        ("tileweave emit a.py --world-size ", set()),
        ("tileweave explain a.py --html ", {"<default>"}),
        ("tileweave mutate --level d", {"device"}),
        ("tileweave trace ", {"<default>"}),
        ("tileweave bench ", set()),
        ("tileweave tune matmul_all_reduce --dtype b", {"bfloat16"}),
        ("tileweave doctor ", set()),
        ("tileweave doctor --j", {"--json"}),
        ("tileweave completion ", {"bash", "zsh", "fish"}),
        ("tileweave unknown --", set()),
    ],
)
def test_bash(completed, line, expected):
    assert completed(line) == expected


def test_bash_completes_all_commands(completed):
    assert completed("tileweave ") == {*PARSERS} | {"--help", "--version"}


def test_zsh_has_all_options_with_help(script):
    text = script("zsh")
    assert text.startswith("#compdef tileweave\n")
    lines = dict(re.findall(r"^ {8}(\w+)\) _arguments (.*) ;;$", text, re.M))
    assert set(lines) == set(PARSERS)
    specs = {command: shlex.split(line) for command, line in lines.items()}
    found = {
        (command, name)
        for command, texts in specs.items()
        for text in texts
        for name in re.findall(r"^\*?(-[\w-]+)\[\w", text)
    }
    assert found == OPTIONS
    assert "--stage[what to print]:STAGE:(tile device cuda ptx)" in specs["emit"]
    assert r":FILE\[\:NAME\]:_files" in specs["emit"]
    assert any(text.startswith("*--size[") for text in specs["emit"])
    assert specs["completion"][-1] == ":SHELL:(bash zsh fish)"


def test_fish_has_all_options_with_help(script):
    lines = [shlex.split(line) for line in script("fish").splitlines()[2:]]
    commands = {line[6] for line in lines if line[4:6] == ["__fish_use_subcommand", "-a"]}
    assert commands == set(PARSERS)
    options = set()
    for line in lines:
        command = re.match("__fish_seen_subcommand_from (.*)", line[4])
        if command and "-d" in line:
            assert line[-2] == "-d" and line[-1]
            names = [
                f"{dashes}{name}"
                for flag, dashes in (("-s", "-"), ("-l", "--"))
                for before, name in pairwise(line[5:-2])
                if before == flag
            ]
            options |= {(command[1], name) for name in names}
    assert options == OPTIONS


def test_fish_completes_values(script):
    lines = script("fish").splitlines()
    after = "complete -c tileweave -n '__fish_seen_subcommand_from"
    assert f"{after} emit' -l stage -r -f -a 'tile device cuda ptx' -d 'what to print'" in lines
    assert f"{after} emit' -F" in lines
    assert f"{after} completion' -f -a 'bash zsh fish'" in lines
    assert [x for x in lines if x.startswith(f"{after} doctor'") and " -l " not in x] == []


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "csh"])
    assert "invalid choice: 'csh'" in capsys.readouterr().err
