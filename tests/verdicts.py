"""Verdict of the compiler on a program, as the lit tests print it."""

from collections.abc import Iterator
from contextlib import contextmanager

from tileweave import TileWeaveError


@contextmanager
def print_verdict(name: str) -> Iterator[None]:
    """Print ``NAME: accepted``, or ``NAME: `` and the error that the statements raise."""
    try:
        yield
    except TileWeaveError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: accepted")
