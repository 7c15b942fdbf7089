"""Sizes of programs: the possible ones, and those that a program was specialized for."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tvm import tirx

LARGEST = (1 << 31) - 1
"""Of extents: what a program counts with."""
MOST_RANKS = 1024
"""Ranks of a group that programs are compiled or simulated for."""
SIZES = "tileweave.sizes"
"""Attribute of a program: its sizes by name, as JSON."""


def set_sizes(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc:
    """Return ``func`` with the attribute that restricts it to these sizes."""
    return func.with_attr(SIZES, tirx.StringImm(json.dumps(dict(sizes))))


def sizes_of(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the sizes that ``func`` was specialized for, by name; empty if it was not."""
    return json.loads(func.attrs[SIZES].value) if func.attrs and SIZES in func.attrs else {}


def in_numbers(sizes: Mapping[str, int]) -> str:
    """``M=20, N=32``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def named(func: tirx.PrimFunc) -> str:
    """The program's name, with its sizes: ``gemm`` or ``gemm for M=20``."""
    name, sizes = str(func.attrs["global_symbol"]), sizes_of(func)
    return f"{name} for {in_numbers(sizes)}" if sizes else name
