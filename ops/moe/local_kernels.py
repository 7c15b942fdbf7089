"""Kernels of one GPU, which belong to no group: they are compiled once in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...codegen.compile import compile_by_tilelang
from ...runtime.host.cache_folder import require_private_cache
from ...runtime.kernel.kernel import capturing, launch_of
from ..core.checks import refused


class LocalKernel(NamedTuple):
    """Kernel of one GPU in a plan's operations.

    Attributes:
        launch: function that launches it.
    """

    launch: Callable[..., Any]


_KERNELS: dict[tuple, Callable[..., Any]] = {}
"""Functions that launch compiled kernels, by the function that builds the program and its
arguments."""


def compiled(op: str, build: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function that launches the program that ``build(*arguments)`` returns.

    Raises:
        TileWeaveError: it is not compiled yet, and a CUDA graph is being captured. ``op`` names
            the operator.
    """
    key = build, *arguments
    if key not in _KERNELS:
        if capturing():
            expected = "one call before it is captured in a CUDA graph"
            raise refused(op, "not compiled yet", expected)
        require_private_cache()
        _KERNELS[key] = launch_of(compile_by_tilelang(build(*arguments), target="cuda"))
    return _KERNELS[key]
