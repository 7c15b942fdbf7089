"""Schemas of torch operators: the positions that an operator writes, and the types of arguments."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import _C

from ...builtins.errors import TileWeaveError
from .checks import refused
from .registry import OPERATORS

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((torch.Tensor,), "a torch.Tensor"),
    "bool": ((bool, torch.SymBool), "True or False"),
    "int": ((numbers.Integral, torch.SymInt), "an integer"),
    "float": ((numbers.Real, torch.SymInt, torch.SymFloat), "a number"),
    "str": ((str,), "a string"),
    "ScalarType": ((torch.dtype,), "a torch.dtype"),
}
"""Python types that each type of a schema accepts, and their names in errors."""


class Parameter(NamedTuple):
    """Parameter of a schema.

    Attributes:
        types: Python types of its arguments.
        legal: the same types, for errors.
        is_written: whether the operator writes the argument.
    """

    name: str
    types: tuple[type, ...]
    legal: str
    is_written: bool


@cache
def parameters_of(schema: str) -> tuple[Parameter, ...]:
    """Return the parameters of an operator's schema."""
    parameters = []
    for argument in _C.parse_schema(f"tileweave::{schema}").arguments:
        name, alias = str(argument.real_type), argument.alias_info
        optional = name.startswith("Optional[")
        types, legal = _TYPES[name[len("Optional[") : -1] if optional else name]
        if optional:
            types, legal = (*types, type(None)), f"{legal} or None"
        written = alias is not None and alias.is_write
        parameters.append(Parameter(argument.name, types, legal, written))
    return tuple(parameters)


def caller_of(name: str) -> str:
    """Return the public operator that calls the torch operator ``name``, such as ``all_gather`` for
    ``all_gather_out``."""
    return max((op for op in OPERATORS if name.startswith(op)), key=len, default=name)


def type_mismatch(
    op: str, parameters: Sequence[Parameter], args: Sequence[Any]
) -> TileWeaveError | None:
    """Return the error for the first argument that its parameter does not accept, if any.

    Args:
        op: operator that the error names.
    """
    for parameter, value in zip(parameters, args, strict=True):
        if not isinstance(value, parameter.types):
            return refused(op, f"{parameter.name}={reprlib.repr(value)}", parameter.legal)
    return None
