"""Turn the program's own symmetric memory into parameters that the runtime supplies."""

from __future__ import annotations

from collections.abc import Sequence

from tilelang import tvm
from tvm import tirx

from ...builtins.errors import LanguageError
from ...builtins.symmetric import (
    WORLD_SIZE,
    heap_stride,
    itemsize,
    packed_strides,
    ragged_axes,
)
from ..ir.implicit import Implicit, parameter_names, unused_name, with_implicit
from ..ir.scratch import scratch_of, with_buffers
from ..ir.walk import format_expr, location


def lift_symmetric(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Turn each ``W.alloc_symmetric`` into an implicit parameter.

    Raises:
        LanguageError: an extent is not a positive number, for example a dynamic size of a program
            that is not specialized for sizes.

    Before: ``S = W.alloc_symmetric((M, N), "bfloat16")``
    After:  ``S: W.Symmetric((M, N), "bfloat16")`` after the program's own parameters
    """
    allocations = scratch_of(func.body)
    if not allocations:
        return func
    names = _names_of_parameters(func, allocations)
    buffers = {a.buffer.data: _parameter(a, n) for a, n in zip(allocations, names, strict=True)}
    body = with_buffers(func.body, buffers, lambda allocation: tirx.Evaluate(0))
    func = func.with_body(body)
    implicit = [_implicit(a.buffer, buffers[a.buffer.data]) for a in allocations]
    return with_implicit(func, implicit, list(buffers.values()))


def _names_of_parameters(func: tirx.PrimFunc, allocations: Sequence[tirx.AllocBuffer]) -> list[str]:
    """Return the name of the parameter for each allocation: its own, unless another parameter or
    an earlier allocation, such as that of a macro called before, has it."""
    taken, own = set(parameter_names(func)), {a.buffer.name for a in allocations}
    names: list[str] = []
    for allocation in allocations:
        name = allocation.buffer.name
        names.append(unused_name(name, taken | own) if name in taken else name)
        taken.add(names[-1])
    return names


def _implicit(allocated: tirx.Buffer, parameter: tirx.Buffer) -> Implicit:
    shape, axes = tuple(int(e) for e in parameter.shape[1:]), ragged_axes(allocated)
    ragged = (shape[:axes], shape[axes:]) if axes else ()
    return Implicit(parameter.name, True, shape, str(parameter.dtype), True, *ragged)


def _parameter(allocation: tirx.AllocBuffer, name: str) -> tirx.Buffer:
    buffer = allocation.buffer
    shape = [tvm.arith.Analyzer().simplify(e) for e in buffer.shape[1:]]
    if any(not isinstance(e, tirx.IntImm) or int(e) < 1 for e in shape):
        raise LanguageError(
            f"alloc_symmetric: {buffer.name} has shape ({', '.join(map(format_expr, shape))}); "
            "expected positive constants, or dynamic extents of the parameters in a program whose "
            f"synchronization is inferred{location(allocation)}"
        )
    strides = [heap_stride(itemsize(buffer.dtype)), *packed_strides(shape)]
    return tirx.decl_buffer([WORLD_SIZE, *shape], buffer.dtype, name, strides=strides)
