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


def show(program: Any, name: str = "", **options: Any) -> None:
    """Print ``TEST: NAME``, with the architecture if it is given, and what ``tw.emit`` returns."""
    arch = (options["arch"],) if "arch" in options else ()
    print("TEST:", name or program.attrs["global_symbol"], *arch)
    print(tw.emit(program, **options))


def show_unordered(program: Any, name: str = "", **options: Any) -> None:
    """``show`` a program whose accesses nothing orders."""
    configs = {"tileweave.verify": "off", **options.pop("pass_configs", {})}
    show(program, name, **options, pass_configs=configs)
