"""Insert block barriers between accesses of specialized warps and those of all threads."""

from __future__ import annotations

from tvm import tirx

from ..ir.accesses import READS, WRITES, mode_of, touches_in
from ..ir.block_barrier import is_sync_threads, sync_threads
from ..ir.uniformity import Divergence, ThreadControl
from ..ir.walk import (
    flatten,
    headers_of,
    is_leaf,
    may_not_run,
    nodes_in,
    op_name,
    rewrite_children,
    statements_of,
)
from ..ir.warp_roles import WarpRoles, is_specialized, roles_of

_Modes = dict[tirx.Var, int]
"""Access modes of buffers in shared memory, by their data pointers."""
_SHARED = "shared", "shared.dyn"


def sync_after_warps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a block barrier before a statement of all threads that accesses a buffer in shared
    memory after specialized warps, at least one of both to write it.

    In the specialized part of a kernel and after it, barriers are barriers of the consumers. But
    TileLang assumes that each of them orders the accesses of all threads. So if a loop around the
    specialized part ends with one, TileLang inserts no barrier before the next iteration, in which
    the first threads of the block, the producers, overwrite a tile that consumers still read.

    Before: ``for i in range(2): (if tx < 64: t[tx] = x[tx]); T.attr([128, 64],
    "kWarpSpecializationScope", 0): if tx < 128: load; else: y[tx - 128] = t[tx - 128]; sync(3,
    64)``
    After:  ``for i in range(2): sync(); (if tx < 64: t[tx] = x[tx]); ...``
    """
    roles = roles_of(func)
    if roles is None:
        return func
    return func.with_body(_Inserter(roles, ThreadControl(func)).visit(func.body))


class _Inserter:
    """Inserts the barriers, statement by statement."""

    def __init__(self, roles: WarpRoles, control: ThreadControl) -> None:
        self.roles, self.control = roles, control
        self.unordered: _Modes = {}
        """Accesses of specialized warps since the last barrier of the block."""

    def visit(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if self._is_of_warps(stmt):
            if is_specialized(stmt) and is_sync_threads(statements_of(stmt.body)[0]):
                self.unordered = {}
            self.unordered = _union(self.unordered, _modes_in(stmt))
            return stmt
        if isinstance(stmt, tirx.Bind):
            self.control.bind(stmt)
        if is_sync_threads(stmt):
            self.unordered = {}
            return stmt
        is_whole = is_leaf(stmt) or self.control.enter(stmt) is not Divergence.UNIFORM
        missing = self._conflicts([stmt] if is_whole else headers_of(stmt))
        self.unordered = {} if missing else self.unordered
        if not is_whole:
            stmt = self._inside(stmt)
        return flatten([sync_threads(), stmt]) if missing else stmt

    def _is_of_warps(self, stmt: tirx.Stmt) -> bool:
        return is_specialized(stmt) or (
            isinstance(stmt, tirx.IfThenElse) and self.roles.is_of_consumers(stmt.condition)
        )

    def _conflicts(self, nodes: list[tirx.Stmt] | list[tirx.PrimExpr]) -> bool:
        modes = _union(*map(_modes_in, nodes))
        both = ((self.unordered[v], mode) for v, mode in modes.items() if v in self.unordered)
        return any((before | mode) & WRITES for before, mode in both)

    def _inside(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Visit the statements in ``stmt``, which all threads reach or none."""
        before, after = self.unordered, []
        if isinstance(stmt, tirx.For | tirx.While):
            rewrite_children(stmt, self.visit)
            self.unordered = before = _union(before, self.unordered)
            stmt = rewrite_children(stmt, self.visit)
            self.unordered = _union(self.unordered, before if may_not_run(stmt) else {})
            return stmt
        if not isinstance(stmt, tirx.IfThenElse):
            return rewrite_children(stmt, self.visit)

        def case(inner: tirx.Stmt) -> tirx.Stmt:
            self.unordered = before
            inner = self.visit(inner)
            after.append(self.unordered)
            return inner

        stmt = rewrite_children(stmt, case)
        self.unordered = _union(*after, before if stmt.else_case is None else {})
        return stmt


def _union(*parts: _Modes) -> _Modes:
    modes: _Modes = {}
    for part in parts:
        for variable, mode in part.items():
            modes[variable] = modes.get(variable, 0) | mode
    return modes


def _modes_in(node: tirx.Stmt | tirx.PrimExpr) -> _Modes:
    """Return how ``node`` accesses buffers in shared memory."""
    accesses = [(b.data, b.scope(), mode) for _, b, mode in touches_in(node)]
    for call in nodes_in(node, tirx.Call):
        if op_name(call) == "tirx.tvm_access_ptr":
            pointer = call.args[1]
            accesses.append((pointer, pointer.type_annotation.storage_scope, mode_of(call)))
        elif op_name(call) == "tirx.address_of" and isinstance(call.args[0], tirx.BufferLoad):
            buffer = call.args[0].buffer
            accesses.append((buffer.data, buffer.scope(), READS | WRITES))
    return _union(*({data: mode} for data, scope, mode in accesses if scope in _SHARED))
