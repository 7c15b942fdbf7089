"""Encode a call's operations for ``src/enqueue.cc``, which enqueues all of them in one call."""

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
    operations: Sequence[Operation], call_tensors: Sequence[torch.Tensor]
) -> Callable[..., int] | None:
    """Return a function that enqueues ``operations``; None if only Python can enqueue them.

    The function accepts the addresses of a call's tensors. It returns 0, or
    ``(number of the operation that failed, from 1) << 32 | status``.

    Args:
        call_tensors: the tensors of one such call; later calls pass tensors of the same types and
            shapes.
    """
    launches = [o for o in operations if isinstance(o, KernelLaunch)]
    if not all(isinstance(o.kernel.launch, tvm_ffi.Function) for o in launches):
        return None
    if (module := library()) is None:
        return None
    tensors: list[torch.Tensor] = []
    return module.ready(DRIVER, [_encode(o, call_tensors, tensors) for o in operations], *tensors)


def _encode(
    operation: Operation, call_tensors: Sequence[torch.Tensor], tensors: list[torch.Tensor]
) -> tuple:
    """Return the encoding that ``enqueue.cc`` accepts; append the tensors it refers to to
    ``tensors``."""
    if isinstance(operation, RowsCopy):
        rows = operation.rows
        return (operation.name, operation.dst, operation.src, rows.count, rows.width,
                rows.dst_pitch, rows.src_pitch, operation.stream)  # fmt: skip
    if isinstance(operation, StreamMemOps):
        return operation.name, operation.stream, *operation.words
    if not isinstance(operation, KernelLaunch):
        return operation.name, *operation.args
    args: list[Any] = []
    for a in operation.args:
        if isinstance(a, (Place, torch.Tensor)):
            index = a.index if isinstance(a, Place) else -1
            args.append((len(tensors), index))
            tensors.append(call_tensors[index] if isinstance(a, Place) else a)
        else:
            args.append(int(a) if isinstance(a, numbers.Integral) else float(a))
    return (
        "launch",
        operation.kernel.launch,
        operation.stream.cuda_stream,
        operation.stream.device.index,
        *args,
    )
