"""General checks of arguments, and the errors that refuse them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

import torch

from ...builtins.errors import TileWeaveError
from ...builtins.symmetric import packed_strides
from .caller import CALLER, warn_caller

ALIGNMENT = 16
"""Alignment in bytes that the TMA requires of the base address and of each row."""
_BOOLS = (bool, torch.SymBool)
"""Types of options that are on or off. ``torch.compile`` passes symbols for dynamic extents."""
_warned: set[tuple[str, str, str]] = set()


def refused(op: str, what: str, expected: str) -> TileWeaveError:
    """Return the error for an illegal argument.

    Args:
        what: its name and value.
        expected: what is legal.
    """
    return TileWeaveError(f"{op}: {what}; expected {expected}")


def operator_name(caller: str, op: Any, names: Iterable[str]) -> str:
    """Return the name of an operator, which may be passed instead of the operator.

    Args:
        caller: function that needs the name, for the error.

    Raises:
        TileWeaveError: the operator is not in ``names``.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in names:
        raise TileWeaveError(f"{caller}: op={name}; expected {' or '.join(names)}")
    return name


def require_like(
    op: str, name: str, tensor: torch.Tensor, first: str, a: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Refuse a tensor of another type or device than ``a``, which users call ``first``.

    Args:
        dtype: expected type; None for that of ``a``.
    """
    expected = dtype or a.dtype
    if tensor.dtype != expected:
        legal = f"{expected} as {first}" if expected == a.dtype else f"{expected}"
        raise refused(op, f"{name} is of {tensor.dtype}", legal)
    if tensor.device != a.device:
        raise refused(op, f"{name} is on {tensor.device}", f"{a.device} as {first}")


def is_dense(value: Any) -> bool:
    """Return whether the value is a dense tensor."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def require_dense(op: str, **tensors: Any) -> None:
    """Refuse arguments that are not ``is_dense``; keywords are their names."""
    for name, tensor in tensors.items():
        if not is_dense(tensor):
            is_tensor = isinstance(tensor, torch.Tensor)
            what = f" has layout {tensor.layout}" if is_tensor else f"={reprlib.repr(tensor)}"
            raise refused(op, f"{name}{what}", "a dense torch.Tensor")


def require_dense_or_none(op: str, **tensors: Any) -> None:
    """Apply ``require_dense`` to the arguments that are not None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            require_dense(op, **{name: tensor})


def require_bools(op: str, **flags: Any) -> None:
    """Refuse options that are not bool; keywords are their names. Python would take "no" as
    true."""
    for name, value in flags.items():
        if not isinstance(value, _BOOLS):
            raise refused(op, f"{name}={reprlib.repr(value)}", "True or False")


def check_layout(op: str, out: torch.Tensor, name: str = "out") -> None:
    """Refuse a result that kernels cannot write."""
    if not is_contiguous_and_aligned(out):
        raise refused(
            op, f"{name} has strides {out.stride()} and begins at {out.data_ptr():#x}",
            f"a contiguous tensor that begins at a multiple of {ALIGNMENT} bytes",
        )  # fmt: skip


def require_no_overlap(
    op: str, out: torch.Tensor, /, result: str = "out", **tensors: torch.Tensor | None
) -> None:
    """Refuse a result that overlaps an argument in memory: it is written while the argument is
    read."""
    for name, x in tensors.items():
        if x is not None and shares_memory(out, x):
            raise refused(op, f"{result} shares memory with {name}", "memory of its own")


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two contiguous tensors overlap in memory."""
    return y.data_ptr() < x.data_ptr() + x.nbytes and x.data_ptr() < y.data_ptr() + y.nbytes


def as_kernel_operand(op: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an argument, or a copy if kernels cannot read it; warn of the first copy."""
    if is_contiguous_and_aligned(tensor):
        return with_packed_strides(tensor)
    caller = CALLER.get() or op
    if (caller, op, name) not in _warned:
        _warned.add((caller, op, name))
        argument = name if caller == op else f"{name} of {op}"
        warn_caller(
            f"{caller}: {argument} of shape {tuple(tensor.shape)} has strides {tensor.stride()} "
            f"and begins at {tensor.data_ptr():#x}; it is copied in each call, as it is not "
            f"contiguous from a multiple of {ALIGNMENT} bytes on"
        )
    return tensor.clone(memory_format=torch.contiguous_format)


def is_contiguous_and_aligned(tensor: torch.Tensor) -> bool:
    """Return whether kernels can read and write the tensor as it is."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def with_packed_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with packed strides, also along axes of extent 1, where torch
    allows any stride."""
    if 1 not in tensor.shape:
        return tensor
    return tensor.as_strided(tensor.shape, packed_strides(tuple(tensor.shape)))
