"""The lit tests print what the compiler makes of a program, or says of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tileweave as tw


@contextmanager
def print_verdict(name: str) -> Iterator[None]:
    """Print ``NAME: accepted``, or ``NAME: `` and the error that the statements raise."""
    try:
        yield
    except tw.TileWeaveError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: accepted")


def show(program: Any, **options: Any) -> None:
    """Print ``TEST: NAME`` and what ``tw.emit`` returns."""
    print("TEST:", program.attrs["global_symbol"])
    print(tw.emit(program, **options))


def show_unordered(program: Any, **options: Any) -> None:
    """``show`` a program whose accesses nothing orders."""
    show(program, **options, pass_configs={"tileweave.verify": "off"})
