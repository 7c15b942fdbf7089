"""Attach ``pass_configs`` to programs and plans; get the programs of TileLang's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelang.jit import JITImpl, JITKernel
from tvm import tirx

from ...builtins.errors import TileWeaveError, short_repr
from ...passes import with_options
from ..plans.traced_plan import TracedPlan


def configured(op: str, program: Any, configs: Mapping[str, Any] | None) -> Any:
    """Return ``program`` with the options in ``configs``; a plan gets them for all kernels.

    Raises:
        TileWeaveError: an option is unknown, or ``program`` is neither a program nor a plan.
    """
    if not configs:
        return program
    if isinstance(program, TracedPlan):
        return program.with_configs(configs)
    if not isinstance(program, tirx.PrimFunc):
        raise TileWeaveError(
            f"{op}: pass_configs={dict(configs)} of {short_repr(program)}; expected them with a "
            "T.prim_func or a tw.plan"
        )
    return with_options(program, configs)


def program_of(op: str, program: Any, sizes: Mapping[str, Any] | None = None) -> Any:
    """Return the ``T.prim_func`` of a kernel of TileLang, or of a function of ``tilelang.jit`` with
    the arguments ``sizes``, with its ``pass_configs``; other programs are returned unchanged.

    Raises:
        TileWeaveError: an argument of the function is missing, unknown or illegal; or ``program``
            is no function.
    """
    if not isinstance(program, JITImpl):
        if sizes:
            raise TileWeaveError(
                f"{op}: sizes={dict(sizes)}; expected them with a function of tilelang.jit, and "
                "dynamic extents in inputs"
            )
        is_kernel = isinstance(program, JITKernel)
        return configured(op, program.prim_func, program.pass_configs) if is_kernel else program
    name = program.func.__name__
    try:
        func = program.get_tir(**(sizes or {}))
    except (TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise TileWeaveError(
            f"{op}: {name}: {text}; expected sizes (--set NAME=VALUE on the command line) with the "
            f"arguments of {name}{program.signature} that are no tensors"
        ) from error
    return configured(op, func, program.pass_configs)
