"""Sizes of programs: limits, and the sizes for which a program is specialized."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tvm import tirx

LARGEST = (1 << 31) - 1
"""Maximum of an extent, because programs use int32 indices."""
MAX_RANKS = 1024
"""Maximum number of ranks for which a program is compiled or simulated."""
SIZES = "tileweave.sizes"
"""Attribute of a program that holds its sizes by name, as JSON."""


def set_sizes(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc:
    """Return ``func`` with the attribute for these sizes."""
    return func.with_attr(SIZES, tirx.StringImm(json.dumps(dict(sizes))))


def sizes_of(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the sizes for which ``func`` is specialized, by name; empty if it is not."""
    return json.loads(func.attrs[SIZES].value) if func.attrs and SIZES in func.attrs else {}


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Format sizes as ``M=20, N=32``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def named(func: tirx.PrimFunc) -> str:
    """Return the program's name with its sizes: ``gemm`` or ``gemm for M=20``."""
    name, sizes = str(func.attrs["global_symbol"]), sizes_of(func)
    return f"{name} for {format_sizes(sizes)}" if sizes else name
