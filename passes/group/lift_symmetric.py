"""Turn the program's own symmetric memory into parameters that the runtime supplies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tilelang.language as T
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ...builtins.ragged import ANNOUNCED
from ...builtins.spec import builtin_of
from ...builtins.symmetric import (
    WORLD_SIZE,
    heap_stride,
    itemsize,
    packed_strides,
    ragged_axes,
    scratch_buffer,
)
from ..ir.implicit import Implicit, parameter_names, unused_name, with_implicit
from ..ir.ragged import counts_name, totals_name
from ..ir.scratch import scratch_of, with_buffers
from ..ir.walk import format_expr, location, op_name


def lift_symmetric(func: tirx.PrimFunc, world_size: int) -> tirx.PrimFunc:
    """Turn each ``W.alloc_symmetric`` and ``W.alloc_ragged`` into implicit parameters.

    A ragged tensor ``S``, which holds the rows, has two more parameters:

    - ``S_announced`` holds two words for each segment: the announced rows of this launch, and the
      announced elements of all launches so far, modulo 2^32. If readers wait for tiles of rows,
      ``infer_sync`` adds a word for each further tile.
    - ``S_total`` is local to the writer. It keeps the other words of each segment, so that no
      counter is reset between launches.

    Raises:
        LanguageError: an extent is not a positive number, for example a dynamic size of a program
            that is not specialized for sizes.

    Before: ``S = W.alloc_ragged(E, rows=R, row=N); T.tileweave.announce(S[dst, e, me, 0, 0], n);
    T.tileweave.announced(S[me, e, s, 0, 0])``
    After:  ``S_total: T.Tensor((W, E, 1), "uint32"); S_announced: W.Symmetric((E, W, 2),
    "uint32"); S: W.Symmetric((E, W, R, N))`` after the program's own parameters;
    ``T.tileweave.announce(S_announced[dst, e, me, 0], n, S_total[dst, e, 0], R, N, R);
    T.Cast("int32", S_announced[me, e, s, 0])``
    """
    allocations = scratch_of(func.body)
    if not allocations:
        return func
    ragged = _ragged_of(func, allocations, world_size)
    declared = [
        (allocation, buffer)
        for allocation in allocations
        for buffer in _tensors_of(allocation.buffer, ragged)
    ]
    taken = {*parameter_names(func), *(tensor.totals.name for tensor in ragged.values())}
    names = _names_of_parameters([buffer for _, buffer in declared], taken)
    parameters = {
        buffer.data: _parameter(buffer, name, location(allocation))
        for (allocation, buffer), name in zip(declared, names, strict=True)
    }
    lifted = {
        a.buffer.data: parameters[_tensors_of(a.buffer, ragged)[-1].data] for a in allocations
    }
    body = _with_announcements(func.body, ragged, parameters)
    func = func.with_body(with_buffers(body, lifted, lambda allocation: tirx.Evaluate(0)))
    totals = [tensor.totals for tensor in ragged.values()]
    implicit = [Implicit(b.name, False, tuple(map(int, b.shape)), str(b.dtype)) for b in totals]
    implicit += [_implicit(buffer, parameters[buffer.data]) for _, buffer in declared]
    return with_implicit(func, implicit, [*totals, *parameters.values()])


@dataclass(frozen=True)
class _Ragged:
    """Memory of one ragged tensor.

    Attributes:
        axes: number of axes after the rank axis that select a segment.
    """

    axes: int
    counts: tirx.Buffer
    rows: tirx.Buffer
    totals: tirx.Buffer


def _ragged_of(
    func: tirx.PrimFunc, allocations: Sequence[tirx.AllocBuffer], world_size: int
) -> dict[tirx.Var, _Ragged]:
    """Return the ragged tensors by their data pointers. Their names and those of their counts and
    totals differ from all parameters and other allocations."""
    buffers = [a.buffer for a in allocations]
    taken = {*parameter_names(func), *(b.name for b in buffers if not ragged_axes(b))}
    ragged = {}
    for buffer in filter(ragged_axes, buffers):
        name = buffer.name
        while not taken.isdisjoint(new := (name, counts_name(name), totals_name(name))):
            name += "_"
        taken.update(new)
        ragged[buffer.data] = _memory_of(buffer, name, world_size)
    return ragged


def _memory_of(buffer: tirx.Buffer, name: str, world_size: int) -> _Ragged:
    shape, source = list(buffer.shape), ragged_axes(buffer)
    segments = shape[1:source]
    shape[source] = tirx.IntImm("int32", world_size)
    rows = tirx.decl_buffer(shape, buffer.dtype, name, scope=buffer.scope())
    counts = [WORLD_SIZE, *segments, world_size, 2]
    totals = [world_size, *map(int, segments), 1]
    return _Ragged(
        source,
        scratch_buffer(counts, "uint32", counts_name(name)),
        rows,
        tirx.decl_buffer(totals, "uint32", totals_name(name), strides=packed_strides(totals)),
    )


def _tensors_of(buffer: tirx.Buffer, ragged: Mapping[tirx.Var, _Ragged]) -> list[tirx.Buffer]:
    """Return the symmetric memory of an allocation; its elements are in the last tensor."""
    tensor = ragged.get(buffer.data)
    return [buffer] if tensor is None else [tensor.counts, tensor.rows]


def _with_announcements(
    body: tirx.Stmt,
    ragged: Mapping[tirx.Var, _Ragged],
    parameters: Mapping[tirx.Var, tirx.Buffer],
) -> tirx.Stmt:
    """Give the operands in ``ragged`` of the builtins for announcements their counts and totals."""

    def change(call: tirx.Call) -> tirx.Call | None:
        spec = builtin_of(call)
        if op_name(call) == ANNOUNCED:
            ref = call.args[0]
            tensor = ragged[ref.buffer.data]
            word = [*ref.indices[: 1 + tensor.axes], 0]
            return tirx.Cast("int32", tirx.BufferLoad(parameters[tensor.counts.data], word))
        if spec is None or not spec.announces:
            return None
        ref = call.args[0].args[0]
        tensor = ragged[ref.buffer.data]
        segment = list(ref.indices[: 1 + tensor.axes])
        words = tirx.BufferLoad(parameters[tensor.counts.data], [*segment, 0])
        total = tirx.BufferLoad(tensor.totals, [*segment[:-1], 0])
        arguments = list(call.args)
        arguments[0] = T.access_ptr(words, "w", extent=2)
        arguments[len(spec.operands) + spec.implicit.index("total")] = T.access_ptr(total, "rw")
        return tirx.Call(call.dtype, call.op, arguments, annotations=call.annotations)

    return ir_transform(body, None, change, ["tirx.Call"]) if ragged else body


def _names_of_parameters(buffers: Sequence[tirx.Buffer], taken: set[str]) -> list[str]:
    """Return the name of the parameter for each allocated buffer: its own, unless another parameter
    or an earlier allocation, such as that of a macro called before, has it."""
    taken, own = {*taken}, {buffer.name for buffer in buffers}
    names: list[str] = []
    for buffer in buffers:
        name = buffer.name
        names.append(unused_name(name, taken | own) if name in taken else name)
        taken.add(names[-1])
    return names


def _implicit(allocated: tirx.Buffer, parameter: tirx.Buffer) -> Implicit:
    shape, axes = tuple(int(e) for e in parameter.shape[1:]), ragged_axes(allocated)
    ragged = (shape[:axes], shape[axes:]) if axes else ()
    return Implicit(parameter.name, True, shape, str(parameter.dtype), True, *ragged)


def _parameter(buffer: tirx.Buffer, name: str, place: str) -> tirx.Buffer:
    shape = [tvm.arith.Analyzer().simplify(e) for e in buffer.shape[1:]]
    if any(not isinstance(e, tirx.IntImm) or int(e) < 1 for e in shape):
        raise LanguageError(
            f"alloc_symmetric: {buffer.name} has shape ({', '.join(map(format_expr, shape))}); "
            "expected positive constants, or dynamic extents of the parameters in a program whose "
            f"synchronization is inferred{place}"
        )
    strides = [heap_stride(itemsize(buffer.dtype)), *packed_strides(shape)]
    return tirx.decl_buffer([WORLD_SIZE, *shape], buffer.dtype, name, strides=strides)
