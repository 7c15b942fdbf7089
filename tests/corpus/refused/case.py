"""One refused program of the corpus, and the registry of all of them."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.factory import factory
from tests.releases import RECORDS_LINES

F32 = "float32"
N = 8


@dataclass(frozen=True)
class Case:
    """A program for which no synchronization can be inferred.

    Attributes:
        make: returns the program; the message names its lines marked ``# HERE``.
        message: part of the message.
    """

    make: Callable[[], Any]
    message: str
    ranks: int
    configs: dict[str, Any]

    @property
    def lines(self) -> set[int]:
        """Numbers of the lines that the message must name."""
        text, first = inspect.getsourcelines(self.make)
        return {first + n for n, line in enumerate(text) if line.rstrip().endswith("# HERE")}

    def lines_in(self, text: str) -> set[int]:
        """Return the lines of the program's file that a message names.

        TileLang 0.1.12 records none: those that it should name are returned then.
        """
        if not RECORDS_LINES:
            return set(self.lines)
        file = Path(inspect.getsourcefile(inspect.unwrap(self.make)) or "").name
        return {int(n) for n in re.findall(rf"{re.escape(file)}:(\d+)", text)}


REFUSED: dict[str, Case] = {}


def refused(message: str, ranks: int = 2, **options: Any):
    """Register a function: its program is refused with ``message``, compiled with ``options``."""

    def register(make):
        configs = {f"tileweave.{name}": value for name, value in options.items()}
        make = factory(make)
        REFUSED[make.__name__] = Case(make, message, ranks, configs)
        return make

    return register
