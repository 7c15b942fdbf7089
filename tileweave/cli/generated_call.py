"""Calls of a program on GPUs with the inputs of a file, or invented ones."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tilelang import tvm

from ..runtime import compile, symmetric
from ..runtime.host.session import Session
from ..runtime.plans.parameters import Parameter
from ..runtime.plans.traced_plan import TracedPlan
from ..simulator import executable_at
from ..simulator.case import Case
from ..simulator.inputs.inputs import tensor_of
from .inputs import inputs_of


class GeneratedCall:
    """Call of a kernel or plan with the inputs of ``inputs_of``. Collective."""

    def __init__(
        self,
        name: str,
        program: Any,
        session: Session,
        scalars: Mapping[str, Any],
        options: argparse.Namespace,
    ) -> None:
        ranks, rank = session.group.world_size, session.group.rank
        self._run = program
        executable = executable_at(program, ranks)
        inputs, _ = inputs_of(name, executable, scalars, options, silent=rank > 0)
        shapes = Case(executable, inputs, 1).shapes[rank]
        self._arguments = [
            inputs[rank][p.name]
            if p.shape is None
            else argument(p, shapes[p.name], inputs[rank].get(p.name), session.group.device)
            for p in executable.parameters
        ]
        if not isinstance(self._run, TracedPlan):
            self._run = compile(self._run)
        session.group.synchronize()
        session.group.meet("trace: inputs")

    def __call__(self, launch: int) -> None:
        """Enqueue one call; ``launch`` is its index."""
        self._run(*(a(launch) if callable(a) else a for a in self._arguments))


def argument(
    p: Parameter, shape: tuple[int, ...], value: np.ndarray | None, device: torch.device
) -> Any:
    """Return the tensor for a parameter, of one rank's part if it is symmetric.

    Args:
        value: its contents; None: zeros.
    """
    dtype = tvm.DataType(p.dtype).as_torch()
    if value is None:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        tensor = tensor_of(value, dtype).reshape(shape)
    if not p.symmetric:
        return tensor.to(device)
    memory = symmetric(shape, dtype)
    memory.local.copy_(tensor)
    return memory
