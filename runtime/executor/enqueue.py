"""Encode a call's operations for ``src/enqueue.cc``, which enqueues all of them in one call."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import tvm_ffi

from ..host.native import library
from .operations import KernelLaunch, Operation, Place, RowsCopy, StreamMemOps

DRIVER = "libcuda.so.1"


class Part(NamedTuple):
    """Operations of one call, which may be a part of a longer one.

    Attributes:
        operations: they find tensors by their index in this call.
        tensors: tensors of such a call; others have the same types and shapes.
        places: where the whole call finds their addresses.
    """

    operations: Sequence[Operation]
    tensors: Sequence[torch.Tensor]
    places: Sequence[Place]


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
    places = [Place(index, 0) for index in range(len(call_tensors))]
    return enqueuer_of([Part(operations, call_tensors, places)])


def enqueuer_of(parts: Sequence[Part]) -> Callable[..., int] | None:
    """Return a function that enqueues the operations of ``parts``, one after the other, as
    ``enqueuer`` does."""
    launches = [o for part in parts for o in part.operations if isinstance(o, KernelLaunch)]
    if not all(isinstance(o.kernel.launch, tvm_ffi.Function) for o in launches):
        return None
    if (module := library()) is None:
        return None
    tensors: list[torch.Tensor] = []
    operations = [_encode(o, part, tensors) for part in parts for o in part.operations]
    return module.ready(DRIVER, operations, *tensors)


def _encode(operation: Operation, part: Part, tensors: list[torch.Tensor]) -> tuple:
    """Return the encoding that ``enqueue.cc`` accepts; append the tensors it refers to to
    ``tensors``."""

    def place(address: int | Place) -> int | Place:
        if not isinstance(address, Place):
            return address
        return part.places[address.index].after(address.offset)

    if isinstance(operation, RowsCopy):
        rows = operation.rows
        return (operation.name, place(operation.dst), place(operation.src), rows.count, rows.width,
                rows.dst_pitch, rows.src_pitch, operation.stream)  # fmt: skip
    if isinstance(operation, StreamMemOps):
        words = [(kind, place(address), value) for kind, address, value in operation.words]
        return operation.name, operation.stream, *words
    if not isinstance(operation, KernelLaunch):
        return operation.name, *map(place, operation.args)
    args: list[Any] = []
    for a in operation.args:
        if isinstance(a, (Place, torch.Tensor)):
            is_of_call = isinstance(a, Place)
            args.append((len(tensors), place(a if is_of_call else a.data_ptr())))
            tensors.append(part.tensors[a.index] if is_of_call else a)
        else:
            args.append(int(a) if isinstance(a, numbers.Integral) else float(a))
    return (
        "launch",
        operation.kernel.launch,
        operation.stream.cuda_stream,
        operation.stream.device.index,
        *args,
    )
