"""Inputs of the programs of a file: those of its function ``inputs``, or invented ones."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..builtins.errors import TileWeaveError

NAME = "inputs"
_SIGNATURE = f"{NAME}(ranks, rng)"
_FROM_FILE = f"values of {_SIGNATURE}"


def inputs_function(command: str, path: Path, module: ModuleType) -> Callable[..., Any] | None:
    """Return the function ``inputs(ranks, rng)`` of a file, or None if it has none.

    Raises:
        TileWeaveError: a function of this name has other parameters.
    """
    function = getattr(module, NAME, None)
    if not inspect.isfunction(function):
        return None
    signature = inspect.signature(function)
    try:
        signature.bind(0, None)
    except TypeError:
        raise TileWeaveError(
            f"{command}: {NAME}{signature}; expected {_SIGNATURE}, which commands call for the "
            f"inputs, or another name --> {path}:{function.__code__.co_firstlineno}"
        ) from None
    return function


def inputs_of(
    name: str,
    executable: Any,
    scalars: Mapping[str, Any],
    options: argparse.Namespace,
    silent: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the inputs of every rank, and where those of each tensor come from.

    Values of the command line precede those of the function ``inputs`` of the file; what neither
    has is invented. stderr gets the origins, except with ``--json`` or if ``silent``.

    Args:
        scalars: values of the command line, of scalars and of dynamic extents.

    Raises:
        TileWeaveError: ``inputs`` does not return one dict per rank, or a scalar has no value.
    """
    from ..simulator import described_inputs

    given = _given(executable.world_size, scalars, options)
    inputs, invented = described_inputs(executable, options.seed, scalars, given)
    tensors = [p.name for p in executable.parameters if p.shape is not None]
    origins = {p: invented.get(p, _FROM_FILE) for p in tensors if p in inputs[0]}
    if origins and not (silent or options.json):
        print(f"{options.command}: {name}: inputs: {_format(origins)}", file=sys.stderr)
    return inputs, origins


def invented_hint(origins: Mapping[str, str]) -> str:
    """Return a line that says which inputs of a faulty program were invented; "" if none were."""
    from ..simulator import INITIAL_ZEROS

    certain = _FROM_FILE, INITIAL_ZEROS
    invented = {name: origin for name, origin in origins.items() if origin not in certain}
    if not invented:
        return ""
    return (
        f"\n(invented inputs: {_format(invented)}; if the program needs others, its file may have "
        f"a function {_SIGNATURE})"
    )


def _given(
    ranks: int, scalars: Mapping[str, Any], options: argparse.Namespace
) -> list[Mapping[str, Any]] | None:
    """Return what the function ``inputs`` of the file returns, None without such a function."""
    function = options.inputs_function
    if function is None:
        return None
    names = list(inspect.signature(function).parameters)[2:]
    sizes = {name: scalars[name] for name in names if name in scalars}
    values = function(ranks, np.random.default_rng(options.seed), **sizes)
    is_list = isinstance(values, (list, tuple)) and all(isinstance(v, Mapping) for v in values)
    if not is_list or len(values) != ranks:
        place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        amount = f"{len(values)} dicts" if is_list else f"a {type(values).__name__}"
        raise TileWeaveError(
            f"{options.command}: {NAME}({ranks}, rng) returned {amount}; expected a list with "
            f"one dict per rank, {ranks} in all --> {place}"
        )
    return list(values)


def _format(origins: Mapping[str, str]) -> str:
    """Return ``zeros in F, G; random numbers in A``."""
    tensors: dict[str, list[str]] = {}
    for name, origin in origins.items():
        tensors.setdefault(origin, []).append(name)
    return "; ".join(f"{origin} in {', '.join(names)}" for origin, names in tensors.items())
