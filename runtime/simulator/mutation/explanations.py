"""Why a mutant changes nothing: said beside the operation, in the program's own source.

    # equivalent(signal sem=relaxed, signal scope=gpu): the flag carries all there is
    W.signal(flags[peer, 0], turn, op="set")

The comment stands on the operation's line or in the comment lines above it, and may go on in
comment lines of its own. In the parentheses are the mutants' names, as ``tileweave mutate`` prints
them. What the compiler put in has the line of what it serves.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_COMMENT = re.compile(r"#\s*equivalent\((?P<names>[^)]*)\):\s*(?P<reason>.*)")


@dataclass(frozen=True)
class Explanation:
    """One name of one comment."""

    name: str
    reason: str
    file: str
    line: int
    lines: range
    """Of the statement it belongs to."""

    def is_about(self, name: str, file: str, line: int) -> bool:
        return name == self.name and file == self.file and line in self.lines


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
    every = [
        range(n.lineno, n.end_lineno + 1) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)
    ]
    around = [[f for f in every if line in f] for line in lines]
    return list({min(each, key=len) for each in around if each})


def _read(source: str, file: str) -> list[Explanation]:
    comments = {
        t.start[0]: t.string
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    text = source.splitlines()
    alone = {n for n in comments if text[n - 1].lstrip().startswith("#")}
    statements = _statements(ast.parse(source))
    found = []
    for number, comment in comments.items():
        match = _COMMENT.match(comment)
        if match is None:
            continue
        reason, last = [match["reason"]], number
        while last + 1 in alone and not _COMMENT.match(comments[last + 1]):
            last += 1
            reason.append(comments[last].lstrip("# "))
        target = number
        while target in alone or (target <= len(text) and not text[target - 1].strip()):
            target += 1
        lines = min(
            (s for s in statements if target in s), key=len, default=range(target, target + 1)
        )
        for name in match["names"].split(","):
            found.append(Explanation(name.strip(), " ".join(reason), file, number, lines))
    return found


def _statements(tree: ast.Module) -> list[range]:
    """Lines of each statement; of a compound one, of its head."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            out.append(range(node.lineno, max(end, node.lineno) + 1))
    return out
