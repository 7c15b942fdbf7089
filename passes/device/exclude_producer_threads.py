"""Exclude added producer threads from builtins that write, outside of the specialized part."""

from __future__ import annotations

from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.guards import guard_statements, needs_result
from ..ir.marks import Mark, calls_of, mark_of
from ..ir.memory_order import writes
from ..ir.origin import name_of
from ..ir.walk import location


def exclude_producer_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard builtins that write by the indices of the program's threads.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, all threads run the same code, and the program's threads are the
    first ones. After it, they are the threads after the producers. TileLang guards its own loops,
    also ``T.Parallel``, but not other builtins. The mark of a call identifies the program's thread
    that executes it. Waits and loads by additional threads are harmless. A builtin with a result is
    refused, because the excluded threads would miss the result.

    Before: ``T.tileweave.red_add(..., 7, tx, 256); T.attr([128, 256], "kWarpSpecializationScope",
    0): ...``
    After:  ``if tx < 256: T.tileweave.red_add(..., 7, tx, 256); ...``
    """
    return func.with_body(guard_statements(func.body, _bounds_of, _check))


def _bounds_of(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    """Return the conditions that restrict ``stmt`` to the program's threads."""
    marks = [mark for _, mark in _writes_of_threads(stmt)]
    return [bound for m in marks for bound in (m.thread >= 0, m.thread < m.threads)]


def _writes_of_threads(stmt: tirx.Stmt) -> list[tuple[tirx.Call, Mark]]:
    """Return the builtins that write, and that each thread executes for itself, with their
    marks."""
    marked = [(call, mark_of(call)) for call in filter(writes, calls_of(stmt))]
    return [(call, mark) for call, mark in marked if mark is not None and mark.threads]


def _check(stmt: tirx.Stmt) -> None:
    """Refuse a statement whose result the excluded threads need."""
    if needs_result(stmt):
        call, mark = _writes_of_threads(stmt)[0]
        raise LanguageError(
            f"{name_of(call)}: its result is used outside of warp specialization, where more than "
            f"the program's {mark.threads} threads run; expected a call under a condition "
            f"on the thread index, such as if T.get_thread_binding() == 0{location(stmt)}"
        )
