"""The group of ranks that a program is compiled for, and its symmetric tensors."""

from __future__ import annotations

import json

from tvm import tirx

from ...builtins.symmetric import itemsize
from .implicit import implicit_of
from .scratch import with_buffers

GROUP_SIZE = "tileweave.group_size"
"""Attribute of a program compiled for a group that holds the number of ranks."""

_OF_HEAP = "tileweave.of_heap"
"""Attribute of such a program that holds the indices of its symmetric parameters. Their strides do
not identify them, because a tensor that is local to the rank may have the same stride."""


def heap_tensors(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """Return the symmetric tensors of a program compiled for a group, with implicit ones."""
    marked = func.attrs[_OF_HEAP].value if func.attrs and _OF_HEAP in func.attrs else "[]"
    implicit = implicit_of(func)
    first = len(func.params) - len(implicit)
    positions = {*json.loads(marked)}
    positions |= {first + n for n, parameter in enumerate(implicit) if parameter.symmetric}
    return [func.buffer_map[func.params[position]] for position in sorted(positions)]


def shifted_heap_tensors(func: tirx.PrimFunc, first: int, count: int) -> tirx.PrimFunc:
    """Return ``func``, of which ``count`` parameters were inserted at position ``first``."""
    if not func.attrs or _OF_HEAP not in func.attrs:
        return func
    positions = json.loads(func.attrs[_OF_HEAP].value)
    shifted = [p + count if p >= first else p for p in positions]
    return func.with_attr(_OF_HEAP, tirx.StringImm(json.dumps(shifted)))


def with_heap_stride(func: tirx.PrimFunc, heap_stride: int) -> tirx.PrimFunc:
    """Return a program compiled for a group, with another number of bytes between two ranks'
    heaps."""
    buffers = {}
    for tensor in heap_tensors(func):
        stride = tirx.IntImm("int64", heap_stride // itemsize(tensor.dtype))
        buffers[tensor.data] = tirx.decl_buffer(
            tensor.shape, tensor.dtype, tensor.name, data=tensor.data,
            strides=[stride, *tensor.strides[1:]], scope=tensor.scope(),
        )  # fmt: skip
    body = with_buffers(func.body, buffers, lambda allocation: allocation)
    buffer_map = {p: buffers.get(b.data, b) for p, b in func.buffer_map.items()}
    return tirx.PrimFunc(func.params, body, func.ret_type, buffer_map, func.attrs, func.span)
