"""Reads and flags that are completely outside of their tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np
from tvm import tirx

from ....builtins.errors import SyncWarning
from ...ir.walk import variables_in
from ..regions.accesses import Access
from .events import Event
from .launches import Rows


def warn_outside(reads: Iterable[Access | Event]) -> None:
    """Warn about reads that are completely outside of the tensor, where TileLang reads zeros."""
    for read in reads:
        warnings.warn(
            f"{read.text}, in some iteration wholly outside of the tensor, where it yields zeros; "
            f"expected indices inside, or a condition{read.location}",
            SyncWarning,
            stacklevel=2,
        )


def reads_outside(rows: Iterable[Rows]) -> Iterator[Event]:
    """Yield the reads of a program that are completely outside of a tensor of constant shape."""
    return (r.event for r in rows if r.event.kind == "read" and _outside(r) is not None)


def outside_message(rows: Iterable[Rows], parameters: Iterable[tirx.Var]) -> str:
    """Return the error of a flag, or of words of a barrier, outside of its tensor, or "".

    Indices that depend on ``parameters`` of the program are not known.
    """
    unknown = set(parameters)
    for r in rows:
        used = {v for start in r.event.starts for v in variables_in(start)}
        if r.event.kind in ("signal", "wait", "barrier") and not used & unknown:
            outside = _outside(r)
            if outside is not None:
                axis, index, extent = outside
                return (
                    f"{r.event.text}: index {index} of axis {axis} is outside of "
                    f"{r.event.tensor.name}; expected 0 to {extent - 1}{r.event.location}"
                )
    return ""


def _outside(r: Rows) -> tuple[int, int, int] | None:
    """Return the first axis, after that of the ranks, on which some box is completely outside of a
    tensor of constant shape, with the first index of the box and the extent."""
    if r.event.tensor is None or not r.low:
        return None
    axes = zip(r.low[1:], r.high[1:], r.event.tensor.shape[1:], strict=True)
    for axis, (low, high, extent) in enumerate(axes, 1):
        if isinstance(extent, tirx.IntImm):
            wrong = np.atleast_1d((low >= int(extent)) | (high <= 0))
            if wrong.any():
                return axis, int(np.broadcast_to(low, wrong.shape)[wrong][0]), int(extent)
    return None
