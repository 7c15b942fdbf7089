"""Debugging operations: T.print and T.device_assert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import tirx

from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.shadow import text_of_region
from ..report.errors import SimulationError
from . import external
from .expressions import Expr
from .statements import Statements


def call_extern(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile T.print, which TileLang lowers to these external functions, and others."""
    name = str(call.args[0].value)
    if name not in ("debug_print_var", "debug_print_buffer_value", "debug_print_msg"):
        return external.call_extern(c, call, loc)
    texts = [a.value for a in call.args[1:] if isinstance(a, tirx.StringImm)]
    values = [c.compile(a, loc) for a in call.args[1:] if not isinstance(a, tirx.StringImm)]
    if name == "debug_print_buffer_value":
        return c.preempted(_print_row(c, *texts, *values, loc), call)

    def run(frame: Frame):
        parts = [_text(*_active(e, frame)) for e in values]
        print_line(frame, [text for text in texts if text] + parts, loc)

    return c.preempted(run, call)


def _print_row(
    c: Statements, message: str, tensor: str, number: Expr, element: Expr, loc: str
) -> Callable[[Frame], None]:
    """Print a row of a buffer at its last element. T.print calls this for each element."""
    node = c.node()

    def run(frame: Frame):
        *outer, columns = c.extents.get(tensor) or frame.block.tensors[tensor].shape
        at, row = int(number.value(frame)), frame.block.printing.setdefault(node, [])
        row.append(_active(element, frame))
        if (at + 1) % columns:
            return
        key = (*map(int, np.unravel_index(at // columns, outer)), slice(0, columns))
        count = max(len(values) for values, _ in row)
        of_threads = zip(*(np.broadcast_to(_texts(*pair), count) for pair in row), strict=True)
        rows = [f"[{', '.join(texts)}]" for texts in of_threads]
        differs = len(set(rows)) > 1
        for thread, text in zip(frame.mask.threads, rows if differs else rows[:1], strict=False):
            who = [f"thread {thread}"] if differs else []
            region = f"{tensor}{text_of_region(key)}"
            print_line(frame, [message, *who, region, text], loc)
        row.clear()

    return run


def print_line(frame: Frame, parts: list[str], loc: str) -> None:
    """Print these texts, with the block and the line, at the end of the schedule."""
    text = ", ".join(part for part in parts if part)
    frame.block.machine.printed.append(f"{text}: {frame.block.place} --> {loc}")


def _active(expr: Expr, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of the active threads and their poison, or those that all threads have."""
    value = np.asarray(expr.value(frame))
    poison = expr.poison(frame) if expr.poison else None
    poison = np.broadcast_to(False if poison is None else poison, value.shape)
    if value.shape[:1] == frame.mask.on.shape:
        return value[frame.mask.on], poison[frame.mask.on]
    return value.reshape(1, *value.shape), poison.reshape(1, *value.shape)


def _texts(values: np.ndarray, poison: np.ndarray) -> list[str]:
    pairs = zip(values, poison, strict=True)
    return ["(uninitialized memory)" if np.any(bad) else str(value) for value, bad in pairs]


def _text(values: np.ndarray, poison: np.ndarray) -> str:
    texts = _texts(values, poison)
    return texts[0] if len(set(texts)) == 1 else f"[{' '.join(texts)}]"


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
