"""Sizes of programs: what they can be, and those that one was specialised for."""

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
    """``func`` saying that it is for these sizes only."""
    return func.with_attr(SIZES, tirx.StringImm(json.dumps(dict(sizes))))


def sizes_of(func: tirx.PrimFunc) -> dict[str, int]:
    """The sizes that ``func`` was specialised for, by name; none if it was not."""
    return json.loads(func.attrs[SIZES].value) if func.attrs and SIZES in func.attrs else {}


def in_numbers(sizes: Mapping[str, int]) -> str:
    """``M=20, N=32``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def named(func: tirx.PrimFunc) -> str:
    """The program's name, with its sizes: ``gemm`` or ``gemm for M=20``."""
    name, sizes = str(func.attrs["global_symbol"]), sizes_of(func)
    return f"{name} for {in_numbers(sizes)}" if sizes else name
