"""Verify that no load of a pipelined loop runs ahead of the wait that guards it."""

from __future__ import annotations

from enum import Enum

from tvm import tirx

from ...builtins.errors import LanguageError
from ...builtins.implicit import loc_of
from ..ir.origin import hint_of, name_of
from ..ir.pipelined_loops import KEPT_BY, STAGED, guards_in
from ..ir.walk import ASYNC_COPY, MBARRIER_WAIT, TMA_LOADS, children_of, nodes_in, op_name
from ..ir.warp_roles import is_specialized


class _Part(Enum):
    """Part of a kernel, by the warps that load tiles in it.

    Members:
        ALL: all warps load: there is no warp specialization.
        BRANCH: statements of one warp role, outside of the loops that load or consume tiles.
        PRODUCER: a loop with TMA loads.
        CONSUMERS: a loop that waits for a producer.
        OWN: a loop of one warp role that loads its tiles itself, or the copies before it.
    """

    ALL, BRANCH, PRODUCER, CONSUMERS, OWN = range(5)


def verify_pipelined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse a kernel in which a wait of a pipelined loop does not precede the loads it guards.

    With warp specialization, a wait moves to the producer, before its TMA loads, unless a statement
    between the start of the loop and the loads keeps it with the consumers. Without warp
    specialization, loads of later iterations are issued before their waits, unless ``stage_waits``
    scheduled the loop. TileLang specializes one pipelined loop of a kernel; the consumers load the
    tiles of other ones themselves, in the order of that schedule.

    Before: the lowered kernel
    After:  the same
    """

    def check(stmt: tirx.Stmt, part: _Part) -> None:
        if is_specialized(stmt):
            part = _Part.BRANCH
        elif isinstance(stmt, tirx.For) and part is _Part.BRANCH:
            part = _part_of(stmt)
        if isinstance(stmt, tirx.Evaluate) and part is not _Part.PRODUCER:
            for call in guards_in(stmt):
                if STAGED not in call.annotations or part not in (_Part.ALL, _Part.OWN):
                    raise _error(call, part is not _Part.ALL)
        for place, child in enumerate(children_of(stmt)):
            is_own = part is _Part.BRANCH and _precedes_copies(stmt, place)
            check(child, _Part.OWN if is_own else part)

    check(func.body, _Part.ALL)
    return func


def _part_of(loop: tirx.For) -> _Part:
    """Return the part that a loop of one warp role is."""
    names = {op_name(call) for call in nodes_in(loop.body, tirx.Call)}
    if names & TMA_LOADS:
        return _Part.PRODUCER
    if MBARRIER_WAIT in names:
        return _Part.CONSUMERS if _waits(loop.body) else _Part.BRANCH
    return _Part.OWN


def _waits(stmt: tirx.Stmt) -> bool:
    """Return whether a statement waits for a producer outside of the loops in it."""
    if isinstance(stmt, tirx.Evaluate):
        return op_name(stmt.value) == MBARRIER_WAIT
    return any(_waits(s) for s in children_of(stmt) if not isinstance(s, tirx.For))


def _precedes_copies(stmt: tirx.Stmt, place: int) -> bool:
    """Return whether the statement at ``place`` in a sequence has a wait outside of loops, and
    asynchronous copies follow it before a wait for a producer."""
    if not isinstance(stmt, tirx.SeqStmt) or isinstance(stmt.seq[place], tirx.For):
        return False
    if not guards_in(stmt.seq[place]):
        return False
    names = (op_name(call) for s in stmt.seq[place + 1 :] for call in nodes_in(s, tirx.Call))
    first = next((n for n in names if n in (ASYNC_COPY, MBARRIER_WAIT) or n in TMA_LOADS), None)
    return first == ASYNC_COPY


def _error(wait: tirx.Call, specialized: bool) -> LanguageError:
    loc = loc_of(wait)
    lines = f"\n --> {loc.file}:{loc.line}" if loc is not None else ""
    obstacle = str(wait.annotations[KEPT_BY].value) if KEPT_BY in wait.annotations else ""
    name, alternative, line = [*obstacle.split("\n", 2), "", ""][:3]
    lines += f"\n{line}" if line else ""
    if not specialized:
        reason = "because there is no warp specialization; expected T.serial, or num_stages=0"
    elif not name:
        reason = "because it is in the consumer warps; expected T.serial, or num_stages=0"
    else:
        reason = f"because {name} before it keeps it in the consumer warps; expected {alternative}"
    return LanguageError(
        f"{name_of(wait)}: loads of T.Pipelined overtake it, {reason}{hint_of(wait)}{lines}"
    )
