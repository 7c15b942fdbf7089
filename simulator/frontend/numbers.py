"""Detection of the statement that makes a NaN or an infinity of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import tirx

from ...passes.ir.walk import nodes_in, op_name
from ..memory.values import is_float, numpy_dtype
from ..report.errors import SimulationError

if TYPE_CHECKING:
    from ..machine.block import Frame

Operands = list[tuple[str, Any]]
"""Names and values of what a statement has read so far."""


def literals_in(*nodes: Any) -> Operands:
    """Return the literals that are not finite."""
    calls = (call for node in nodes for call in nodes_in(node, tirx.Call))
    found = [("T.infinity", np.inf) for call in calls if op_name(call) == "tl.infinity"]
    values = (v.value for node in nodes for v in nodes_in(node, tirx.FloatImm))
    return found + [("literal", value) for value in values if not np.isfinite(value)]


def note_operand(frame: Frame, name: str, values: Any) -> None:
    """Note what the current statement has read, in the shape of its result."""
    if frame.operands is not None:
        frame.operands.append((name, values))


def note_contracted(
    frame: Frame, name: str, values: np.ndarray, axis: int, keepdims: bool = True
) -> None:
    """Note an operand of a sum or a maximum along ``axis``: its largest elements."""
    if frame.operands is not None and values.shape[axis]:
        note_operand(frame, name, np.abs(values).max(axis=axis, keepdims=keepdims))


def require_numbers(
    frame: Frame, name: str, index: Any, values: Any, active: np.ndarray | None, loc: str
) -> None:
    """Refuse to store a NaN that the statement makes of other values, or an infinity that it makes
    of finite ones.

    Args:
        index: index in ``name`` along each axis, in shapes that broadcast to that of ``values``.
        active: mask of the elements that are stored; None: all.

    Raises:
        SimulationError: ``nan``.
    """
    operands, values = frame.operands, np.asarray(values)
    if operands is None or not is_float(values.dtype):
        return
    made = ~np.isfinite(values)
    if active is not None:
        made = made & active
    if not made.any():
        return
    is_nan, shape = np.isnan(values), values.shape
    for _, operand in operands:
        operand = _beside(operand, shape)
        made &= np.where(is_nan, ~np.isnan(operand), np.isfinite(operand))
    if not made.any():
        return
    at = tuple(int(i) for i in np.argwhere(made)[0])
    place = ", ".join(str(_beside(i, shape)[at]) for i in index)
    by_thread = frame.space is None and shape[:1] == frame.mask.on.shape
    thread = f" of thread {at[0]}" if by_thread else ""
    of = ", ".join(f"{text} {_beside(operand, shape)[at]}" for text, operand in operands)
    raise SimulationError(
        "nan",
        f"{values[at]} in {name}[{place}]{thread}, made of {of or 'no operands'} by "
        f"{frame.block.place}\n --> {loc}",
    )


def _beside(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return a value for each element of ``shape``. If the shapes do not fit, that is one value
    for all, which is not finite if any is not."""
    value = np.asarray(value)
    for fitting in (value, value[..., None], np.abs(value).max()):  # as it is, for lanes, for all
        try:
            return np.broadcast_to(fitting, shape)
        except ValueError:
            pass
    raise AssertionError(shape)


def is_float_value(node: Any) -> bool:
    """Return whether an expression is a floating-point number or a vector of them."""
    return "float" in str(node.dtype) and is_float(numpy_dtype(node.dtype))
