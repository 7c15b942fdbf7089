"""Make the size of the group and the stride of its heap constants of the program."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..builtins.symmetric import is_symmetric, itemsize
from .walk import op_name, uses_tileweave

GROUP_SIZE = "tileweave.group_size"
"""Attribute of a program compiled for a group: its number of ranks."""


def specialize_group(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Compile the program for one group.

    Constants turn ``(rank + 1) % world_size`` into plain arithmetic, give the TMA descriptor its
    shape and make the compiled kernel, and its cache entry, one per group size. An attribute keeps
    the size for ``bind_runtime``.

    Args:
        world_size: ranks in the group.
        heap_stride: bytes between the heaps of two ranks.

    Before: ``S: (world_size, M, N), strides (heap_stride_2, N, 1)``; ``tileweave.world_size()``
    After:  ``S: (4, M, N), strides (1073741824, N, 1)``; ``4``
    """
    ranks = tirx.IntImm("int32", world_size)
    concrete = {}
    for parameter, buffer in func.buffer_map.items():
        if is_symmetric(buffer):
            stride = tirx.IntImm("int64", heap_stride // itemsize(buffer.dtype))
            concrete[parameter] = tirx.decl_buffer(
                [ranks, *buffer.shape[1:]],
                buffer.dtype,
                buffer.name,
                data=buffer.data,
                strides=[stride, *buffer.strides[1:]],
                scope=buffer.scope(),
            )
    if concrete:
        func = func.specialize(concrete)

    def constant(node):
        return ranks if op_name(node) == "tileweave.world_size" else None

    func = func.with_body(ir_transform(func.body, None, constant, ["tirx.Call"]))
    return func.with_attr(GROUP_SIZE, ranks) if uses_tileweave(func) else func
