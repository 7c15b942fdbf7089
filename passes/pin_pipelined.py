"""What stands in a pipelined loop stays with its threads, and before the loads it guards."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..builtins.declare import builtin_of
from ..builtins.errors import LanguageError
from .memory_order import acquires
from .order_releases import is_placeholder, placeholder
from .walk import builtins_in, calls_in, flatten, location, op_name, rewrite_children

GUARDS_LOADS = "tileweave.guards_loads"
"""Annotation of the waits that guard loads of a pipelined loop."""

COPIES = frozenset({"tl.tileop.copy", "tl.tileop.async_copy", "tl.tileop.tma_copy"})


def pin_pipelined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep builtins of a pipelined loop with the consumers, and mark the waits that must not stay.

    Warp specialisation moves the statements before a loop's first use of loaded data to the
    producer if all of them look like reads. That is right for a wait and wrong for anything else:
    the producer has other threads, and no block barrier reaches it. The placeholder looks like
    nothing TileLang knows, so what follows it stays, and ``complete_bulk_stores`` removes it. What
    is marked, ``stage_waits`` schedules and ``verify_pipelined`` checks in the lowered program.

    Before: ``for k in T.Pipelined(...): T.tileweave.put_block(...); T.copy(...)``
    After:  ``for k in T.Pipelined(...): T.tileweave.complete_bulk_stores();
    T.tileweave.put_block(...); T.copy(...)``
    """

    def pin(stmt: tirx.Stmt) -> tirx.Stmt:
        stmt = rewrite_children(stmt, pin)
        if not isinstance(stmt, tirx.For) or not is_pipelined(stmt):
            return stmt
        if "tl_pipeline_stage" in stmt.annotations:  # its statements are counted
            return ir_transform(stmt, None, _marked, ["tirx.Call"])
        return rewrite_children(stmt, pin_body)

    def pin_body(stmt: tirx.Stmt) -> tirx.Stmt:
        if not isinstance(stmt, tirx.SeqStmt):
            return rewrite_children(stmt, pin_body)
        loads = [bool(calls_in(s, lambda c: op_name(c) in COPIES)) for s in stmt.seq]
        out: list[tirx.Stmt] = []
        for index, inner in enumerate(stmt.seq):
            others = [c for c in builtins_in(inner) if not _is_wait(c) and not _is_value(c)]
            if any(loads[index:]):
                _refuse_acquires(others, inner)
                inner = ir_transform(inner, None, _marked, ["tirx.Call"])
            pinned = any(is_placeholder(s) for s in out[-2:])
            out += [placeholder(), inner] if others and not pinned else [inner]
        return flatten(out)

    return func.with_body(pin(func.body))


def is_pipelined(loop: tirx.For) -> bool:
    """Whether TileLang overlaps the rounds of ``loop``."""
    return (
        int(loop.annotations.get("num_stages", 0)) >= 1 or "tl_pipeline_stage" in loop.annotations
    )


def _is_wait(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    return spec is not None and spec.name.startswith("wait_")


def _is_value(call: tirx.Call) -> bool:
    return builtin_of(call).name in ("rank", "world_size")


def _marked(call: tirx.Call) -> tirx.Call | None:
    if not _is_wait(call):
        return None
    return tirx.Call(call.dtype, call.op, call.args, {GUARDS_LOADS: tirx.IntImm("bool", 1)})


def _refuse_acquires(calls: list[tirx.Call], stmt: tirx.Stmt) -> None:
    for call in calls:
        if acquires(call):
            raise LanguageError(
                f"{builtin_of(call).name}: acquires in T.Pipelined before a load, which overtakes "
                f"it; expected W.wait_reached or another wait, or T.serial{location(stmt)}"
            )
