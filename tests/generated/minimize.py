"""Smallest program with the same fault: ``python -m tests.generated.minimize FAMILY SEED ARCH``."""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .check import Verdict, check
from .programs import random_program
from .reference import Unsuitable


def minimized(text: str, is_faulty: Callable[[str], bool]) -> str:
    """Return ``text`` without the statements and parameters that ``is_faulty`` does not need.

    Removes sequences of statements of the kernel, loops and branches, long ones first. The
    symmetric tensor stays: without it TileWeave leaves the program to TileLang.
    """
    size = len(_lists(ast.parse(text))[0]) // 2
    while size >= 1:
        text, size = _shortened(text, size, is_faulty), size // 2
    return text


def _shortened(text: str, size: int, is_faulty: Callable[[str], bool]) -> str:
    """Remove ``size`` statements at a time, last ones first: uses before definitions."""
    for number in reversed(range(len(_lists(ast.parse(text))))):
        last = len(_lists(ast.parse(text))[number])
        while last > 0:
            module = ast.parse(text)
            statements, first = _lists(module)[number], max(last - size, 0)
            del statements[first:last]
            smaller = _without_unused(module)
            if statements and "S[" in smaller and is_faulty(smaller):
                text = smaller
            last = first
    return text


def _lists(module: ast.Module) -> list[list[ast.stmt]]:
    """Return the statements of the kernel, and of each loop and branch in it."""
    kernel = next(n for n in ast.walk(module) if isinstance(n, ast.With))
    return [
        statements
        for node in ast.walk(kernel)
        for field in ("body", "orelse")
        if isinstance(statements := getattr(node, field, None), list) and statements
    ]


def _without_unused(module: ast.Module) -> str:
    function = next(n for n in module.body if isinstance(n, ast.FunctionDef))
    names = {n.id for s in function.body for n in ast.walk(s) if isinstance(n, ast.Name)}
    function.args.args = [a for a in function.args.args if a.arg in names]
    return ast.unparse(module).replace("'", '"') + "\n"


def same_fault(ranks: int, arch: str, fault: Verdict, folder: Path) -> Callable[[str], bool]:
    """Return whether a text has a fault of the same kind; for ``minimized``."""

    def is_faulty(text: str) -> bool:
        file = folder / "program.py"
        file.write_text(text)
        try:
            verdict = check(file, ranks, arch)
        except Unsuitable:
            return False
        return verdict.kind == fault.kind

    return is_faulty


def main(family: str, seed: str, arch: str) -> None:
    program = random_program(family, int(seed))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(program.text)
        verdict = check(file, program.ranks, arch, reference=program.reference)
        print(f"# {program.ranks} ranks, {arch}: {verdict.outcome}")
        print("".join(f"# {line}\n" for line in verdict.why.splitlines()), end="")
        faulty = same_fault(program.ranks, arch, verdict, file.parent)
        print(minimized(program.text, faulty) if verdict.is_fault else program.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
