"""Find functions of a file that build programs, to suggest calls of them in errors."""

from __future__ import annotations

import ast
from pathlib import Path


def builders_in(path: Path) -> list[str]:
    """Return the top-level functions of a Python file that define a program inside."""
    tree = ast.parse(path.read_bytes())
    return [
        function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and not _is_program(function)
        if any(
            _is_program(inner)
            for inner in ast.walk(function)
            if isinstance(inner, ast.FunctionDef) and inner is not function
        )
    ]


def _is_program(function: ast.FunctionDef) -> bool:
    """Return true for a function decorated with ``T.prim_func`` or ``tw.plan``."""
    for decorator in function.decorator_list:
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
        if name in ("prim_func", "plan"):
            return True
    return False
