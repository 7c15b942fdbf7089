"""Reasons why mutants are equivalent, from a JSON file.

``x.equivalent.json`` beside ``x.py`` holds them by function, statement and mutant::

    {
      "make_ring.ring": {
        "W.signal(flags[peer, 0], turn, op='set')": {
          "signal sem=relaxed": "the flag carries all the data"
        }
      }
    }

The keys contain no line numbers, so they stay valid if other lines change. A key such as
``"level=device, arch=sm_90a"`` holds the reasons for mutants of device functions, in the same
form.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...builtins.errors import TileWeaveError
from ..device.program import ARCHITECTURES

_FORM = '{"function": {"statement": {"mutant": "reason"}}}'
_LEVEL = "level="
"""Start of the key of a part for another level than the tile level."""
_INFERRED = json.loads(Path(__file__).with_name("inferred.json").read_text())
PLAN_REASONS: dict[str, str] = _INFERRED["plan"]
"""Reasons for changes of the stream order of a plan that the compiler synchronizes."""


def level_key(arch: str) -> str:
    """Return the key of the reasons for device functions of an architecture."""
    return f"{_LEVEL}device, arch={arch}"


def flag_reasons(flag: str) -> dict[str, str]:
    """Return reasons for operations that the compiler inserts, by the flag's name or its suffix.

    Not every program needs all of an inserted operation, so these mutants may also be killed.
    """
    flags = _INFERRED["flags"]
    return flags.get(flag) or flags.get(flag.rpartition("_")[2], {})


@dataclass(frozen=True)
class Explanation:
    """One reason in a sidecar file."""

    function: str
    statement: str
    name: str
    reason: str
    sidecar: str
    line: int

    def is_about(self, name: str, function: str, statement: str, flag: str) -> bool:
        names = (name, f"{name} of {flag}")
        return self.name in names and (self.function, self.statement) == (function, statement)


class Source:
    """Functions and statements of one source file. A missing file has none."""

    def __init__(self, file: str) -> None:
        self.functions: list[tuple[range, str]] = []
        self._statements: list[tuple[range, ast.stmt]] = []
        if Path(file).is_file():
            self._add(ast.parse(Path(file).read_text()), "")

    def _add(self, node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            path = outer
            if isinstance(child, ast.stmt):
                self._statements.append((_head(child), child))
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                path = f"{outer}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef):
                self.functions.append((range(_first_line(child), _end(child) + 1), path))
            self._add(child, path)

    def function(self, line: int) -> str:
        """Return the qualified name of the innermost function around a line."""
        around = [(len(lines), name) for lines, name in self.functions if line in lines]
        return min(around)[1] if around else ""

    def statement(self, line: int) -> str:
        """Return the innermost statement at a line as ``ast.unparse`` writes its first line."""
        around = [(lines, node) for lines, node in self._statements if line in lines]
        return _text(min(around, key=lambda pair: len(pair[0]))[1]) if around else ""


class Explanations:
    """Explanations for the program at these files and lines.

    Args:
        equivalent: sidecar file; None: the sidecar files next to the source files.
        level: key of the part of a sidecar file to use; nothing: what no such key holds.

    Raises:
        TileWeaveError: a sidecar file is malformed.
    """

    def __init__(
        self, places: Iterable[tuple[str, int]], equivalent: str | os.PathLike[str] | None,
        level: str = "",
    ) -> None:  # fmt: skip
        self._sources: dict[str, Source] = {}
        self._functions = {self.keys(*place)[0] for place in places}
        beside = [Path(file).with_suffix(".equivalent.json") for file in self._sources if file]
        sidecars = [p for p in beside if p.is_file()] if equivalent is None else [Path(equivalent)]
        self._all = [e for sidecar in sidecars for e in _read(sidecar, level)]
        self._used: set[Explanation] = set()

    def keys(self, file: str, line: int) -> tuple[str, str]:
        """Return the function and the statement at a line."""
        if file not in self._sources:
            self._sources[file] = Source(file)
        source = self._sources[file]
        return source.function(line), source.statement(line)

    def reason(self, *mutant: str) -> str:
        """Return why a mutant is equivalent, given its name, function, statement and flag."""
        about = [e for e in self._all if e.is_about(*mutant)]
        self._used.update(about)
        return about[0].reason if about else ""

    def stale(self) -> list[Explanation]:
        """List the explanations that no call of ``reason`` used.

        Those of functions that only other programs of the same file contain are left out.
        """
        defined = {name for source in self._sources.values() for _, name in source.functions}
        unused = [e for e in self._all if e not in self._used]
        return [e for e in unused if e.function in self._functions or e.function not in defined]


def _read(sidecar: Path, level: str) -> Iterator[Explanation]:
    try:
        text = sidecar.read_text()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise TileWeaveError(f"mutate: {sidecar}: {error}; expected {_FORM}") from None
    functions = dict(_items(content, sidecar))
    levels = {key: functions.pop(key) for key in [*functions] if key.startswith(_LEVEL)}
    for key in levels.keys() - set(legal := [level_key(arch) for arch in ARCHITECTURES]):
        raise TileWeaveError(f"mutate: {sidecar}: {key!r}; expected {' or '.join(legal)}")
    if level:
        functions = dict(_items(levels.get(level, {}), sidecar, level))
    for function, statements in functions.items():
        for statement, reasons in _items(statements, sidecar, function):
            for name, reason in _items(reasons, sidecar, function, statement):
                if not isinstance(reason, str):
                    raise _malformed(reason, sidecar, function, statement, name)
                line = _line_of(text, *filter(None, [level]), function, statement, name)
                yield Explanation(function, normalized(statement), name, reason, str(sidecar), line)


def _line_of(text: str, *keys: str) -> int:
    """Return the line of the last key, each nested in the one before."""
    at = 0
    for key in keys:
        at = max(at, text.find(json.dumps(key, ensure_ascii=False), at))
    return text.count("\n", 0, at) + 1


def _items(value: Any, *where: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise _malformed(value, *where)
    return value.items()


def _malformed(value: Any, *where: Any) -> TileWeaveError:
    return TileWeaveError(f"mutate: {': '.join(map(str, where))}: {value!r}; expected {_FORM}")


def normalized(statement: str) -> str:
    """Write a statement, or the head of a compound one, as ``ast.unparse`` does."""
    for text in (statement, f"{statement} pass"):
        try:
            return _text(ast.parse(text).body[0])
        except (SyntaxError, IndexError):
            continue
    return statement


def _text(node: ast.stmt) -> str:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return f"def {node.name}"
    return ast.unparse(node).splitlines()[0]


def _head(node: ast.stmt) -> range:
    """Return the lines of a statement, or those before the body of a compound one."""
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else _end(node)
    return range(_first_line(node), max(end, node.lineno) + 1)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _end(node: ast.stmt) -> int:
    """Return the last line, which only nodes that were not parsed lack."""
    return node.end_lineno or node.lineno
