"""Keep builtins of a pipelined loop in their threads, and before the loads that they guard."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.debug import delay
from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of, declaration_of
from ..ir.accesses import accesses_of
from ..ir.memory_order import acquires
from ..ir.operators import is_placeholder, placeholder
from ..ir.origin import hint_of, name_of
from ..ir.pipelined_loops import GUARDS_LOADS, is_pipelined, loads_in, written_loads
from ..ir.walk import (
    builtins_in,
    calls_in,
    effects_in,
    flatten,
    is_leaf,
    location,
    op_name,
    rewrite_children,
    with_annotation,
)

_RETURNING = {
    "tl.atomic_load_elem_op": 1,
    "tl.atomic_add_ret_elem_op": 2,
    "tl.atomic_max_ret_elem_op": 2,
    "tl.atomic_min_ret_elem_op": 2,
}
"""TileLang's atomics that return a value: the number of operands before the memory order."""
_ACQUIRE_ORDERS = frozenset({1, 2, 4, 5})
"""TileLang's numbers of consume, acquire, acq_rel and seq_cst."""


def pin_pipelined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep builtins of a pipelined loop with the consumers, and mark the waits for the producer.

    Warp specialization moves the statements before a loop's first use of loaded data to the
    producer if all of them look like reads. That is correct only for waits: the producer has other
    threads and fragments, and block barriers do not include it. TileLang does not know the
    placeholder, so the statements after it stay with the consumers, and ``complete_bulk_stores``
    removes it.
    ``stage_waits`` schedules the marked waits, and ``verify_pipelined`` verifies them in the
    lowered program.

    Before: ``for k in T.Pipelined(...): T.tileweave.put_block(...); T.copy(...)``
    After:  ``for k in T.Pipelined(...): T.tileweave.complete_bulk_stores();
    T.tileweave.put_block(...); T.copy(...)``
    """

    def pin(stmt: tirx.Stmt) -> tirx.Stmt:
        stmt = rewrite_children(stmt, pin)
        if not isinstance(stmt, tirx.For) or not is_pipelined(stmt):
            return stmt
        _refuse_overtaken(stmt.body, loads_in(stmt.body), False)
        if loads_in(stmt.body) and "tl_pipeline_stage" not in stmt.annotations:
            _refuse_polls(stmt.body)
        if "tl_pipeline_stage" in stmt.annotations:  # the schedule counts the statements
            return ir_transform(stmt, None, _mark_wait, ["tirx.Call"])
        return rewrite_children(stmt, pin_body)

    def pin_body(stmt: tirx.Stmt) -> tirx.Stmt:
        if not isinstance(stmt, tirx.SeqStmt):
            return rewrite_children(stmt, pin_body)
        loads = [bool(loads_in(s)) for s in stmt.seq]
        out: list[tirx.Stmt] = []
        for index, inner in enumerate(stmt.seq):
            others = [c for c in effects_in(inner) if not (_is_wait(c) or _only_delays(c))]
            if any(loads[index:]):
                _refuse_acquires(others, inner)
                inner = ir_transform(inner, None, _mark_wait, ["tirx.Call"])
            pinned = any(is_placeholder(s) for s in out[-2:])
            must_stay = others or _moves_fragments(inner)
            out += [placeholder(), inner] if must_stay and not pinned else [inner]
        return flatten(out)

    return func.with_body(pin(func.body))


def _refuse_overtaken(
    stmt: tirx.Stmt, loads: list[tirx.BufferLoad], loads_follow: bool
) -> tirx.Stmt:
    """Refuse operations that loads of a later iteration overtake.

    These are acquires after the last load of their iteration, and writes of the loaded memory.
    """
    if isinstance(stmt, tirx.SeqStmt):
        for inner in reversed(stmt.seq):
            _refuse_overtaken(inner, loads, loads_follow)
            loads_follow = loads_follow or bool(loads_in(inner))
        return stmt
    for call in builtins_in(_own_expressions(stmt)):
        for written, load in written_loads(call, loads):
            if not _are_of_different_ranks(written, load):
                raise LanguageError(
                    f"{name_of(call)}: writes {load.buffer.name}, which T.Pipelined loads "
                    "iterations ahead; expected another tensor, or T.serial"
                    f"{location(stmt)}"
                )
        if (_is_wait(call) or acquires(call)) and loads and not loads_follow and not loads_in(stmt):
            raise LanguageError(
                f"{name_of(call)}: called after the loads of T.Pipelined, so loads of the "
                f"next iteration overtake it; expected {_alternative_to(call)}{hint_of(call)}"
                f"{location(stmt)}"
            )
    return rewrite_children(stmt, lambda s: _refuse_overtaken(s, loads, loads_follow))


def _refuse_polls(stmt: tirx.Stmt) -> tirx.Stmt:
    """Refuse TileLang's polling loops and acquiring atomics, because its loads overtake them.

    Warp specialization does not support while loops.
    """
    if isinstance(stmt, tirx.While):
        polled = [builtin_of(c).name for c in effects_in(stmt)]
        polled += [_atomic_name(c) for c in calls_in(stmt, _returns_atomic)]
        if polled:
            raise LanguageError(
                f"{polled[0]}: polled by a while loop in T.Pipelined, so loads overtake it; "
                f"expected W.wait_ge or another wait before the loads, or T.serial{location(stmt)}"
            )
    for call in calls_in(_own_expressions(stmt), _returns_atomic):
        if any(int(order) in _ACQUIRE_ORDERS for order in call.args[_RETURNING[op_name(call)] :]):
            raise LanguageError(
                f"{_atomic_name(call)}: acquires in T.Pipelined, so loads overtake it; expected "
                "W.wait_ge or another wait before the loads, memory_order='relaxed', or T.serial"
                f"{location(stmt)}"
            )
    return rewrite_children(stmt, _refuse_polls)


def _returns_atomic(call: tirx.Call) -> bool:
    return op_name(call) in _RETURNING


def _atomic_name(call: tirx.Call) -> str:
    return "T." + op_name(call).removeprefix("tl.").removesuffix("_elem_op").removesuffix("_ret")


def _moves_fragments(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is an operator between a fragment and global memory."""
    if not isinstance(stmt, tirx.Evaluate):
        return False
    accesses = accesses_of(stmt)
    scopes = {b.scope() for b in (accesses.reads | accesses.writes).values()}
    return {"local.fragment", "global"} <= scopes


