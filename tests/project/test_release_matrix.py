"""The tool that tests pairs of TileLang and torch counts what ran, and nothing else as passed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import test_versions as tool

PAIR = tool.Pair("0.1.14", "2.13.0", ("import", "lit"))


@pytest.fixture
def outputs(monkeypatch, tmp_path) -> dict[str, tuple[str, int]]:
    """Outputs and statuses of the tool's commands, by a part of the command."""
    outputs = {"describe": ("abc1234\n", 0), "v('tilelang')": ("0.1.14 2.13.0+cpu\n", 0)}

    def run(command: list[str], env: dict[str, str]) -> tuple[str, int]:
        if "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir(parents=True)
        line = " ".join(command)
        return next((result for word, result in outputs.items() if word in line), ("", 0))

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tool, "CACHE", tmp_path / "cache")
    return outputs


def test_a_row_has_the_checks_that_ran(outputs):
    assert tool.run_pair(PAIR, Path(sys.executable), ["import"]) == []
    row = tool.row_of(PAIR)
    assert (row["import"], row["lit"], row["commit"]) == ("yes", "not run", "abc1234")


def test_skipped_tests_are_not_passed(outputs):
    outputs["lit_tests"] = ("  Unsupported: 13\n  Passed     : 55\n  Failed     :  1\n", 1)
    assert tool.run_pair(PAIR, Path(sys.executable), ["lit"]) == ["lit"]
    assert tool.row_of(PAIR)["lit"] == "**failed**"
    assert tool.summary("lit", outputs["lit_tests"][0]) == "55 of 69, 13 not run"
    assert tool.summary("simulator", "3 passed, 2 skipped in 1.0s") == "3 of 5, 2 not run"


def test_another_release_is_refused(outputs):
    outputs["v('tilelang')"] = ("0.1.15 2.13.0\n", 0)
    with pytest.raises(SystemExit, match=r"0\.1\.15 2\.13\.0; expected 0\.1\.14\+2\.13\.0$"):
        tool.run_pair(PAIR, Path(sys.executable), ["import"])


def test_a_release_that_pip_cannot_install_fails_the_run(outputs):
    outputs["pip install"] = ("WARNING: retrying\nERROR: No matching distribution found\n", 1)
    with pytest.raises(SystemExit, match=r"tilelang==0\.1\.14 .*: ERROR: No matching [a-z ]+$"):
        tool.run_pair(PAIR, Path(sys.executable), ["import"])
