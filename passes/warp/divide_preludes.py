"""Give each statement before a specialized loop to the threads that must execute it."""

from __future__ import annotations

from collections.abc import Iterator, Set

from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Range

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.accesses import accesses_of, is_private
from ..ir.guards import guard_statements, needs_result
from ..ir.marks import mark_of
from ..ir.memory_order import writes
from ..ir.operators import AWAITED, HOLD
from ..ir.origin import name_of
from ..ir.walk import (
    calls_in,
    children_of,
    effects_in,
    flatten,
    headers_of,
    is_leaf,
    is_parallel,
    location,
    nodes_in,
    op_name,
    rewrite_children,
    variables_in,
    with_span_of,
)
from ..ir.warp_roles import WarpRoles, is_specialized, roles_of

_CHANGES = ("tl.atomic_", "tirx.ptx_arrive_barrier", "tl.mbarrier_expect_tx")
"""Prefixes of TileLang's operators that change memory or an mbarrier once for each thread. TileLang
divides atomics of tiles, ``tl.tileop.*``, among the threads."""


def divide_preludes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard statements before the specialized part that the additional threads must not execute.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    After the specialized part, only the consumers continue, whose indices follow those of the
    producers. Before it, all threads execute each statement. Most may: TileLang divides tiles among
    any number of threads. Two kinds may not:

    - Statements on private memory that the consumers read later: fragments, which TileLang would
      distribute among all threads, what depends on the thread index, and what no producer needs.
      The consumers execute them, with the indices that they have later. If nothing between depends
      on them, they move into the consumers' part.
    - Assignments of single elements, atomics, and builtins that write. The threads with the
      program's indices execute them, the first ones. An atomic or builtin with a result is
      refused, because the other threads would miss the result.

    Before: ``y[tx] = 1; T.copy(x, acc); W.wait_ge(flag, 1); T.attr([128, 128],
    "kWarpSpecializationScope", 0): if tx < 128: load; else: acc += tile``
    After:  ``if tx < 128: y[tx] = 1; if tx >= 128: T.copy(x, acc); W.wait_ge(flag, 1); ...``

    Raises:
        LanguageError: names the atomic or builtin whose result is used, or a value of the first
            kind that the producers read, with the line.
    """
    func = func.with_body(_without_pins(func.body))
    roles = roles_of(func)
    if roles is None:
        return func
    consumers = _Consumers(func.body, roles)
    consumers.verify(func.body)
    body = _sunk(consumers.guard(func.body), roles, consumers.only_read)
    return func.with_body(_guard_writes(body, roles))


def _without_pins(stmt: tirx.Stmt) -> tirx.Stmt:
    """Remove what ``pin_preludes`` has inserted. The pipelined loop follows each operator."""
    if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == AWAITED:
        return stmt.body
    if isinstance(stmt, tirx.SeqStmt) and any(map(_is_pin, stmt.seq)):
        stmt = with_span_of(stmt, flatten([s for s in stmt.seq if not _is_pin(s)]))
    return rewrite_children(stmt, _without_pins)


def _is_pin(stmt: tirx.Stmt) -> bool:
    if not isinstance(stmt, tirx.Evaluate) or op_name(stmt.value) != HOLD:
        return False
    return all(is_private(buffer) for buffer in accesses_of(stmt).reads.values())


class _Consumers:
    """Statements before the specialized part that the consumers execute.

    Attributes:
        differing: private memory and values that differ between a thread and the thread that
            executes its part of the program after the producers.
        kept: private memory and values that only the consumers have.
        only_read: private memory that only the consumers read, directly or by other values.
    """

    def __init__(self, body: tirx.Stmt, roles: WarpRoles) -> None:
        self._roles = roles
        self._analyzer = Analyzer()
        self._analyzer.bind(roles.thread, Range(roles.producers, 1 << 10))
        self.differing: set[tirx.Var] = set()
        self._find_differing(body, False)
        divided = [part for part in self._parts_of(body) if roles.is_divided(part)]
        fragments = {d for d, b in _private_in(*divided).items() if b.scope() == "local.fragment"}
        self.kept = fragments | (self.differing & _names_in(*divided))
        self._grow(body)
        self.only_read = self._only_read(body)

    def _only_read(self, body: tirx.Stmt) -> set[tirx.Var]:
        """Return the value of ``only_read``."""
        roles = self._roles
        parts = [part for part in self._parts_of(body) if not roles.is_divided(part)]
        producers = [split.then_case for split in roles.splits_in(body)]
        needed = _names_in(*producers, *self._headers_around(body))
        found: set[tirx.Var] = set()
        while True:
            before = len(needed)
            found.clear()
            for part in parts:
                writes = accesses_of(part).writes
                is_assignment = writes and all(map(is_private, writes.values()))
                if is_assignment and not effects_in(part) and needed.isdisjoint(writes):
                    found |= writes.keys()
                elif not isinstance(part, tirx.Bind) or part.var in needed:
                    needed |= _names_in(part)
            if len(needed) == before:
                return found

    def _headers_around(self, stmt: tirx.Stmt) -> Iterator[tirx.PrimExpr]:
        """Yield the conditions and extents in ``stmt`` that all threads evaluate."""
        if self._is_part(stmt):
            return
        yield from headers_of(stmt)
        for child in children_of(stmt):
            yield from self._headers_around(child)

    def _find_differing(self, stmt: tirx.Stmt, is_divergent: bool) -> None:
        if self._roles.is_divided(stmt):
            return
        is_divergent = is_divergent or any(map(self._differs, headers_of(stmt)))
        if isinstance(stmt, tirx.BufferStore) and is_private(stmt.buffer):
            if is_divergent or any(map(self._differs, [stmt.value, *stmt.indices])):
                self.differing.add(stmt.buffer.data)
        if isinstance(stmt, tirx.Bind) and self._differs(stmt.value):
            self.differing.add(stmt.var)
        for child in children_of(stmt):
            self._find_differing(child, is_divergent)

    def _differs(self, expr: tirx.PrimExpr) -> bool:
        names = _names_in(expr)
        if not names.isdisjoint(self.differing):
            return True
        if self._roles.thread not in names:
            return False
        moved = self._roles.for_consumers(tirx.Evaluate(expr)).value
        return not self._analyzer.can_prove_equal(expr, moved)

    def _grow(self, body: tirx.Stmt) -> None:
        """Add what the statements that the consumers execute assign, and what they need."""
        while True:
            before = len(self.kept)
            for part in self._parts_of(body):
                if self._roles.is_divided(part) or not self._is_kept(part):
                    continue
                accesses = accesses_of(part)
                self.kept |= {d for d, b in accesses.writes.items() if is_private(b)}
                self.kept |= _fragments_in(part) | (self.differing & _names_in(part))
                self.kept |= {part.var} if isinstance(part, tirx.Bind) else set()
            if len(self.kept) == before:
                return

    def verify(self, stmt: tirx.Stmt) -> None:
        """Refuse what producers execute, and the loops and conditions around them, if it reads
        what only the consumers have."""
        if is_specialized(stmt):
            for split in self._roles.splits_in(stmt):
                self._verify_reads(split.then_case)
        elif any(map(is_specialized, nodes_in(stmt, tirx.AttrStmt))):
            self._require_values(stmt, headers_of(stmt))
            for child in children_of(stmt):
                self.verify(child)

    def _verify_reads(self, stmt: tirx.Stmt) -> None:
        children = children_of(stmt)
        self._require_values(stmt, headers_of(stmt) if children else [stmt])
        for child in children:
            self._verify_reads(child)

    def _require_values(self, stmt: tirx.Stmt, nodes: list[tirx.PrimExpr | tirx.Stmt]) -> None:
        for name in self.kept & _names_in(*nodes):
            raise LanguageError(
                f"{name.name}: the producer warps of T.Pipelined read it, and only its other warps "
                f"have the value; expected shared memory instead of {name.name}, or T.serial "
                f"instead of T.Pipelined{location(stmt)}"
            )

    def guard(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Guard the parts of ``stmt`` that access what only the consumers have."""
        roles = self._roles
        if not self._is_part(stmt):
            return rewrite_children(stmt, self.guard)
        if roles.is_divided(stmt) or isinstance(stmt, tirx.Bind) or not self._is_kept(stmt):
            return stmt
        body = with_span_of(stmt, roles.for_consumers(stmt))
        return with_span_of(stmt, tirx.IfThenElse(roles.thread >= roles.producers, body, None))

    def _parts_of(self, stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
        """Yield the parts of ``stmt``, see ``_is_part``."""
        if self._is_part(stmt):
            yield stmt
            return
        for child in children_of(stmt):
            yield from self._parts_of(child)

    def _is_part(self, stmt: tirx.Stmt) -> bool:
        """Return whether one role executes ``stmt`` as a whole, or all threads do: a statement on
        tiles, one whose condition differs between threads, or what TileLang gives to the roles."""
        if self._roles.is_divided(stmt) or is_parallel(stmt) or not children_of(stmt):
            return True
        headers = headers_of(stmt)
        differs = any(map(self._differs, headers)) or bool(_fragments_in(*headers))
        return differs and not any(map(is_specialized, nodes_in(stmt, tirx.AttrStmt)))

    def _is_kept(self, part: tirx.Stmt) -> bool:
        return not self.kept.isdisjoint(_names_in(part))


def _private_in(*nodes: tirx.PrimExpr | tirx.Stmt) -> dict[tirx.Var, tirx.Buffer]:
    accesses = accesses_of(*nodes)
    return {d: b for d, b in (accesses.reads | accesses.writes).items() if is_private(b)}


def _fragments_in(*nodes: tirx.PrimExpr | tirx.Stmt) -> set[tirx.Var]:
    return {d for d, b in _private_in(*nodes).items() if b.scope() == "local.fragment"}


def _names_in(*nodes: tirx.PrimExpr | tirx.Stmt) -> set[tirx.Var]:
    """Return the variables in the nodes, and the private memory that they access."""
    return {*_private_in(*nodes), *(v for node in nodes for v in variables_in(node))}


def _sunk(stmt: tirx.Stmt, roles: WarpRoles, only_read: set[tirx.Var]) -> tirx.Stmt:
    """Move statements of the consumers into the specialized part after them, if they assign only
    private memory, on which nothing between depends, and read no memory that may change there."""
    if not isinstance(stmt, tirx.SeqStmt) or not any(map(is_specialized, stmt.seq)):
        return rewrite_children(stmt, lambda s: _sunk(s, roles, only_read))
    stmts = list(stmt.seq)
    at = next(i for i, s in enumerate(stmts) if is_specialized(s))
    loaded = accesses_of(*(split.then_case for split in roles.splits_in(stmts[at]))).writes
    stay: list[tirx.Stmt] = []
    sunk: list[tirx.Stmt] = []
    for inner in reversed(stmts[:at]):
        body = inner.then_case if roles.is_guarded(inner) else inner
        writes = accesses_of(inner).writes.keys()
        is_theirs = body is not inner or (writes and writes <= only_read)
        if is_theirs and _may_sink(body, stay, loaded.keys()):
            sunk.insert(0, body)
        else:
            stay.insert(0, inner)

    def change(split: tirx.IfThenElse) -> tirx.Stmt:
        consumers = flatten([*sunk, split.else_case])
        return with_span_of(split, tirx.IfThenElse(split.condition, split.then_case, consumers))

    part = roles.rewrite_splits(stmts[at], change) if sunk else stmts[at]
    return flatten([*stay, part, *stmts[at + 1 :]])


def _may_sink(stmt: tirx.Stmt, stay: list[tirx.Stmt], loaded: Set[tirx.Var]) -> bool:
    own, others = accesses_of(stmt), accesses_of(*stay)
    bound = {s.var for s in stay if isinstance(s, tirx.Bind)}
    changes = any(map(effects_in, stay)) or not all(map(is_private, others.writes.values()))
    return (
        all(map(is_private, own.writes.values()))
        and (not changes or all(map(is_private, own.reads.values())))
        and own.reads.keys().isdisjoint(loaded)
        and not effects_in(stmt)
        and bound.isdisjoint(variables_in(stmt))
        and own.writes.keys().isdisjoint(others.reads | others.writes)
        and own.reads.keys().isdisjoint(others.writes)
    )


def _guard_writes(body: tirx.Stmt, roles: WarpRoles) -> tirx.Stmt:
    """Guard assignments to global or shared memory, and atomics, before the specialized part."""
    scopes = filter(is_specialized, nodes_in(body, tirx.AttrStmt))
    threads = next(scopes).node[1]

    def conditions_of(stmt: tirx.Stmt) -> list[tirx.PrimExpr] | None:
        if roles.is_divided(stmt) or is_parallel(stmt):
            return None
        return [roles.thread < threads] if _writes_memory(stmt) or _changes_of(stmt) else []

    def check(stmt: tirx.Stmt) -> None:
        if needs_result(stmt) and (changes := _changes_of(stmt)):
            name = name_of(changes[0]) if builtin_of(changes[0]) else "atomic operation"
            raise LanguageError(
                f"{name}: its result is used before T.Pipelined, where more than "
                f"the program's {threads} threads run; expected a call under a condition on the "
                "thread index, such as if T.get_thread_binding() == 0, or after the loop"
                f"{location(stmt)}"
            )

    return guard_statements(body, conditions_of, check)


def _writes_memory(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.BufferStore) and not is_private(stmt.buffer)


def _changes_of(stmt: tirx.Stmt) -> list[tirx.Call]:
    """Return the calls that ``stmt`` itself evaluates, and that each thread executes for itself."""
    evaluated = [stmt] if is_leaf(stmt) else headers_of(stmt)
    return [call for node in evaluated for call in calls_in(node, _is_change)]


def _is_change(call: tirx.Call) -> bool:
    if op_name(call).startswith(_CHANGES):
        return True
    mark = mark_of(call)
    return mark is not None and mark.threads > 0 and writes(call)
