"""Keep statements before T.Pipelined in place, although warp specialization moves them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, takewhile

from tvm import tirx
from tvm.target import Target

from ..ir.accesses import accesses_of, is_private
from ..ir.operators import AWAITED, hold
from ..ir.tma import may_have_producer
from ..ir.walk import (
    calls_in,
    children_of,
    effects_in,
    flatten,
    has_loads,
    nodes_in,
    op_name,
    rewrite_and_allocate,
    variables_in,
    with_span_of,
)

_MIN_BLOCKS = "tl.min_blocks_per_sm"
_REGISTERS = (
    "tl.annotate_producer_reg_dealloc",
    "tl.annotate_consumer_reg_alloc",
    "tl.no_set_max_nreg",
)
"""TileLang's operators by which a program chooses the registers of its warps."""


def pin_preludes(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Let an operator before ``T.Pipelined`` read what earlier statements assign.

    Warp specialization moves each statement that assigns fragments or variables of the consumers
    next to the pipelined loop, through all loops, conditions and waits between them, if no
    statement that stays reads them. An operator that reads them keeps all statements in place, and
    ``divide_preludes`` gives them to the right threads. A value that depends on the thread index
    becomes a variable, which only these threads assign.

    The registers of the warps stay as they are if several blocks must fit on an SM.

    TileLang waits in the loop for a load before it, if the loop reads the tile. A load whose tile
    another statement before the loop uses, too, gets an attribute that keeps the wait in place.

    Before: ``T.clear(acc); for step in range(4): for k in T.Pipelined(n): ...``
    After:  ``T.clear(acc); for step in range(4): hold(acc[0, 0]); for k in T.Pipelined(n): ...``
    """
    path = _path_to_pipelined(func.body) if may_have_producer(target) else None
    if path is None:
        return func
    values = _values_of_threads(path)
    variables: list[tirx.Buffer] = []
    uses = [hold(values.get(value, value)) for value in _assigned(path)]
    if _oversubscribes(func.body):
        uses.append(tirx.Evaluate(tirx.call_intrin("handle", tirx.op.Op.get("tl.no_set_max_nreg"))))
    awaited = _awaited_loads(path)

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if stmt.same_as(path[-1]):
            return flatten([*uses, stmt])
        if any(stmt.same_as(load) for load in awaited):
            one = tirx.IntImm("int32", 1)
            return with_span_of(stmt, tirx.AttrStmt(one, AWAITED, one, stmt))
        if isinstance(stmt, tirx.Bind) and stmt.var in values:
            variables.append(values[stmt.var].buffer)
            return with_span_of(stmt, tirx.BufferStore(variables[-1], stmt.value, [0]))
        return rewrite_and_allocate(stmt, visit, variables)

    return func.with_body(tirx.stmt_functor.substitute(visit(func.body), values))


def _oversubscribes(body: tirx.Stmt) -> bool:
    """Return whether TileLang would give the consumers more registers than several blocks on an SM
    have: its default fits one block, and the kernel would hang."""
    attrs = nodes_in(body, tirx.AttrStmt)
    blocks = max((int(a.value) for a in attrs if a.attr_key == _MIN_BLOCKS), default=1)
    return blocks > 1 and not calls_in(body, lambda c: op_name(c) in _REGISTERS)


def _path_to_pipelined(stmt: tirx.Stmt) -> list[tirx.Stmt] | None:
    """Return the nested statements from ``stmt`` to the first loop that TileLang specializes."""
    if isinstance(stmt, tirx.For) and "num_stages" in stmt.annotations:
        return [stmt] if int(stmt.annotations["num_stages"]) >= 1 else None
    for child in children_of(stmt):
        path = _path_to_pipelined(child)
        if path is not None:
            return [stmt, *path]
    return None


def _before(path: list[tirx.Stmt]) -> Iterator[tirx.Stmt]:
    """Yield the statements before the loop, in order."""
    for stmt, child in pairwise(path):
        if isinstance(stmt, tirx.SeqStmt):
            yield from takewhile(lambda s, at=child: not s.same_as(at), stmt.seq)


def _assigned(path: list[tirx.Stmt]) -> list[tirx.PrimExpr]:
    """Return the private memory and the values that statements before the loop assign."""
    assigned: dict[tirx.Var, tirx.PrimExpr] = {}
    for stmt in _before(path):
        if isinstance(stmt, tirx.Bind):
            if has_loads(stmt.value) or effects_in(stmt.value):
                assigned[stmt.var] = stmt.var
            continue
        for data, buffer in accesses_of(stmt).writes.items():
            if is_private(buffer):
                assigned[data] = tirx.BufferLoad(buffer, [0] * len(buffer.shape))
    return list(assigned.values())


def _awaited_loads(path: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """Return the loads before the loop of a tile that it reads, if another statement uses the tile
    between, or the loop loads it again."""
    loop = accesses_of(path[-1])
    awaited, loads = [], {}
    for stmt in _before(path):
        accesses = accesses_of(stmt)
        for data in accesses.reads.keys() | accesses.writes.keys():
            if data in loads:
                awaited.append(loads.pop(data))
        if op_name(getattr(stmt, "value", None)) == "tl.tileop.copy":
            loads |= {data: stmt for data in accesses.writes if data in loop.reads}
    return awaited + [load for data, load in loads.items() if data in loop.writes]


def _values_of_threads(path: list[tirx.Stmt]) -> dict[tirx.Var, tirx.BufferLoad]:
    """Return a variable for each value before the loop that a thread reads by its index."""
    indices: set[tirx.Var] = set()
    variables: dict[tirx.Var, tirx.BufferLoad] = {}
    for bind in _before(path):
        if not isinstance(bind, tirx.Bind):
            continue
        names = set(variables_in(bind.value))
        if op_name(bind.value) != "tl.launch_thread_idx" and names.isdisjoint(indices):
            continue
        indices.add(bind.var)
        if has_loads(bind.value) or effects_in(bind.value) or not names.isdisjoint(variables):
            buffer = tirx.decl_buffer((1,), bind.var.dtype, bind.var.name, scope="local.var")
            variables[bind.var] = tirx.BufferLoad(buffer, [0])
    return variables
