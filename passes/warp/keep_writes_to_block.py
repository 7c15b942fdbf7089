"""Restrict assignments and atomics before a specialized loop to the program's own threads."""

from __future__ import annotations

from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.accesses import is_private
from ..ir.guards import guard_statements, needs_result
from ..ir.walk import calls_in, headers_of, is_leaf, is_parallel, location, nodes_in, op_name
from ..ir.warp_roles import is_specialized, roles_of

_CHANGES = ("tl.atomic_", "tirx.ptx_arrive_barrier", "tl.mbarrier_expect_tx")
"""Prefixes of TileLang's operators that change memory or an mbarrier once for each thread. TileLang
divides atomics of tiles, ``tl.tileop.*``, among the threads."""


def keep_writes_to_block(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard assignments to global or shared memory, and atomics, by the program's thread indices.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, all threads run the same code, and the program's threads are the
    first ones. TileLang divides its own loops, also ``T.Parallel``, among all of them. But each
    additional thread also executes every other statement: ``y[tx] = ...`` is stored past the
    block's part of ``y``, and an atomic addition is executed twice. An atomic with a result is
    refused, because the excluded threads would miss the result.

    Before: ``y[b * 128 + tx] = 1; T.attr([128, 128], "kWarpSpecializationScope", 0): ...``
    After:  ``if tx < 128: y[b * 128 + tx] = 1; ...``

    Raises:
        LanguageError: names the atomic whose result is used, with its line.
    """
    roles = roles_of(func)
    if roles is None:
        return func
    scopes = filter(is_specialized, nodes_in(func.body, tirx.AttrStmt))
    is_own = roles.thread < next(scopes).node[1]

    def conditions_of(stmt: tirx.Stmt) -> list[tirx.PrimExpr] | None:
        if roles.is_divided(stmt) or is_parallel(stmt):
            return None
        return [is_own] if _writes_memory(stmt) or _changes_of(stmt) else []

    return func.with_body(guard_statements(func.body, conditions_of, _check))


def _writes_memory(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.BufferStore) and not is_private(stmt.buffer)


def _changes_of(stmt: tirx.Stmt) -> list[tirx.Call]:
    """Return the calls of ``_CHANGES`` that ``stmt`` itself evaluates."""
    evaluated = [stmt] if is_leaf(stmt) else headers_of(stmt)
    return [call for node in evaluated for call in calls_in(node, _is_change)]


def _is_change(call: tirx.Call) -> bool:
    return op_name(call).startswith(_CHANGES)


def _check(stmt: tirx.Stmt) -> None:
    """Refuse an atomic whose result the excluded threads need."""
    if needs_result(stmt) and _changes_of(stmt):
        raise LanguageError(
            "atomic operation before T.Pipelined: its result is used, and the threads that load "
            "tiles would execute it, too; expected it under a condition on the thread index, such "
            f"as if T.get_thread_binding() == 0, or after the loop{location(stmt)}"
        )
