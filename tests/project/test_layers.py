"""Imports between modules: no cycle, and arrows from upper packages to lower ones only."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {
    "builtins": 0,
    "passes": 1,
    "codegen": 2,
    "runtime": 3,
    "simulator": 4,
    "ops": 5,
    "tileweave": 6,
}
"""A package may import those of lower numbers, and its own modules."""


def module_of(path: Path) -> str:
    """Return the dotted name of a module, such as ``passes.ir.walk``; a package has the name of its
    folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): path for package in LAYERS for path in sorted((ROOT / package).rglob("*.py"))
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def checked_only(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes under ``if TYPE_CHECKING``, which is false when the program runs."""
    guards = (
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
    )
    return {inner for guard in guards for stmt in guard.body for inner in ast.walk(stmt)}


def imports(module: str, path: Path) -> Iterator[str]:
    """Yield the TileWeave modules that a module imports, also within functions."""
    tree = parsed(path)
    skipped = checked_only(tree)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = package if package[0] == "tileweave" else ["tileweave", *package]
    for node in ast.walk(tree):
        if node in skipped or not isinstance(node, ast.ImportFrom):
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            for name in (f"{source}.{alias.name}", source):
                actual = name if name in MODULES else name.removeprefix("tileweave.")
                if actual in MODULES:
                    yield actual
                    break


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {
        module: {other for other in imports(module, path) if other != module}
        for module, path in MODULES.items()
    }


def test_the_graph_is_not_empty():
    assert len(graph()) > 200 and "builtins.spec" in graph()["builtins.declaration.declare"]


def test_no_import_is_circular():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_arrows_point_to_lower_packages():
    upward = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if LAYERS[other.split(".")[0]] > LAYERS[module.split(".")[0]]
    ]
    assert upward == []


@pytest.mark.parametrize(
    ("folder", "lower"),
    [("ops.core.", ("ops.core.",)), ("ops.autotune.", ("ops.autotune.", "ops.core."))],
)
def test_calls_import_no_operator(folder, lower):
    """Operators import the autotuner, which imports ``ops.core``, not the other way round."""
    imported = {
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if module.startswith(folder) and other.startswith("ops.") and not other.startswith(lower)
    }
    assert imported == set()


def test_packages_import_each_other_relatively():
    """The tests above do not see ``import tileweave.x``."""
    absolute = [
        module
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import) and any(a.name.startswith("tileweave") for a in node.names)
    ]
    assert absolute == []