def _own_expressions(stmt: tirx.Stmt):
    """Return the expressions that ``stmt`` itself evaluates, without its inner statements."""
    if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
        return stmt.condition
    return stmt if is_leaf(stmt) else tirx.IntImm("int32", 0)


def _alternative_to(acquire: tirx.Call) -> str:
    if _is_wait(acquire):
        return "a call before the loads, or T.serial"
    qualifiers = dict(builtin_of(acquire).qualifiers)
    relaxed = "sem='relaxed', " if "relaxed" in qualifiers.get("sem", ()) else ""
    return f"a wait before the loads, {relaxed}or T.serial"


def _are_of_different_ranks(first: tirx.BufferLoad, second: tirx.BufferLoad) -> bool:
    """Return whether two elements may be in different ranks' copies of a symmetric tensor.

    Only the stride of a rank axis exceeds the extent of the axes after it.
    """
    shape, strides = first.buffer.shape, first.buffer.strides
    if len(strides) < 2:
        return False
    packed = tvm.arith.Analyzer().can_prove_equal(strides[0], shape[1] * strides[1])
    return not packed and not tvm.ir.structural_equal(first.indices[0], second.indices[0])


def _is_wait(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    return spec is not None and spec.waits


def _only_delays(call: tirx.Call) -> bool:
    """Return whether ``call`` is a sleep of ``instrument``, which belongs to a wait."""
    return builtin_of(call) is declaration_of(delay)


def _mark_wait(call: tirx.Call) -> tirx.Call | None:
    if not _is_wait(call):
        return None
    return with_annotation(call, GUARDS_LOADS, tirx.IntImm("bool", 1))


def _refuse_acquires(calls: list[tirx.Call], stmt: tirx.Stmt) -> None:
    for call in calls:
        if acquires(call):
            raise LanguageError(
                f"{name_of(call)}: acquires in T.Pipelined before a load, which overtakes it; "
                f"expected W.wait_reached or another wait, or T.serial{location(stmt)}"
            )
