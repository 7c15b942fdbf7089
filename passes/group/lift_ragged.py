"""Give each ragged tensor the memory for its announcements."""

from __future__ import annotations

import tilelang.language as T
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.ragged import ANNOUNCED
from ...builtins.spec import builtin_of
from ...builtins.symmetric import WORLD_SIZE, packed_strides, ragged_axes, scratch_buffer
from ..ir.implicit import Implicit, parameter_names, with_implicit
from ..ir.ragged import counts_name, totals_name
from ..ir.scratch import scratch_of, with_buffers
from ..ir.walk import flatten, op_name, with_span_of


def lift_ragged(func: tirx.PrimFunc, world_size: int) -> tirx.PrimFunc:
    """Allocate two tensors beside each ``W.alloc_ragged``, which holds the rows.

    - ``S_announced`` holds two words for each segment: the announced rows of this launch, and the
      announced elements of all launches so far, modulo 2^32. If readers wait for tiles of rows,
      ``infer_sync`` adds a word for each further tile.
    - ``S_total`` is local to the writer. It keeps the other words of each segment, so that no
      counter is reset between launches.

    Before: ``S = W.alloc_ragged(E, rows=R, row=N); T.tileweave.announce(S[dst, e, me, 0, 0], n);
    T.tileweave.announced(S[me, e, s, 0, 0])``
    After:  ``S_announced = W.alloc_symmetric((E, W, 2), "uint32");
    S = W.alloc_symmetric((E, W, R, N)); T.tileweave.announce(S_announced[dst, e, me, 0], n,
    S_total[dst, e, 0], R, N, R); T.Cast("int32", S_announced[me, e, s, 0])``
    """
    ragged = [a.buffer for a in scratch_of(func.body) if ragged_axes(a.buffer)]
    if not ragged:
        return func
    axes = {b.data: ragged_axes(b) for b in ragged}
    names = _names_of_rows(func, ragged)
    rows = {b.data: _rows(b, world_size, names[b.data]) for b in ragged}
    counts = {b.data: _counts(b, world_size, names[b.data]) for b in ragged}
    totals = {b.data: _totals(b, world_size, names[b.data]) for b in ragged}

    def change(call: tirx.Call) -> tirx.Call | None:
        spec = builtin_of(call)
        if op_name(call) == ANNOUNCED:
            ref = call.args[0]
            word = [*ref.indices[: 1 + axes[ref.buffer.data]], 0]
            return tirx.Cast("int32", tirx.BufferLoad(counts[ref.buffer.data], word))
        if spec is None or not spec.announces:
            return None
        ref = call.args[0].args[0]
        segment = list(ref.indices[: 1 + axes[ref.buffer.data]])
        words = tirx.BufferLoad(counts[ref.buffer.data], [*segment, 0])
        total = tirx.BufferLoad(totals[ref.buffer.data], [*segment[:-1], 0])
        arguments = list(call.args)
        arguments[0] = T.access_ptr(words, "w", extent=2)
        arguments[len(spec.operands) + spec.implicit.index("total")] = T.access_ptr(total, "rw")
        return tirx.Call(call.dtype, call.op, arguments, annotations=call.annotations)

    def allocate(old: tirx.AllocBuffer) -> tirx.Stmt:
        data = old.buffer.data
        new = [tirx.AllocBuffer(b[data], old.annotations) for b in (counts, rows)]
        return flatten([with_span_of(old, stmt) for stmt in new])

    body = ir_transform(func.body, None, change, ["tirx.Call"])
    func = func.with_body(with_buffers(body, rows, allocate))
    implicit = [
        Implicit(b.name, False, tuple(map(int, b.shape)), str(b.dtype)) for b in totals.values()
    ]
    return with_implicit(func, implicit, list(totals.values()))


def _names_of_rows(func: tirx.PrimFunc, ragged: list[tirx.Buffer]) -> dict[tirx.Var, str]:
    """Return names by which the rows, announcements and totals differ from all parameters and
    allocations."""
    others = [a.buffer.name for a in scratch_of(func.body) if not ragged_axes(a.buffer)]
    taken, names = {*parameter_names(func), *others}, {}
    for buffer in ragged:
        name = buffer.name
        while not taken.isdisjoint(new := (name, counts_name(name), totals_name(name))):
            name += "_"
        names[buffer.data] = name
        taken.update(new)
    return names


def _rows(buffer: tirx.Buffer, world_size: int, name: str) -> tirx.Buffer:
    shape, source = list(buffer.shape), ragged_axes(buffer)
    shape[source] = tirx.IntImm("int32", world_size)
    return tirx.decl_buffer(shape, buffer.dtype, name, scope=buffer.scope())


def _counts(buffer: tirx.Buffer, world_size: int, name: str) -> tirx.Buffer:
    segments = buffer.shape[1 : ragged_axes(buffer)]
    shape = [WORLD_SIZE, *segments, world_size, 2]
    return scratch_buffer(shape, "uint32", counts_name(name))


def _totals(buffer: tirx.Buffer, world_size: int, name: str) -> tirx.Buffer:
    shape = [world_size, *(int(e) for e in buffer.shape[1 : ragged_axes(buffer)]), 1]
    return tirx.decl_buffer(shape, "uint32", totals_name(name), strides=packed_strides(shape))
