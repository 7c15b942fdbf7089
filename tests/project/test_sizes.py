"""Sizes of files that git tracks."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 600
CORPUS = "tests/corpus/"
"""Collections of programs may be longer."""


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Return the paths of all tracked files that exist, relative to the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository: no file was counted")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


def test_no_python_file_is_long(tracked):
    paths = [p for p in tracked if p.endswith(".py") and not p.startswith(CORPUS)]
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in paths}
    assert len(lines) > 300
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}
