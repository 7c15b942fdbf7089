"""The operations of a call as ``src/enqueue.cc`` takes them, which enqueues all at once."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm_ffi

from ..host.native import library
from .operations import KernelLaunch, Operation, Place, RowsCopy, StreamMemOps

DRIVER = "libcuda.so.1"


def enqueuer(
    operations: Sequence[Operation], given: Sequence[torch.Tensor]
) -> Callable[..., int] | None:
    """What enqueues ``operations``, given the addresses of a call's tensors; None if only Python
    can. It returns 0, or ``(number of the operation that failed, from 1) << 32 | status``.

    Args:
        given: the tensors of such a call; other calls bring others of their kind.
    """
    launches = [o for o in operations if isinstance(o, KernelLaunch)]
    if not all(isinstance(o.kernel.launch, tvm_ffi.Function) for o in launches):
        return None
    if (module := library()) is None:
        return None
    tensors: list[torch.Tensor] = []
    return module.ready(DRIVER, [_encoded(o, given, tensors) for o in operations], *tensors)


def _encoded(
    operation: Operation, given: Sequence[torch.Tensor], tensors: list[torch.Tensor]
) -> tuple:
    """As ``enqueue.cc`` takes it; what it refers to is added to ``tensors``."""
    if isinstance(operation, RowsCopy):
        rows = operation.rows
        return (operation.name, operation.dst, operation.src, rows.count, rows.width,
                rows.dst_pitch, rows.src_pitch, operation.on)  # fmt: skip
    if isinstance(operation, StreamMemOps):
        return operation.name, operation.on, *operation.words
    if not isinstance(operation, KernelLaunch):
        return operation.name, *operation.args
    args: list[Any] = []
    for a in operation.args:
        if isinstance(a, (Place, torch.Tensor)):
            index = a.index if isinstance(a, Place) else -1
            args.append((len(tensors), index))
            tensors.append(given[index] if isinstance(a, Place) else a)
        else:
            args.append(int(a) if isinstance(a, numbers.Integral) else float(a))
    return (
        "launch",
        operation.kernel.launch,
        operation.on.cuda_stream,
        operation.on.device.index,
        *args,
    )
