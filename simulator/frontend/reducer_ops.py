"""T.alloc_reducer: reductions over the points of a T.Parallel."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.values import accumulation_dtype, convert, is_float, numpy_dtype
from ..report.errors import uninitialized, unsupported
from .accesses import is_poisoned
from .statements import Statements
from .tile_ops import COMBINE, region


def _identity(op: str, dtype: np.dtype) -> Any:
    if op in ("max", "min"):
        if is_float(dtype):
            return dtype.type(-np.inf if op == "max" else np.inf)
        return getattr(np.iinfo(dtype), "min" if op == "max" else "max")
    return -1 if op == "bitand" else 0


def init(c: Statements, call: tirx.Call, loc: str) -> Step:
    buffer = call.args[0].args[0].buffer
    dst, dtype = region(c, call.args[0], loc), numpy_dtype(buffer.dtype)
    first = c.compile(call.args[1], loc).value if len(call.args) > 1 else None
    identity = _identity(c.reducers[buffer.data], dtype)
    return Step(
        lambda frame: dst.write(frame, first(frame) if first else identity, None, "T.reducer_init")
    )


def update(c: Statements, call: tirx.Call, loc: str) -> Step:
    load = call.args[0]
    buffer, slot = load.buffer, c.tiles[load.buffer.data]
    combine = COMBINE[c.reducers[buffer.data]]
    index = c.in_whole(buffer, c.indices(load.indices, buffer.name, loc), loc)
    expr = c.compile(call.args[1], loc)

    def run(frame: Frame):
        if frame.space is None:
            raise unsupported("T.reducer_update outside T.Parallel", loc)
        tile, space, indices = frame.tile(slot), frame.space, index(frame)
        values = expr.value(frame)
        if expr.poison is not None and is_poisoned(expr.poison(frame), frame):
            use = f"what T.reducer_update contributes to {buffer.name} is computed from"
            raise uninitialized(use, frame.block, loc)
        active = frame.on
        key = tuple(np.broadcast_to(i, space)[active] for i in indices)
        wide = tile.data.astype(accumulation_dtype(tile.dtype))
        combine.at(wide, key, np.broadcast_to(convert(values, wide.dtype), space)[active])
        tile.data[...] = convert(wide, tile.dtype)

    return c.preempted(run, call)


def finalize(c: Statements, call: tirx.Call, loc: str) -> Step:
    src, dst = region(c, call.args[0], loc), region(c, call.args[1], loc)
    op = "T.finalize_reducer"
    return Step(lambda frame: dst.write(frame, *src.read(frame, op), op))


def register(c: Statements) -> None:
    """Register the operations on reducers."""
    c.steps |= {
        "tl.tileop.reducer_init": init,
        "tl.reducer_update": update,
        "tl.tileop.finalize_reducer_v2": finalize,
    }
