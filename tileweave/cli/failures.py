"""Report unexpected exceptions, such as compiler errors, in a few lines."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from typing import Any

from tilelang import tvm  # noqa: F401  (makes the bundled tvm importable)
from tvm import tirx

from ..explain.source import source_of
from ..passes.ir.leaves import leaves_of
from ..passes.ir.walk import uses_op

_MAX_LINES = 4
_MAX_COLUMNS = 300
_MAX_PLACES = 8
_IN_CUDA = re.compile(r"^\S+\.cu\((\d+)\)")
_LOWERING = re.compile(r"::(\w+)Node::(?:Lower|InferLayout)\b")
"""C++ function that lowers or lays out a tile operation, such as ``tvm::tl::CopyNode::Lower``."""


def failure(command: str, error: BaseException, file: Path, name: str, program: Any) -> str:
    """Return the error, the user's line and the option that shows the rest.

    Args:
        file: file of the user's program.
        name: name of the program that was being compiled, "" if none was.
        program: the program itself, None if none was.
    """
    context = f"{command}: {name}: " if name else f"{command}: "
    line = _line_of(error, file)
    op, places = ("", [line]) if line else _lowered_op(error, program)
    places = places or [_line_of_program(program) or str(file)]
    arrows = [f" {op}--> {place}" for place in places[:_MAX_PLACES]]
    if len(places) > 1:
        arrows.insert(0, "in one of these")
    summary = f"{context}{type(error).__name__}: {message_of(error)}"
    return "\n".join([summary, *arrows, "(TILEWEAVE_TRACEBACK=1 shows the frames)"])


def message_of(error: BaseException) -> str:
    """Return the lines of the message that state the error, without the source of a compiler."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        lines = [error.msg]
    lines = [_IN_CUDA.sub(r"line \1 of the CUDA source (--stage cuda)", line) for line in lines]
    errors = [line for line in lines if " error: " in line]
    first = [line[:_MAX_COLUMNS] for line in (errors or lines)[:_MAX_LINES]]
    return "\n  ".join(first) or "(no message)"


def _line_of(error: BaseException, file: Path) -> str:
    """Return ``file:line`` of the innermost frame in the user's file, or ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if _is_same_file(f.filename, file) and f.lineno]
    return f"{file}:{lines[-1]}" if lines else ""


def _lowered_op(error: BaseException, program: Any) -> tuple[str, list[str]]:
    """Return the tile operation that TileLang could not lower, and its lines in the program."""
    frames = [f.name for f in traceback.extract_tb(error.__traceback__)]
    ops = [match[1].lower() for frame in frames if (match := _LOWERING.search(frame))]
    if not ops or not isinstance(program, tirx.PrimFunc):
        return "", []
    op = f"tl.tileop.{ops[-1]}"
    places = [leaf.loc for leaf in leaves_of(program.body) if uses_op(leaf.node, op)]
    return f"{ops[-1]} ", list(dict.fromkeys(f"{f}:{line}" for f, line in places if line))


def _is_same_file(name: str, file: Path) -> bool:
    return os.path.exists(name) and os.path.samefile(name, file)


def _line_of_program(program: Any) -> str:
    """Return ``file:line`` of a program or plan, or "" if it is unknown."""
    if hasattr(program, "loc"):
        return str(program.loc)
    source = source_of(program) if program is not None else None
    return f"{source[0]}:{source[1]}" if source else ""
