"""Counters of ragged tensors: announced totals of each tile in units of its counter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ....builtins.spec import Builtin, builtin_of
from ....builtins.symmetric import packed_strides
from ...ir.implicit import Implicit, heap_buffer, implicit_of, set_implicit
from ...ir.ragged import counts_name, totals_name
from ..regions.granules import Counter
from ..regions.tensor_accesses import TensorAccesses
from .reindex import reindexed


def with_tiles(func: tirx.PrimFunc, tiles: Mapping[str, int], heap_stride: int) -> tirx.PrimFunc:
    """Make each announcement keep a total for each tile of its segment.

    Args:
        tiles: rows of a tile of each ragged tensor, by its name.

    Before: ``T.tileweave.announce(S_announced[dst, me, 0], n, S_total[dst, 0], rows, size, rows)``
    After:  the same with the rows of a tile as last operand. ``S_announced`` and ``S_total`` have
    a word for each tile.
    """
    words: dict[str, int] = {}
    tile_of = {counts_name(name): tile for name, tile in tiles.items()}
    implicit = implicit_of(func)
    for number, parameter in enumerate(implicit):
        if parameter.name in tiles:
            tile = tiles[parameter.name]
            implicit[number] = dataclasses.replace(parameter, tile=tile)
            count = -(-parameter.segment[0] // tile)
            words |= {counts_name(parameter.name): 1 + count, totals_name(parameter.name): count}
    buffers, replaced = dict(func.buffer_map.items()), {}
    by_name = {buffer.name: param for param, buffer in buffers.items()}
    for number, parameter in enumerate(implicit):
        if parameter.name in words:
            shape = (*parameter.shape[:-1], words[parameter.name])
            implicit[number] = dataclasses.replace(parameter, shape=shape)
            old = buffers[by_name[parameter.name]]
            new = _declared(implicit[number], int(old.shape[0]), heap_stride)
            buffers[by_name[parameter.name]], replaced[old.data] = new, (new, ())

    def change(spec: Builtin, arguments: list) -> None:
        name = arguments[0].args[0].buffer.name
        total = len(spec.operands) + spec.implicit.index("total")
        for place, count in ((0, words[name]), (total, words[name] - 1)):
            load, _, mode = arguments[place].args
            pointer = arguments[place]
            count = tirx.IntImm("int32", count)
            arguments[place] = tirx.Call(pointer.dtype, pointer.op, [load, count, mode])
        tile = len(spec.operands) + spec.implicit.index("tile")
        arguments[tile] = tirx.IntImm("int32", tile_of[name])

    body = _with_announcements(reindexed(func.body, lambda n: replaced.get(n.buffer.data)), change)
    new = tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs, func.span)
    return set_implicit(new, implicit)


def _declared(parameter: Implicit, world_size: int, heap_stride: int) -> tirx.Buffer:
    name, shape, dtype = parameter.name, parameter.shape, parameter.dtype
    if parameter.symmetric:
        return heap_buffer(name, shape, dtype, world_size, heap_stride)
    return tirx.decl_buffer(shape, dtype, name, strides=packed_strides(shape))


def in_units(body: tirx.Stmt, counters: Sequence[Counter]) -> tirx.Stmt:
    """Make each announcement add units of its counter to its total.

    Before: ``T.tileweave.announce(S_announced[dst, me, 0], n, S_total[dst, 0], rows, size, tile)``
    After:  ``T.tileweave.announce(S_announced[dst, me, 0], n, S_total[dst, 0], rows, units, tile)``
    """
    units = {
        counter.accesses.counts.tensor.name: counter.unit
        for counter in counters if counter.accesses.counts is not None
    }  # fmt: skip

    def change(spec: Builtin, arguments: list) -> None:
        unit = units.get(arguments[0].args[0].buffer.name, 1)
        place = len(spec.operands) + spec.implicit.index("row_size")
        arguments[place] = tirx.IntImm("int32", int(arguments[place]) // unit)

    return _with_announcements(body, change) if units else body


def _with_announcements(body: tirx.Stmt, change: Callable[[Builtin, list], None]) -> tirx.Stmt:
    """Return ``body`` with announcements whose arguments ``change`` has changed."""

    def changed(call: tirx.Call) -> tirx.Call | None:
        spec = builtin_of(call)
        if spec is None or not spec.announces:
            return None
        arguments = list(call.args)
        change(spec, arguments)
        return tirx.Call(call.dtype, call.op, arguments, annotations=call.annotations)

    return ir_transform(body, None, changed, ["tirx.Call"])


def assumption(rows: TensorAccesses) -> str:
    """Return what the compiler assumes of the rows of a ragged tensor, for ``tw.explain``."""
    capacity = int(rows.tensor.shape[1 + rows.segments])
    return (
        "each launch writes row 0 to count - 1 of a segment, each once, where count, at most "
        f"{capacity}, is the announced number"
    )
