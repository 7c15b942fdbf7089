"""One refused program of the corpus, and the registry of all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tilelang.language as T

from tests.factory import factory
from tests.lines import lines_of, named_lines
from tests.releases import RECORDS_LINES
from tileweave import language as W

F32 = "float32"
N = 8
Row, Shared = partial(T.Tensor, (N,), F32), partial(W.Symmetric, (N,), F32)
"""Types of parameters."""


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
        return lines_of(self.make, "# HERE")

    def lines_in(self, text: str) -> set[int]:
        """Return the lines of the program's file that a message names.

        TileLang 0.1.12 records none: those that it should name are returned then.
        """
        return named_lines(text, self.make) if RECORDS_LINES else self.lines


REFUSED: dict[str, Case] = {}


def refused(message: str, ranks: int = 2, **options: Any):
    """Register a function: its program is refused with ``message``, compiled with ``options``."""

    def register(make):
        configs = {f"tileweave.{name}": value for name, value in options.items()}
        make = factory(make)
        REFUSED[make.__name__] = Case(make, message, ranks, configs)
        return make

    return register
