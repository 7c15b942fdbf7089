"""Collectives of ``torch.distributed``, and the wait for those of gloo."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .group import CHECK_INTERVAL_S

# Renamed in torch 2.13; the old names warn there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_RELEASE_S = 1.0
"""Limit in seconds of the wait for gloo's thread: another thread may hold a reference of its
own."""
_RELEASE_POLL_S = 2e-5


_uses_gloo: WeakKeyDictionary[dist.ProcessGroup, dict[str, bool]] = WeakKeyDictionary()
"""Results of ``uses_gloo``, by type of device: torch needs 10 us to look for a backend."""


def uses_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the collectives of ``group`` on tensors of ``device`` are gloo's."""
    by_type = _uses_gloo.setdefault(group, {})
    if device.type not in by_type:
        by_type[device.type] = group._get_backend(device).name() == "gloo"
    return by_type[device.type]


def run_by_gloo(
    collective: Callable[..., Any], tensors: Sequence[torch.Tensor], group: dist.ProcessGroup,
    look: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Run a collective to its end.

    gloo's thread needs Python's lock to release the tensors, and does so after it has reported that
    the collective is complete. In an interpreter that ends at that moment the thread cannot get the
    lock: it is unwound inside a destructor, and C++ aborts the process ("terminate called without
    an active exception"). So this waits until gloo has released them.

    Args:
        look: called each second while the collective runs; it may raise an error that explains why
            it will not end.
    """
    before = _references(tensors)
    work = collective(*tensors, group=group, async_op=True)
    while not _is_over(work):
        look()
    del work
    deadline = time.monotonic() + _RELEASE_S
    while _references(tensors) > before and time.monotonic() < deadline:
        time.sleep(_RELEASE_POLL_S)


def _is_over(work: dist.Work) -> bool:
    """Wait for ``CHECK_INTERVAL_S`` or until gloo's work is over; raise what it raises.

    gloo never calls a failed reduce-scatter complete. So an error in the first half of the time is
    the work's own. A later one may only say that the time has passed; if the work has failed, the
    next call raises its error at once.
    """
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=CHECK_INTERVAL_S))
    except RuntimeError:
        if work.is_completed() or time.monotonic() - began < CHECK_INTERVAL_S / 2:
            raise
        return False
    return True


def _references(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of references from C++ and from Python."""
    return sum(tensor._use_count() + sys.getrefcount(tensor) for tensor in tensors)
