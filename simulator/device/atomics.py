"""Atomic operations of TileLang on shared memory, and on symmetric tensors as ``make_coherent``
lowers them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
from tilelang import tvm
from tvm import tirx

from ...passes.ir.operators import SYSTEM_ATOMIC
from ..frontend.accesses import is_poisoned, of_threads
from ..frontend.builtin_ops import tilelang_atomic, vector_operand
from ..frontend.expressions import Expr
from ..frontend.functions import REDUCTIONS
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.values import convert, numpy_dtype
from ..report.errors import uninitialized, unsupported
from .shared import Source
from .statements import DeviceStatements, shared_address, to_threads

_TEMPLATE = re.compile(r"tw::system::atomic_([a-z]+)(?:x(\d))?(_ret)?<[^,]*, (\d+)>")


def _compiled(c: DeviceStatements, call: tirx.Call, loc: str) -> Any:
    """Compile the operation of TileLang that became ``call``."""
    template = _TEMPLATE.fullmatch(call.args[0].value)
    if template is None:
        raise unsupported(call.args[0].value, loc)
    kind, lanes, returns = template[1], template[2], bool(template[3])
    order = tirx.IntImm("int32", int(template[4]))
    operation = tirx.Call(call.dtype, tvm.ir.Op.get(SYSTEM_ATOMIC), [*call.args[1:], order])
    compiler = tilelang_atomic(kind, returns or kind == "load", int(lanes or 1), widened=True)
    return compiler(c, operation, loc)


def system_atomic(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    compiled = _compiled(c, call, loc)
    return compiled if isinstance(compiled, Step) else Step(compiled.value)


def _of_shared(
    c: DeviceStatements, kind: str, lanes: int, call: tirx.Call, loc: str
) -> Expr | None:
    """Compile an atomic change of each of ``lanes`` elements of shared memory."""
    buffer, _ = c.pointee(call.args[0], loc)
    if buffer.data not in c.shared:
        return None
    op = f"T.atomic_{kind}" + (f"x{lanes}" if lanes > 1 else "")
    dtype, source = numpy_dtype(buffer.dtype), Source(f"{op} of {buffer.name}", loc)
    memory, address = shared_address(c, call.args[0], op, loc)
    expr = c.compile(vector_operand(c, call.args[1], lanes, loc), loc)
    combine = REDUCTIONS.get(kind, lambda old, new: new)

    def value(frame: Frame) -> Any:
        operands = convert(expr.value(frame), dtype)
        if expr.poison is not None and is_poisoned(expr.poison(frame), frame):
            raise uninitialized(f"the operand of {source.op} is computed from", frame.block, loc)
        threads = frame.mask.threads
        rows = of_threads(operands, frame, lanes).reshape(len(threads), lanes)
        old = frame.block.shared[memory].update(
            of_threads(address(frame), frame), np.ascontiguousarray(rows), combine,
            frame.mask.group_of[threads], source,
        )  # fmt: skip
        return to_threads(old if lanes > 1 else old[:, 0], frame)

    return Expr(value)


def register(c: DeviceStatements) -> None:
    """Register the atomic operations."""
    c.shared_atomic = partial(_of_shared, c)
    c.calls[SYSTEM_ATOMIC] = _compiled
    c.steps[SYSTEM_ATOMIC] = system_atomic
