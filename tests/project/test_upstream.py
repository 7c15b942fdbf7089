"""The reports under docs/upstream: each program shows its fault with stock TileLang."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORTS = sorted((ROOT / "docs" / "upstream").glob("*.md"))
RELEASE = "0.1.15"
MOST_LINES = 60
BLOCK = r"```%s\n(.*?)```\n"


def block(report: Path, language: str) -> str:
    (text,) = re.findall(BLOCK % language, report.read_text(), re.DOTALL)
    return text


def has_in_order(text: str, lines: list[str]) -> bool:
    """Return whether ``text`` contains all ``lines`` in their order."""
    pattern = ".*?".join(re.escape(line.strip()) for line in lines)
    return re.search(pattern, text, re.DOTALL) is not None


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_report_is_short_and_complete(report):
    text = report.read_text()
    assert text.startswith("# ") and f"TileLang {RELEASE}" in text
    assert text.count("\n") < MOST_LINES
    assert "**Right:** " in text and "**Cause:** " in text
    assert "tileweave" not in block(report, "python")
    assert block(report, "text").strip()
    for name in re.findall(r"`(\w+)`", text.split("TileWeave: ")[1].split(".\n")[0]):
        assert list((ROOT / "passes").glob(f"*/{name}.py")), name


@pytest.mark.long
@pytest.mark.skipif(version("tilelang") != RELEASE, reason=f"reports are for TileLang {RELEASE}")
@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_stock_tilelang_has_the_fault(report, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(block(report, "python"))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert has_in_order(done.stdout + done.stderr, block(report, "text").splitlines())
