"""Inputs of the programs of a file: those of its function ``inputs``, or invented ones."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..builtins.errors import TileWeaveError

NAME = "inputs"
_SIGNATURE = f"{NAME}(ranks, rng)"
_FROM_FILE = f"values of {_SIGNATURE}"


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
        TileWeaveError: ``inputs`` has other parameters, or does not return one dict per rank; or a
            scalar has no value.
    """
    from ..simulator import described_inputs

    from_file = _inputs_of_file(executable.world_size, scalars, options)
    inputs, invented = described_inputs(executable, options.seed, scalars, from_file)
    tensors = [p.name for p in executable.parameters if p.shape is not None]
    origins = {p: invented.get(p, _FROM_FILE) for p in tensors if p in inputs[0]}
    if origins and not (silent or options.json):
        parameters = {p.name for p in executable.parameters}
        unused = sorted(set(from_file[0]) - parameters) if from_file else []
        ignored = f"; ignored: {', '.join(map(str, unused))}" if unused else ""
        print(f"{options.command}: {name}: inputs: {_format(origins)}{ignored}", file=sys.stderr)
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


def _inputs_of_file(
    ranks: int, scalars: Mapping[str, Any], options: argparse.Namespace
) -> list[Mapping[str, Any]] | None:
    """Return what the function ``inputs`` of the file returns, None without such a function."""
    function = getattr(options.module, NAME, None)
    if not inspect.isfunction(function):  # such as a list of inputs for `tw.simulate`
        return None
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    signature, rng = inspect.signature(function), np.random.default_rng(options.seed)
    sizes = [name for name in list(signature.parameters)[2:] if name in scalars]
    try:
        arguments = signature.bind(ranks, rng, **{name: scalars[name] for name in sizes})
    except TypeError as error:
        raise TileWeaveError(
            f"{options.command}: {NAME}{signature}: {error}; expected {_SIGNATURE}, and sizes of "
            f"dynamic extents (--set NAME=VALUE) --> {place}"
        ) from None
    values = function(*arguments.args, **arguments.kwargs)
    is_list = isinstance(values, (list, tuple)) and all(isinstance(v, Mapping) for v in values)
    if not is_list or len(values) != ranks:
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
