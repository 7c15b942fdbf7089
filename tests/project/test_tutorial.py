"""The pages of the tutorial quote their files, and print the command that runs each."""

import re
import runpy
from pathlib import Path

import pytest

from tests.project.commands import commands_of

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "examples" / "tutorial"
PAGES = sorted((CHECKOUT / "docs" / "tutorial").glob("0*.md"))


def _blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.M | re.S)


def _file(page: Path) -> Path:
    return FOLDER / f"{page.stem.replace('-', '_')}.py"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_every_file_has_a_page_that_the_index_links():
    assert [_file(page) for page in PAGES] == sorted(FOLDER.glob("*.py"))
    index = (CHECKOUT / "docs" / "tutorial" / "index.md").read_text()
    for page in PAGES:
        assert f"({page.name})" in index and f"/{_file(page).name})" in index


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_quotes_its_whole_file(page):
    _, code = _file(page).read_text().split('"""\n', 1)
    assert _lines("".join(_blocks(page, "python"))) == _lines(code)
    assert len(page.read_text().splitlines()) <= 135
    program = f"python {_file(page).relative_to(CHECKOUT)}"
    assert program in [c.text for c in commands_of(page) if not c.not_run]


def test_fix_of_the_bug_is_the_diff_of_the_page(tmp_path, capsys):
    page = CHECKOUT / "docs" / "tutorial" / "04-simulate-a-bug.md"
    (diff,) = _blocks(page, "diff")
    before, after = (
        "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in f" {sign}")
        for sign in "-+"
    )
    broken = _file(page).read_text()
    assert broken.count(before) == 1
    fixed = tmp_path / "fixed.py"
    fixed.write_text(broken.replace(before, after))
    runpy.run_path(str(fixed), run_name="__main__")
    printed = capsys.readouterr().out.strip()
    assert printed == "20 schedules, no fault" and f"`{printed}`" in page.read_text()
