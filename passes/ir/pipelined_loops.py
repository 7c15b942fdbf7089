"""Pipelined loops: their loads, and the waits that guard these."""

from __future__ import annotations

from tvm import DataType, IRModule, tirx

from .memory_order import pointers_written
from .tma import TMA_MULTIPLE
from .walk import calls_in, line_of, nodes_in, op_name, statements_of

GUARDS_LOADS = "tileweave.guards_loads"
"""Annotation of the waits that guard loads of a pipelined loop."""

COPIES = frozenset({"tl.tileop.copy", "tl.tileop.async_copy", "tl.tileop.tma_copy"})


def is_pipelined(loop: tirx.For) -> bool:
    """Return whether TileLang overlaps the iterations of ``loop``."""
    return (
        int(loop.annotations.get("num_stages", 0)) >= 1 or "tl_pipeline_stage" in loop.annotations
    )


def loop_name(loop: tirx.For) -> str:
    """Return the name of the function of TileLang that makes ``loop``."""
    if loop.kind == tirx.ForKind.SERIAL:
        return "T.Pipelined" if is_pipelined(loop) else "T.serial"
    return {tirx.ForKind.PARALLEL: "T.Parallel", tirx.ForKind.UNROLLED: "T.unroll"}.get(
        loop.kind, "T.vectorized"
    )


def guards_in(node) -> list[tirx.Call]:
    """Return the waits in ``node`` that guard loads of a pipelined loop."""
    return calls_in(node, guards_loads)


def guards_loads(call: tirx.Call) -> bool:
    return GUARDS_LOADS in call.annotations


def loads_in(node) -> list[tirx.BufferLoad]:
    """Return the global memory that ``node`` loads into shared memory.

    TileLang issues these loads iterations ahead.
    """
    loads: list[tirx.BufferLoad] = []
    for inner in nodes_in(node, tirx.Call, tirx.BufferStore):
        if op_name(inner) in COPIES:
            source, target = (region.args[0] for region in inner.args[:2])
            if target.buffer.scope().startswith("shared"):
                loads.append(source)
        elif isinstance(inner, tirx.BufferStore) and inner.buffer.scope().startswith("shared"):
            loads += nodes_in(inner.value, tirx.BufferLoad)
    return [load for load in loads if load.buffer.scope() == "global"]


def written_loads(call: tirx.Call, loads: list[tirx.BufferLoad]) -> list[tuple]:
    """Return the pairs of a write by the builtin ``call`` and one of ``loads`` of its tensor."""
    written = pointers_written(call)
    return [(w, load) for w in written for load in loads if w.buffer.same_as(load.buffer)]


KEPT_BY = "tileweave.kept_by"
"""Annotation of a wait: the statement that keeps it with the consumers, an alternative, and the
line of the statement, each on a line of its own."""

STAGED = "tileweave.staged"
"""Annotation of the waits of a loop whose schedule is explicit."""


def iteration_of(loop: tirx.For) -> list[tirx.Stmt]:
    """Return the statements of an iteration, also those under the only condition in it."""
    body = loop.body
    while isinstance(body, tirx.IfThenElse) and body.else_case is None:
        body = body.then_case
    return statements_of(body)


def tiles_loaded_in(stmt: tirx.Stmt) -> set[tirx.Var]:
    """Return the pointers of the tiles that ``stmt`` loads from global memory."""
    loads = filter(loads_in, nodes_in(stmt, tirx.Call, tirx.BufferStore))
    return {(x.args[1].args[0] if isinstance(x, tirx.Call) else x).buffer.data for x in loads}


def load_lines(mod: IRModule) -> dict[str, str]:
    """Return the line of the last load of each tile in shared memory, by the name of the tile.

    TileLang loses the lines of loads of pipelined loops.
    """
    calls = (stmt for f in mod.functions.values() for stmt in nodes_in(f.body, tirx.Evaluate))
    return {
        stmt.value.args[1].args[0].buffer.name: line_of(stmt)
        for stmt in calls
        if op_name(stmt.value) in COPIES and loads_in(stmt)
    }


def uses_tma(loop: tirx.For) -> bool:
    """Return whether producer warps may load tiles of ``loop`` by the TMA.

    They have no use for an explicit schedule: TileLang drops it.
    """
    return int(loop.annotations.get("num_stages", 0)) >= 1 and any(
        may_use_tma(call) for call in calls_in(loop.body, lambda c: op_name(c) in COPIES)
    )


def may_use_tma(copy: tirx.Call) -> bool:
    """Return whether TileLang may load a tile by the TMA for ``copy``."""
    source, target = (region.args[0].buffer for region in copy.args[:2])
    if source.scope() != "global" or not target.scope().startswith("shared"):
        return False
    size = DataType(str(source.dtype)).bits // 8
    strides = [int(s) * size for s in source.strides[:-1] if isinstance(s, tirx.IntImm)]
    return not int(copy.annotations.get("disable_tma", 0)) and not any(
        stride % TMA_MULTIPLE for stride in strides
    )
