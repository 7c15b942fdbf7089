"""Replace the size of the group and the stride of its heap by constants."""

from __future__ import annotations

import json

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ...builtins.ranks import WORLD_SIZE
from ...builtins.symmetric import is_symmetric, itemsize
from ..ir.group import _OF_HEAP, GROUP_SIZE
from ..ir.walk import location, nodes_in, op_name, with_span_of


def specialize_group(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Specialize the program for one group.

    Constants turn ``(rank + 1) % world_size`` into simple arithmetic and give the TMA descriptor
    its shape. The compiled kernel and its cache entry then depend on the group size. An attribute
    holds the size for ``bind_runtime``. Negative constant indices, which count from the end, are
    replaced by indices from the start.

    Args:
        world_size: number of ranks in the group.
        heap_stride: bytes between the heaps of two ranks.

    Raises:
        LanguageError: the program accesses a symmetric tensor through a view of another shape.

    Before: ``S: (world_size, M, N), strides (heap_stride_2, N, 1)``; ``tileweave.world_size()``;
    ``S[rank, -1, 0]``
    After:  ``S: (4, M, N), strides (1073741824, N, 1)``; ``4``; ``S[rank, M - 1, 0]``
    """
    ranks = tirx.IntImm("int32", world_size)
    concrete, positions = {}, []
    for position, parameter in enumerate(func.params):
        buffer = func.buffer_map.get(parameter)
        if buffer is not None and is_symmetric(buffer):
            positions.append(position)
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
        _refuse_views(func)
        func = func.specialize(concrete)
        func = func.with_attr(_OF_HEAP, tirx.StringImm(json.dumps(positions)))

    def constant(node):
        return ranks if op_name(node) == WORLD_SIZE else None

    body = _with_positive_indices(ir_transform(func.body, None, constant, ["tirx.Call"]))
    func = func.with_body(body)
    return func.with_attr(GROUP_SIZE, ranks)


def _refuse_views(func: tirx.PrimFunc) -> None:
    tensors = {b.data: b for b in func.buffer_map.values() if is_symmetric(b)}
    views: list[tirx.Buffer] = []
    lines: list[str] = []
    for node in nodes_in(func.body, tirx.BufferLoad, tirx.Stmt):
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
            tensor = tensors.get(node.buffer.data, node.buffer)
            if not node.buffer.same_as(tensor):
                views.append(node.buffer)
        if views and isinstance(node, tirx.Stmt) and (line := location(node)):
            lines.append(line)
    if views:
        name = tensors[views[0].data].name
        raise LanguageError(
            f"specialize_group: {views[0].name} is a view of {name}; expected accesses to {name} "
            f"itself, because symmetric tensors have no views{''.join(lines[:1])}"
        )


def _with_positive_indices(body: tirx.Stmt) -> tirx.Stmt:
    """Replace negative constant indices, which count from the end, by indices from the start."""

    def change(node):
        if not any(_is_negative(i) for i in node.indices):
            return None
        pairs = zip(node.indices, node.buffer.shape, strict=True)
        indices = [n + i if _is_negative(i) else i for i, n in pairs]
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(node.buffer, indices, node.predicate, node.span)
        store = tirx.BufferStore(node.buffer, node.value, indices, node.predicate)
        return with_span_of(node, store)

    return ir_transform(body, None, change, ["tirx.BufferLoad", "tirx.BufferStore"])


def _is_negative(index: tirx.PrimExpr) -> bool:
    return isinstance(index, tirx.IntImm) and int(index) < 0
