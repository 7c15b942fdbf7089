"""Make the size of the group and the stride of its heap constants of the program."""

from __future__ import annotations

import json

from tilelang.ir import get_stmt_span, set_stmt_span
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from ...builtins.errors import LanguageError
from ...builtins.ranks import WORLD_SIZE
from ...builtins.symmetric import is_symmetric, itemsize
from ..ir.implicit import implicit_of
from ..ir.walk import location, op_name, uses_tileweave

GROUP_SIZE = "tileweave.group_size"
"""Attribute of a program compiled for a group: its number of ranks."""
_OF_HEAP = "tileweave.of_heap"
"""Another one: which of its parameters are symmetric. Their strides do not tell: a tensor of the
rank alone may have that of the heap, too."""


def specialize_group(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Compile the program for one group.

    Constants turn ``(rank + 1) % world_size`` into plain arithmetic, give the TMA descriptor its
    shape and make the compiled kernel, and its cache entry, one per group size. An attribute keeps
    the size for ``bind_runtime``. Negative constants as indices count from the end, as TileLang
    reads them later.

    Args:
        world_size: ranks in the group.
        heap_stride: bytes between the heaps of two ranks.

    Raises:
        LanguageError: the program accesses a symmetric tensor by another shape.

    Before: ``S: (world_size, M, N), strides (heap_stride_2, N, 1)``; ``tileweave.world_size()``;
    ``S[rank, -1, 0]``
    After:  ``S: (4, M, N), strides (1073741824, N, 1)``; ``4``; ``S[rank, M - 1, 0]``
    """
    ranks = tirx.IntImm("int32", world_size)
    concrete, places = {}, []
    for place, parameter in enumerate(func.params):
        buffer = func.buffer_map.get(parameter)
        if buffer is not None and is_symmetric(buffer):
            places.append(place)
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
        func = func.with_attr(_OF_HEAP, tirx.StringImm(json.dumps(places)))

    def constant(node):
        return ranks if op_name(node) == WORLD_SIZE else None

    body = _from_start(ir_transform(func.body, None, constant, ["tirx.Call"]))
    func = func.with_body(body)
    return func.with_attr(GROUP_SIZE, ranks) if uses_tileweave(func) else func


def heap_tensors(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """The symmetric tensors of a program that was made one of a group, implicit ones too."""
    marked = func.attrs[_OF_HEAP].value if func.attrs and _OF_HEAP in func.attrs else "[]"
    implicit = implicit_of(func)
    first = len(func.params) - len(implicit)
    places = {*json.loads(marked), *(first + n for n, one in enumerate(implicit) if one.symmetric)}
    return [func.buffer_map[func.params[place]] for place in sorted(places)]


def _refuse_views(func: tirx.PrimFunc) -> None:
    tensors = {b.data: b for b in func.buffer_map.values() if is_symmetric(b)}
    views: list[tirx.Buffer] = []
    lines: list[str] = []

    def visit(node) -> None:
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
            tensor = tensors.get(node.buffer.data, node.buffer)
            if not node.buffer.same_as(tensor):
                views.append(node.buffer)
        if views and isinstance(node, tirx.Stmt) and (line := location(node)):
            lines.append(line)

    post_order_visit(func.body, visit)
    if views:
        name = tensors[views[0].data].name
        raise LanguageError(
            f"{views[0].name} is {name} in another shape; expected accesses to {name} itself: a "
            f"symmetric tensor has no views{''.join(lines[:1])}"
        )


def _from_start(body: tirx.Stmt) -> tirx.Stmt:
    """``body`` with indices that count from the end, which are negative constants, counted from
    0."""

    def change(node):
        if not any(_is_negative(i) for i in node.indices):
            return None
        pairs = zip(node.indices, node.buffer.shape, strict=True)
        indices = [n + i if _is_negative(i) else i for i, n in pairs]
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(node.buffer, indices, node.predicate, node.span)
        store = tirx.BufferStore(node.buffer, node.value, indices, node.predicate)
        if (span := get_stmt_span(node)) is not None:
            set_stmt_span(store, span)
        return store

    return ir_transform(body, None, change, ["tirx.BufferLoad", "tirx.BufferStore"])


def _is_negative(index: tirx.PrimExpr) -> bool:
    return isinstance(index, tirx.IntImm) and int(index) < 0
