"""Atomic operations of TileLang on symmetric tensors, as ``widen_atomics`` lowers them."""

from __future__ import annotations

import re
from typing import Any

from tilelang import tvm
from tvm import tirx

from ...passes.device.widen_atomics import SYSTEM_ATOMIC
from ..frontend.builtin_ops import element_atomic, vector_atomic
from ..machine.steps import Step
from ..report.errors import unsupported
from .statements import DeviceStatements

_TEMPLATE = re.compile(r"tw::system::atomic_([a-z]+)(?:x(\d))?(_ret)?<[^,]*, (\d+)>")


def _compiled(c: DeviceStatements, call: tirx.Call, loc: str) -> Any:
    """Compile the operation of TileLang that became ``call``."""
    template = _TEMPLATE.fullmatch(call.args[0].value)
    if template is None:
        raise unsupported(call.args[0].value, loc)
    kind, lanes, returns = template[1], template[2], bool(template[3])
    order = tirx.IntImm("int32", int(template[4]))
    operation = tirx.Call(call.dtype, tvm.ir.Op.get(SYSTEM_ATOMIC), [*call.args[1:], order])
    if lanes is not None:
        return vector_atomic(int(lanes), returns, widened=True)(c, operation, loc)
    return element_atomic(kind, returns or kind == "load", widened=True)(c, operation, loc)


def system_atomic(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    compiled = _compiled(c, call, loc)
    return compiled if isinstance(compiled, Step) else Step(compiled.value)


def register(c: DeviceStatements) -> None:
    """Register the atomic operations."""
    c.calls[SYSTEM_ATOMIC] = _compiled
    c.steps[SYSTEM_ATOMIC] = system_atomic
