"""Ragged tensors of a program, after ``lift_ragged``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tvm import tirx

RAGGED = "tileweave.ragged"
"""Attribute of a program that holds, for the name of each ragged tensor, the number of axes after
the rank axis that select a segment, as JSON. The last of these axes is the source."""


def ragged_of(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the number of segment axes of each ragged tensor of ``func``, by name."""
    return json.loads(func.attrs[RAGGED].value) if func.attrs and RAGGED in func.attrs else {}


def with_ragged(func: tirx.PrimFunc, ragged: Mapping[str, int]) -> tirx.PrimFunc:
    """Return ``func`` with an attribute that names its ragged tensors."""
    return func.with_attr(RAGGED, tirx.StringImm(json.dumps(dict(ragged))))


def counts_name(tensor: str) -> str:
    """Return the name of the symmetric tensor with the announcements of a ragged tensor."""
    return f"{tensor}_announced"


def totals_name(tensor: str) -> str:
    """Return the name of the local tensor with the elements that a rank has announced so far."""
    return f"{tensor}_total"
