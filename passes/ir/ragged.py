"""Ragged tensors of a program, after ``lift_symmetric``."""

from __future__ import annotations

from tvm import tirx

from .implicit import implicit_of

ARRIVED = "arrived"
"""Suffix of the name of the counters that reads of a tensor wait for."""


def ragged_of(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the number of axes after the rank axis that select a segment of each ragged tensor of
    ``func``, by its name. The last of these axes is the source."""
    return {p.name: len(p.segments) for p in implicit_of(func) if p.segment}


def tiles_of(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the rows of a tile of each ragged tensor of ``func``, by its name."""
    return {p.name: p.tile for p in implicit_of(func) if p.tile}


def counts_name(tensor: str) -> str:
    """Return the name of the symmetric tensor with the announcements of a ragged tensor."""
    return f"{tensor}_announced"


def totals_name(tensor: str) -> str:
    """Return the name of the local tensor with the elements that a rank has announced so far."""
    return f"{tensor}_total"
