"""Why a mutant changes nothing: said beside the operation, in the program's own source.

    # equivalent(signal sem=relaxed, signal scope=gpu): the flag carries all there is
    W.signal(flags[peer, 0], turn, op="set")

The comment stands on the operation's line or in the comment lines above it, which may be several.
In the parentheses are the mutants' names, as ``tileweave mutate`` prints them. What the compiler
put in has the line of what it serves; of several at one line ``signal drop of flags`` is the one of
the tensor ``flags``.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_EXPLAINS = re.compile(r"equivalent\((?P<names>[^)]*)\):\s*(?P<reason>.*?)(?=\s*equivalent\(|$)")


@dataclass(frozen=True)
class Explanation:
    """One name of one comment."""

    name: str
    reason: str
    file: str
    line: int
    lines: range
    """Of the statement it belongs to."""

    def is_about(self, name: str, file: str, line: int, flag: str = "") -> bool:
        names = (name, f"{name} of {flag}")
        return self.name in names and file == self.file and line in self.lines


def explanations(places: Iterable[tuple[str, int]]) -> list[Explanation]:
    """Those in the functions that contain the ``places``: files and lines of a program."""
    lines_of: dict[str, set[int]] = {}
    for file, line in places:
        lines_of.setdefault(file, set()).add(line)
    found = []
    for file, lines in lines_of.items():
        if Path(file).is_file():
            source = Path(file).read_text()
            functions = _functions(ast.parse(source), lines)
            found += [e for e in _read(source, file) if any(e.lines[0] in f for f in functions)]
    return found


def _functions(tree: ast.Module, lines: set[int]) -> list[range]:
    """The innermost functions around these lines."""
    every = [range(n.lineno, _end(n) + 1) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    around = [[f for f in every if line in f] for line in lines]
    return list({min(each, key=len) for each in around if each})


def _end(node: ast.stmt) -> int:
    """The last line; only nodes that were not parsed have none."""
    return node.end_lineno or node.lineno


def _read(source: str, file: str) -> list[Explanation]:
    """All explanations of a file."""
    statements = _statements(ast.parse(source))
    found = []
    for first, target, text in _comments(source):
        own = range(target, target + 1)
        lines = min((s for s in statements if target in s), key=len, default=own)
        for match in _EXPLAINS.finditer(text):
            for name in match["names"].split(","):
                found.append(Explanation(name.strip(), match["reason"], file, first, lines))
    return found


def _comments(source: str) -> Iterator[tuple[int, int, str]]:
    """(first line, line of the code it is about, text) of each comment; lines of comments that
    follow each other are one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    text = source.splitlines()
    alone = {n for n in comments if text[n - 1].lstrip().startswith("#")}
    for number in comments:
        if number not in alone:
            yield number, number, comments[number]
        elif number - 1 not in alone:
            last = number
            while last + 1 in alone:
                last += 1
            target = last + 1
            while target < len(text) and not text[target - 1].strip():
                target += 1
            yield number, target, " ".join(comments[n] for n in range(number, last + 1))


def _statements(tree: ast.Module) -> list[range]:
    """Lines of each statement; of a compound one, of its head."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else _end(node)
            out.append(range(node.lineno, max(end, node.lineno) + 1))
    return out
