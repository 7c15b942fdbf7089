"""Verify that no load of a pipelined loop runs ahead of the wait that guards it."""

from __future__ import annotations

from tvm import tirx

from ...builtins.errors import LanguageError
from ...builtins.implicit import loc_of
from ..ir.origin import hint_of, name_of
from ..ir.walk import TMA_LOADS, calls_in, op_name, rewrite_children
from ..ir.warp_roles import is_specialized
from ..tile.hoist_waits import KEPT_BY
from ..tile.pin_pipelined import guards_in
from ..tile.stage_waits import STAGED


def verify_pipelined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse a kernel in which a wait of a pipelined loop does not precede the loads it guards.

    With warp specialization, a wait moves to the producer, before its TMA loads, unless a statement
    between the start of the loop and the loads keeps it with the consumers. Without warp
    specialization, loads of later iterations are issued before their waits, unless ``stage_waits``
    scheduled the loop.

    Before: the lowered kernel
    After:  the same
    """

    def check(stmt: tirx.Stmt, specialized: bool, loads: bool) -> tirx.Stmt:
        if is_specialized(stmt):
            specialized, loads = True, False
        if isinstance(stmt, tirx.For):
            loads = loads or bool(calls_in(stmt.body, lambda c: op_name(c) in TMA_LOADS))
        if isinstance(stmt, tirx.Evaluate) and not (specialized and loads):
            for call in guards_in(stmt):
                if specialized or STAGED not in call.annotations:
                    raise _overtaken(call, specialized)
        return rewrite_children(stmt, lambda s: check(s, specialized, loads))

    return func.with_body(check(func.body, False, False))


def _overtaken(wait: tirx.Call, specialized: bool) -> LanguageError:
    loc = loc_of(wait)
    lines = f"\n --> {loc.file}:{loc.line}" if loc is not None else ""
    obstacle = str(wait.annotations[KEPT_BY].value) if KEPT_BY in wait.annotations else ""
    name, alternative, line = [*obstacle.split("\n", 2), "", ""][:3]
    lines += f"\n{line}" if line else ""
    reason = (
        f"because {name or 'a statement'} before it keeps it in the consumer warps; expected "
        f"{alternative or 'that statement after the loads'}"
        if specialized
        else "because there is no warp specialization; expected T.serial, or num_stages=0"
    )
    return LanguageError(
        f"{name_of(wait)}: loads of T.Pipelined overtake it, {reason}{hint_of(wait)}{lines}"
    )
