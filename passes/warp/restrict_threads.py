"""Restrict statements before a specialized loop to the threads that must execute them."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.accesses import accesses_of, is_private
from ..ir.guards import guard_statements, needs_result
from ..ir.walk import (
    calls_in,
    children_of,
    headers_of,
    is_leaf,
    is_parallel,
    location,
    nodes_in,
    op_name,
    with_span_of,
)
from ..ir.warp_roles import WarpRoles, is_specialized, roles_of

_CHANGES = ("tl.atomic_", "tirx.ptx_arrive_barrier", "tl.mbarrier_expect_tx")
"""Prefixes of TileLang's operators that change memory or an mbarrier once for each thread. TileLang
divides atomics of tiles, ``tl.tileop.*``, among the threads."""

_Fragments = frozenset[tirx.Var]


def restrict_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard statements before the specialized part of a kernel that additional threads must not
    execute.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, all threads run the same code, and the program's threads are the
    first ones. TileLang divides its own loops, also ``T.Parallel``, among all of them. It guards
    statements after the specialized part, but not those before it:

    - If a statement accesses a fragment that the consumers use, TileLang distributes the fragment
      among all threads, and the consumers have a part of it. Only the consumers execute such a
      statement. A fragment that it accesses belongs to them, too.
    - Each additional thread executes every other statement: ``y[tx] = ...`` is stored past the
      block's part of ``y``, and an atomic addition is executed twice. Only the program's threads
      execute assignments to global or shared memory, and atomics. An atomic with a result is
      refused, because the excluded threads would miss the result.

    Before: ``T.copy(x, S[peer, 0]); y[b * 128 + tx] = 1; T.attr([128, 128],
    "kWarpSpecializationScope", 0): if tx < 128: load; else: x[i] += tile[i]``
    After:  ``if tx >= 128: T.copy(x, S[peer, 0]); if tx < 128: y[b * 128 + tx] = 1; ...``

    Raises:
        LanguageError: names the atomic whose result is used, with its line.
    """
    roles = roles_of(func)
    if roles is None:
        return func
    fragments = _fragments_of_consumers(func, roles)
    scopes = filter(is_specialized, nodes_in(func.body, tirx.AttrStmt))
    is_own = roles.thread < next(scopes).node[1]

    def conditions_of(stmt: tirx.Stmt) -> list[tirx.PrimExpr] | tirx.Stmt:
        if roles.is_divided(stmt):
            return stmt
        if _is_part(stmt, roles) and not _fragments_in(stmt).isdisjoint(fragments):
            body = with_span_of(stmt, roles.for_consumers(stmt))
            return with_span_of(stmt, tirx.IfThenElse(roles.thread >= roles.producers, body, None))
        if is_parallel(stmt):
            return stmt
        return [is_own] if _writes_memory(stmt) or _changes_of(stmt) else []

    return func.with_body(guard_statements(func.body, conditions_of, _check))


def _fragments_of_consumers(func: tirx.PrimFunc, roles: WarpRoles) -> _Fragments:
    """Return the fragments that the consumers use, or a statement that uses one of them."""
    parts = list(_parts_of(func.body, roles))
    fragments = _fragments_in(*(part for part in parts if roles.is_divided(part)))
    others = [_fragments_in(part) for part in parts if not roles.is_divided(part)]
    while grown := [more for more in others if more & fragments and more - fragments]:
        fragments = fragments.union(*grown)
    return fragments


def _parts_of(stmt: tirx.Stmt, roles: WarpRoles) -> Iterator[tirx.Stmt]:
    """Yield the parts of ``stmt``, see ``_is_part``."""
    if _is_part(stmt, roles):
        yield stmt
        return
    for child in children_of(stmt):
        yield from _parts_of(child, roles)


def _is_part(stmt: tirx.Stmt, roles: WarpRoles) -> bool:
    """Return whether one role executes ``stmt`` as a whole, or all threads do: a statement on
    tiles, one whose condition reads a fragment, or what TileLang gives to the roles."""
    if roles.is_divided(stmt) or is_parallel(stmt) or not children_of(stmt):
        return True
    return bool(_fragments_in(*headers_of(stmt)))


def _fragments_in(*nodes: tirx.PrimExpr | tirx.Stmt) -> _Fragments:
    accesses = accesses_of(*nodes)
    buffers = [*accesses.reads.values(), *accesses.writes.values()]
    return frozenset(b.data for b in buffers if b.scope() == "local.fragment")


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
