"""Load a compiled program's module before anything overlaps.

CUDA loads a module at its first launch, and loading may wait for kernels that run: a first launch
beside a kernel that spins can hang. So the launch is recorded once, into a graph that is thrown
away: everything is loaded, nothing runs.
"""

from __future__ import annotations

from typing import Any

import torch
from tilelang.jit import JITKernel
from tvm import tirx

from .session import Session


def warm(kernel: JITKernel, session: Session) -> bool:
    """Load ``kernel`` on this GPU without running it.

    Returns:
        False if that needs sizes that only a call knows: call such a kernel once before overlapping
            it.
    """
    arguments = _stand_ins(kernel, session)
    if arguments is None:
        return False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        kernel(*arguments)
    return True


def _stand_ins(kernel: JITKernel, session: Session) -> list[Any] | None:
    """Arguments of the right types that are never looked at; None where shapes are symbolic."""
    func = kernel.prim_func
    outputs = {i % len(func.params) for i in kernel.out_idx or ()}
    arguments: list[Any] = []
    for index, parameter in enumerate(func.params):
        if index in outputs:
            continue
        buffer = func.buffer_map.get(parameter)
        if buffer is None:
            arguments.append(0)
            continue
        if not all(isinstance(e, tirx.IntImm) for e in (*buffer.shape, *buffer.strides)):
            return None
        tensor = torch.empty(
            0, dtype=kernel.params[index].torch_dtype(), device=session.group.device
        )
        arguments.append(
            tensor.set_(
                session.heap.unchecked_storage,
                0,
                [int(e) for e in buffer.shape],
                [int(e) for e in buffer.strides],
            )
        )
    return arguments
