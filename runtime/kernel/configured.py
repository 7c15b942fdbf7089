"""Attach ``pass_configs`` to programs and plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from ...builtins.errors import TileWeaveError
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
            f"{op}: pass_configs={dict(configs)} of {program!r}; expected them with a "
            "T.prim_func or a tw.plan"
        )
    return with_options(program, configs)
