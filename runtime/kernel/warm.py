"""Load a compiled program's module before its kernels overlap with others.

CUDA loads a module at its first launch, and loading may wait for running kernels: a first launch
concurrent with a spinning kernel can hang. Therefore the launch is captured once into a graph that
is discarded: CUDA loads the module, and nothing runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tilelang import tvm
from tilelang.jit import JITKernel
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ...passes.ir.walk import variables_in
from ..host.session import Session

SCALAR = 1
"""Stand-in for scalars."""
EXTENT = 128
"""Stand-in for dynamic extents; a TMA descriptor accepts it for each type."""


def warm(kernel: JITKernel, session: Session, sizes: Sequence[int] = ()) -> bool:
    """Load ``kernel`` on this GPU without running it.

    Args:
        sizes: integers of a program that the kernel computes; see ``SharedProgram``.

    Returns:
        False, with a warning, if the program refuses the stand-ins: call such a kernel once before
            overlapping it.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            kernel(*_stand_ins(kernel, session, sizes))
    except Exception as error:
        name = kernel.prim_func.attrs["global_symbol"]
        warnings.warn(
            f"tileweave: {name} could not be loaded ahead of its first call ({error}); call it "
            "once before overlapping it with other kernels",
            stacklevel=3,
        )
        return False
    return True


def _stand_ins(kernel: JITKernel, session: Session, sizes: Sequence[int]) -> list[Any]:
    """Return arguments of the right types; the kernel never accesses their memory."""
    func = kernel.prim_func
    outputs = {i % len(func.params) for i in kernel.out_idx or ()}
    scalars = {p: tirx.IntImm(p.dtype, SCALAR) for p in func.params if "int" in str(p.dtype)}
    if sizes:
        own = [p for p in func.params if isinstance(p, tirx.SizeVar)]
        scalars |= {p: tirx.IntImm(p.dtype, n) for p, n in zip(own, sizes, strict=True)}
    arguments: list[Any] = []
    for index, parameter in enumerate(func.params):
        if index in outputs:
            continue
        buffer = func.buffer_map.get(parameter)
        if buffer is None:
            arguments.append(int(scalars.get(parameter, SCALAR)))
            continue
        tensor = torch.empty(
            0, dtype=kernel.params[index].torch_dtype(), device=session.group.device
        )
        shape, strides = (
            [_extent(e, scalars) for e in es] for es in (buffer.shape, buffer.strides)
        )
        arguments.append(tensor.set_(session.heap.unchecked_storage, 0, shape, strides))
    return arguments


def _extent(expr: Any, scalars: dict[tirx.Var, tirx.PrimExpr]) -> int:
    """Return ``expr`` with each symbol replaced by its stand-in."""
    symbols = {v: scalars.get(v, tirx.IntImm(v.dtype, EXTENT)) for v in variables_in(expr)}
    return int(tvm.arith.Analyzer().simplify(substitute(expr, symbols)))
