"""Checked CUDA driver calls: an error names the call, the rank and the stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ...builtins.errors import TileWeaveError


class DriverError(TileWeaveError, RuntimeError):
    """A CUDA driver call failed."""


def driver() -> Any:
    """Return ``cuda.bindings.driver``.

    Raises:
        DriverError: the package is missing.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise DriverError(
            "tileweave: the Python package cuda-bindings is missing; expected cuda-bindings 12 "
            "or 13 beside torch (pip install cuda-bindings)"
        ) from error
    return bindings


def function(name: str, stream: int | None = None) -> Callable[..., Any]:
    """Return the checked driver function ``name``, for several calls; see ``call``."""
    bindings = driver()
    unchecked, success = getattr(bindings, name), bindings.CUresult.CUDA_SUCCESS

    def checked(*args: Any) -> Any:
        status, *result = unchecked(*args)
        if status != success:
            raise failure(name, args, status, stream)
        if not result:
            return None
        return result[0] if len(result) == 1 else tuple(result)

    return checked


def failure(name: str, args: Sequence[Any], status: Any, stream: int | None) -> DriverError:
    """Return the error of a driver function that has returned ``status``, a ``CUresult``."""
    place = f"rank {os.environ.get('RANK', '0')}"
    if stream is not None:
        place += f", stream {stream:#x}"
    arguments = ", ".join(hex(a) if isinstance(a, int) else type(a).__name__ for a in args)
    return DriverError(f"{name}({arguments}): {status.name} on {place}; expected CUDA_SUCCESS")


def call(name: str, *args: Any, stream: int | None = None) -> Any:
    """Call the driver function ``name`` and return its result, without the status.

    Raises:
        DriverError: the call's status is not CUDA_SUCCESS.
    """
    return function(name, stream)(*args)
