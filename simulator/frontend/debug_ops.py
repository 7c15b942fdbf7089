"""Debugging operations: T.print and T.device_assert."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from ..machine.block import Frame
from ..machine.steps import Step
from ..report.errors import SimulationError
from . import external
from .accesses import is_poisoned
from .statements import Statements


def call_extern(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile T.print, which TileLang lowers to these external functions, and others."""
    name = str(call.args[0].value)
    if name not in ("debug_print_var", "debug_print_buffer_value", "debug_print_msg"):
        return external.call_extern(c, call, loc)
    texts = [a.value for a in call.args[1:] if isinstance(a, tirx.StringImm)]
    values = [c.compile(a, loc) for a in call.args[1:] if not isinstance(a, tirx.StringImm)]

    def run(frame: Frame):
        parts = [text for text in texts if text]
        parts += [_text(e.value(frame), e.poison and e.poison(frame), frame) for e in values]
        place = f"{frame.block.place}"
        frame.block.machine.printed.append(f"{', '.join(parts)}: {place} --> {loc}")

    return c.preempted(run, call)


def _text(value: Any, poison: Any, frame: Frame) -> str:
    if is_poisoned(poison, frame):
        return "(uninitialized memory)"
    if isinstance(value, np.ndarray) and value.shape == frame.mask.on.shape:
        value = value[frame.mask.on]
        value = value[0] if (value == value[0]).all() else value
    return str(value)


def device_assert(c: Statements, call: tirx.Call, loc: str) -> Step:
    holds = c.condition(call.args[0], loc)
    text, *lines = call.args[1].value.splitlines() if len(call.args) > 1 else ("T.device_assert",)
    location = "\n".join([*lines, f" --> {loc}"])
    """TileLang's message ends with the location of the assertion."""

    def run(frame: Frame):
        holding, active = holds(frame), frame.lanes()
        if isinstance(holding, np.ndarray) and active is not None and holding.shape == active.shape:
            holding = holding | ~active
        if not np.all(holding):
            raise SimulationError(
                "assertion",
                f"{text}, by {frame.block.place}\n{location}",
            )

    return c.preempted(run, call)


def register(c: Statements) -> None:
    """Register the debugging operations."""
    c.steps["tirx.call_extern"] = c.steps["tirx.call_pure_extern"] = call_extern
    c.calls["tirx.call_extern"] = c.calls["tirx.call_pure_extern"] = external.extern_value
    c.steps["tl.device_assert"] = c.steps["tl.device_assert_with_msg"] = device_assert
