"""Lines of test programs, as reports and errors name them."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.releases import RECORDS_LINES


def lines_of(function: Callable[..., Any], *marks: str) -> set[int]:
    """Return the numbers of the lines of a function that end with one of the marks."""
    text, first = inspect.getsourcelines(function)
    return {first + n for n, line in enumerate(text) if line.rstrip().endswith(marks)}


def place_of(function: Callable[..., Any], text: str, turn: int = 0) -> str:
    """Return ``file:line`` of the first line of a function with this text, or of a later one."""
    lines, first = inspect.getsourcelines(function)
    found = [n for n, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(inspect.unwrap(function))}:{first + found[turn]}"


def named_lines(report: str, function: Callable[..., Any]) -> set[int]:
    """Return the lines of the file of a function that a report names."""
    file = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").name
    return {int(n) for n in re.findall(rf"{re.escape(file)}:(\d+)", report)}


def names_lines(report: str, function: Callable[..., Any], *marks: str) -> bool:
    """Return whether a report names the lines with these marks; always true without lines."""
    return not RECORDS_LINES or lines_of(function, *marks) <= named_lines(report, function)
