"""Restrict statements that access fragments of consumer warps to these warps."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx

from ..ir.accesses import accesses_of
from ..ir.walk import children_of, headers_of, is_parallel, rewrite_children, with_span_of
from ..ir.warp_roles import WarpRoles, roles_of

_Fragments = frozenset[tirx.Var]


def keep_to_consumers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard statements before the specialized part of a kernel that access fragments of consumers.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, all of them execute a statement on tiles. If it accesses a fragment
    that the consumers use, TileLang distributes the fragment among all threads, and the consumers
    have a part of it. It guards statements after the specialized part; this pass guards those
    before it in the same way. A fragment that a guarded statement accesses belongs to the
    consumers, too.

    Before: ``T.copy(x, S[peer, 0]); T.attr([128, 128], "kWarpSpecializationScope", 0): if tx < 128:
    load; else: x[i] += tile[i]``
    After:  ``if tx >= 128: T.copy(x, S[peer, 0]); ...``
    """
    roles = roles_of(func)
    if roles is None:
        return func
    parts = list(_parts_of(func.body, roles))
    fragments = _fragments_in(*(part for part in parts if roles.is_divided(part)))
    others = [_fragments_in(part) for part in parts if not roles.is_divided(part)]
    while grown := [more for more in others if more & fragments and more - fragments]:
        fragments = fragments.union(*grown)

    def guard(stmt: tirx.Stmt) -> tirx.Stmt:
        if not _is_part(stmt, roles):
            return rewrite_children(stmt, guard)
        if roles.is_divided(stmt) or _fragments_in(stmt).isdisjoint(fragments):
            return stmt
        body = with_span_of(stmt, roles.for_consumers(stmt))
        return with_span_of(stmt, tirx.IfThenElse(roles.thread >= roles.producers, body, None))

    return func.with_body(guard(func.body))


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
