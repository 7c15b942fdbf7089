"""Warnings about reads that are completely outside of their tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np
from tvm import tirx

from ....builtins.errors import SyncWarning
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
    for r in rows:
        if r.event.kind != "read" or r.event.tensor is None:
            continue
        axes = zip(r.low[1:], r.high[1:], r.event.tensor.shape[1:], strict=True)
        if any(
            isinstance(extent, tirx.IntImm) and np.any((low >= int(extent)) | (high <= 0))
            for low, high, extent in axes
        ):
            yield r.event
