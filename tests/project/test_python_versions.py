"""Code that only some of the supported versions of Python refuse."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def decorators(tree: ast.Module) -> set[str]:
    """Return the names of the decorators of all functions in a module."""
    decorators = (d for node in ast.walk(tree) for d in getattr(node, "decorator_list", []))
    called = (d.func if isinstance(d, ast.Call) else d for d in decorators)
    return {d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in called}


def test_annotations_of_kernels_are_no_strings():
    """TileLang evaluates annotations of kernels, and on Python 3.10 accepts types only."""
    folders = ("builtins", "ops", "runtime", "passes", "tileweave", "examples", "benchmarks")
    modules = [p for f in (*folders, "tests", "lit_tests") for p in (ROOT / f).rglob("*.py")]
    assert len(modules) > 300
    for module in modules:
        text = module.read_text()
        if "from __future__ import annotations" in text:
            assert not decorators(ast.parse(text)) & {"prim_func", "jit"}, module
