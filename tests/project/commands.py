"""Commands that the documentation prints, with what they print there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
README = CHECKOUT / "README.md"
PAGES = [README, *sorted((CHECKOUT / "docs").glob("*/*.md"))]
NOT_RUN = "# not run in CI: "
"""Comment before a command that needs what CI lacks. A reader of the page sees it, too."""


@dataclass(frozen=True)
class Block:
    """Fenced block of a page: its language, its text without indentation, and its line."""

    page: Path
    line: int
    language: str
    text: str
    heading: str


@dataclass(frozen=True)
class Command:
    """One command of a block.

    Attributes:
        text: the command, with its continuation lines.
        shown: what the page says that it prints; "" if the page does not show it.
        not_run: why CI does not run it, "" if it does.
        program: the Python program of the page that it is about, "" if there is none.
    """

    block: Block
    text: str
    shown: str
    not_run: str
    program: str

    @property
    def place(self) -> str:
        """Page and line of the block, and the command."""
        page = self.block.page.relative_to(CHECKOUT)
        return f"{page}:{self.block.line} {self.text.splitlines()[0]}"


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    blocks: list[Block] = []
    text, heading = page.read_text(), ""
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$|^#+ ([^\n]*)", text, re.M | re.S):
        indentation, language, body, title = match.groups()
        if title is not None:
            heading = title.strip("`")
            continue
        line = text.count("\n", 0, match.start()) + 1
        body = re.sub(f"^{indentation}", "", body, flags=re.M)
        blocks.append(Block(page, line, language, body, heading))
    return blocks


def commands_of(page: Path) -> list[Command]:
    """Return the commands in the console blocks of a page.

    A command is about the last program of the page, which later programs and diffs replace. A diff
    changes the first program of the page, and holds until the next heading.
    """
    commands: list[Command] = []
    first = current = heading = ""
    for block in blocks_of(page):
        if block.heading != heading:
            heading, current = block.heading, first
        if block.language == "python" and "@T.prim_func" in block.text:
            first, current = first or block.text, block.text
        elif block.language == "diff":
            current = _changed(first, block.text)
        elif block.language == "console":
            commands += _commands(block, current)
    return commands


def _changed(program: str, diff: str) -> str:
    lines = [(line[:1], line[1:] + "\n") for line in diff.splitlines()]
    before, after = ("".join(text for sign, text in lines if sign in (s, " ")) for s in "-+")
    assert program.count(before) == 1, before
    return program.replace(before, after)


def _commands(block: Block, program: str) -> Iterator[Command]:
    pattern = rf"(?:^{NOT_RUN}([^\n]*)\n)?^\$ ((?:[^\n]*\\\n)*[^\n]*)\n?(.*?)(?=^\$ |^{NOT_RUN}|\Z)"
    for not_run, text, shown in re.findall(pattern, block.text, re.M | re.S):
        yield Command(block, text, shown, not_run, program)
