"""Functions of a file that make programs: the command line needs their results."""

from __future__ import annotations

import ast
from pathlib import Path


def builders_in(path: Path) -> list[str]:
    """Return the names of the functions at the top level of a Python file that define a
    ``T.prim_func`` or a ``tw.plan`` inside."""
    tree = ast.parse(path.read_bytes())
    return [
        function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and not _makes_program(function)
        if any(
            _makes_program(inner)
            for inner in ast.walk(function)
            if isinstance(inner, ast.FunctionDef) and inner is not function
        )
    ]


def _makes_program(function: ast.FunctionDef) -> bool:
    """Return true if a decorator makes ``function`` a program."""
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in ("prim_func", "plan"):
            return True
    return False
