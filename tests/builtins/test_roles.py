"""Passes, runtime and simulator read roles from declarations, not names of builtins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tileweave
from tileweave import language as W
from tileweave.builtins.spec import BUILTINS

ROOT = Path(tileweave.builtins.__file__).resolve().parents[1]
PRODUCT = ("codegen", "ops", "passes", "runtime", "simulator", "tileweave")
NAMES = {spec.name for spec in BUILTINS.values()}
KINDS = {"bulk_wait", "fence", "rank", "record", "signal", "world_size"}
"""Names that are also kinds of events or parameters; they must not be compared with a name."""


def _strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _is_prefix(text: str) -> bool:
    return bool(text) and any(name.startswith(text) for name in NAMES)


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string that names a builtin or a family of builtins."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            bare = node.value.removeprefix("tileweave.").removeprefix("W.")
            if bare in NAMES and (bare != node.value or bare not in KINDS):
                yield node.lineno, node.value
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "name" for side in sides):
                yield from ((node.lineno, s) for s in _strings(node) if s in KINDS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "removeprefix"):
                for argument in node.args:
                    yield from ((node.lineno, s) for s in _strings(argument) if _is_prefix(s))


@pytest.mark.parametrize("folder", PRODUCT)
def test_no_builtin_is_known_by_its_name(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    named = [
        f"{file.relative_to(ROOT)}:{line}: {text!r}"
        for file in files
        for line, text in names_in(file.read_text())
    ]
    assert not named, "read a role of builtins/spec.py instead:\n" + "\n".join(named)


@pytest.mark.parametrize(
    "source",
    [
        'MOVERS = {"put_block", "bulk_load"}',
        'if op_name(call) == "tileweave.signal": pass',
        'if event.op == "W.fence": pass',
        'if spec.name == "fence": pass',
        'if spec.name in ("signal", "wait"): pass',
        'if spec.name.startswith("multimem"): pass',
        'relation = spec.name.removeprefix("wait_")',
        'if name.startswith(("ld", "atom_")): pass',
    ],
)
def test_a_name_is_found(source):
    assert list(names_in(source))


@pytest.mark.parametrize(
    "source",
    [
        'if event.kind == "signal": pass',
        'rank = tirx.Var("rank", "int32")',
        'if name.startswith("tl.tileop"): pass',
        '"""Put a ``W.signal`` after the write."""',
    ],
)
def test_another_string_is_not_taken_for_a_name(source):
    assert not list(names_in(source))


def test_the_language_has_every_builtin():
    assert sorted(name for name in NAMES if not callable(getattr(W, name, None))) == []
