"""Threads that execute the points of a T.Parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import tirx

from ...passes.ir.walk import nodes_in, variables_in
from ..memory.threads import ParallelLoop

if TYPE_CHECKING:
    from ..machine.block import Frame
    from .expressions import Expressions

_UNKNOWN = None, None


def executors_of(
    c: Expressions, stmt: tirx.For, inner: tirx.Stmt, loc: str
) -> Callable[[Frame], tuple[ParallelLoop | None, np.ndarray | None]]:
    """Return a function of the ``loop`` and the ``loop_points`` of the frame of a T.Parallel.

    The layout of a fragment decides which threads execute the points that access it. It is not
    known here. The elements of a fragment are assigned to threads like the points of a T.Parallel
    of its shape, so that equal elements of fragments of one shape have the same thread.

    Args:
        inner: the body of the nest of loops.
    """
    if stmt.annotations:
        return lambda frame: _UNKNOWN
    accesses = nodes_in(inner, tirx.BufferLoad, tirx.BufferStore)
    fragments = [access for access in accesses if access.buffer.scope() == "local.fragment"]
    if not fragments:
        return lambda frame: (frame.mask.loop(frame.space), None)
    access = _covering(fragments, stmt, inner)
    if access is None:
        return lambda frame: _UNKNOWN
    shape = tuple(int(n) for n in access.buffer.shape)
    long_axes = tuple(n for n in shape if n != 1)
    index = c.indices(access.indices, access.buffer.name, loc)

    def executors(frame: Frame) -> tuple[ParallelLoop | None, np.ndarray | None]:
        elements: Any = 0
        for i, extent in zip(index(frame), shape, strict=True):
            elements = elements * extent + i
        return frame.mask.loop(long_axes), np.broadcast_to(elements, frame.space)

    return executors


def _covering(fragments: list[Any], stmt: tirx.For, inner: tirx.Stmt) -> Any:
    """Return an access of a fragment whose index has all variables of the T.Parallel; None if there
    is none, or several that differ."""
    variables, nest = [], stmt
    while not nest.same_as(inner):
        variables.append(nest.loop_var)
        nest = nest.body
    own = {node.loop_var for node in nodes_in(inner, tirx.For)}
    own |= {node.var for node in nodes_in(inner, tirx.Bind)}
    covering = {}
    for access in fragments:
        used = {v for i in access.indices for v in variables_in(i)}
        if used.issuperset(variables):
            if used & own or any(nodes_in(i, tirx.BufferLoad, tirx.Call) for i in access.indices):
                return None
            shape = tuple(int(n) for n in access.buffer.shape)
            covering.setdefault((shape, str(list(access.indices))), access)
    return next(iter(covering.values())) if len(covering) == 1 else None
