"""Refuse kernels whose warps read thread-local memory that only other warps compute."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from tvm import tirx
from tvm.arith import Analyzer

from ...builtins.errors import LanguageError
from ..ir.walk import children_of, location, may_not_run, nodes_in, op_name
from ..ir.warp_roles import is_specialized, roles_of

_Memory = frozenset[tirx.Var]


class _State(NamedTuple):
    """Thread-local memory of the warps of one role, producer or consumer, at a statement.

    Attributes:
        stored: memory that these warps may have stored.
        foreign: memory whose latest value only the warps of the other role have, and names that
            are defined by it.
    """

    stored: _Memory = frozenset()
    foreign: _Memory = frozenset()


def verify_locals(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse reads of thread-local memory that only other warps have computed.

    With warp specialization, TileLang moves statements that compute thread-local memory, before and
    after a pipelined loop, to the consumer warps. Producer warps that read this memory then have an
    old value, or registers that no statement has written.

    Before: ``if tx < 128: tma_load(x, row[0]); else: row[0] = ...; multiply``
    After:  LanguageError; legal kernels stay unchanged
    """
    roles = roles_of(func)
    if roles is None:
        return func
    scopes = filter(is_specialized, nodes_in(func.body, tirx.AttrStmt))
    branches = [branch for scope in scopes for branch in roles.splits_in(scope)]
    splits = [branch for branch in branches if branch.else_case is not None]
    for own in (0, 1) if splits else ():
        is_own = tirx.Not(roles.is_producer) if own else roles.is_producer
        with roles.analyzer.constraint_scope(is_own):
            _Warps(own, splits, roles.analyzer).visit(func.body, _State(), True)
    return func


class _Warps:
    """Warps of one role.

    Attributes:
        own: case of the specialized parts that they run, 0 or 1.
        splits: branches of the specialized parts.
        analyzer: analyzer with the range of their thread index.
        others: memory that the warps of the other role store in the specialized parts.
        names: by each variable of a definition, memory without value for these warps in it.
    """

    def __init__(self, own: int, splits: list[tirx.IfThenElse], analyzer: Analyzer) -> None:
        self.own, self.splits, self.analyzer = own, splits, analyzer
        self.names: dict[tirx.Var, str] = {}
        self._stored_in, self._passed_in = cache(_stored_in), cache(_passed_in)
        self._may_not_run, self._is_excluded = cache(may_not_run), cache(self._excludes)
        others = (_cases(split)[1 - own] for split in splits)
        self.others = frozenset().union(*map(self._stored_in, others))

    def visit(self, stmt: tirx.Stmt, before: _State, check: bool) -> _State:
        """Return the state after ``stmt``. If ``check``, refuse illegal reads in it."""
        if isinstance(stmt, tirx.IfThenElse):
            return self._visit_branch(stmt, before, check)
        if isinstance(stmt, (tirx.For, tirx.While)):
            return self._visit_loop(stmt, before, check)
        inner = children_of(stmt)
        if inner:
            for part in inner:
                before = self.visit(part, before, check)
            return before
        if isinstance(stmt, tirx.Bind) and not nodes_in(stmt.value, tirx.Call):
            names = self._missing(stmt.value, before)
            self.names[stmt.var] = next(iter(names), "")
            own = frozenset({stmt.var})
            foreign = before.foreign | own if names else before.foreign - own
            return before._replace(foreign=foreign)
        if check:
            self._require(stmt, stmt, before)
        stored = self._stored_in(stmt)
        return _State(before.stored | stored, before.foreign - stored)

    def _visit_loop(self, stmt: tirx.For | tirx.While, before: _State, check: bool) -> _State:
        if check:
            # An iteration also begins with the state after another one. The state after the loop
            # does not depend on this, so one visit is sufficient without checks.
            before = _join(before, self.visit(stmt.body, before, False))
            is_while = isinstance(stmt, tirx.While)
            for expr in (stmt.condition,) if is_while else (stmt.min, stmt.extent):
                self._require(expr, stmt, before)
        after = self.visit(stmt.body, before, check)
        return _join(before, after) if self._may_not_run(stmt) else after

    def _visit_branch(self, stmt: tirx.IfThenElse, before: _State, check: bool) -> _State:
        if any(stmt.same_as(split) for split in self.splits):
            cases = _cases(stmt)
            after = self.visit(cases[self.own], before, check)
            own, other = map(self._stored_in, (cases[self.own], cases[1 - self.own]))
            return after._replace(foreign=after.foreign | (other - own))
        if self._missing(stmt.condition, before) and not self._acts(stmt):
            return before._replace(foreign=before.foreign | self._stored_in(stmt))
        if check:
            self._require(stmt.condition, stmt, before)
        if self._is_excluded(stmt.condition):
            return before if stmt.else_case is None else self.visit(stmt.else_case, before, check)
        cases = [case for case in _cases(stmt) if case is not None]
        after = [self.visit(case, before, check) for case in cases]
        return _join(*after, *([before] if stmt.else_case is None else []))

    def _excludes(self, condition: tirx.PrimExpr) -> bool:
        """Return whether ``condition`` is false for the indices of these warps."""
        if isinstance(condition, tirx.And):
            return self._excludes(condition.a) or self._excludes(condition.b)
        return self.analyzer.can_prove(tirx.Not(condition))

    def _acts(self, stmt: tirx.Stmt) -> bool:
        """Return whether these warps do more in ``stmt`` than assign to thread-local memory."""
        if isinstance(stmt, tirx.IfThenElse) and self._is_excluded(stmt.condition):
            return stmt.else_case is not None and self._acts(stmt.else_case)
        inner = children_of(stmt)
        if inner:
            return any(map(self._acts, inner))
        return not isinstance(stmt, tirx.BufferStore) or bool(
            nodes_in(stmt, tirx.Call) or not self._stored_in(stmt)
        )

    def _missing(self, node: tirx.PrimExpr | tirx.Stmt, state: _State) -> list[str]:
        """Return the names of the memory in ``node`` whose values these warps do not have."""
        missing = (self.others - state.stored - self._passed_in(node)) | state.foreign
        loads = [load.buffer for load in nodes_in(node, tirx.BufferLoad)]
        names = [buffer.name for buffer in loads if buffer.data in missing]
        bound = missing & self.names.keys()
        return names + [self.names[v] for v in nodes_in(node, tirx.Var) if v in bound]

    def _require(self, node: tirx.PrimExpr | tirx.Stmt, stmt: tirx.Stmt, state: _State) -> None:
        """Check that these warps have the value of each load in ``node``."""
        for name in self._missing(node, state):
            raise LanguageError(
                f"{name}: TileLang moves its computation to some of the warps of a pipelined "
                f"loop, and other warps read it; expected shared memory instead of {name}, or "
                f"T.serial instead of T.Pipelined{location(stmt)}"
            )


def _cases(branch: tirx.IfThenElse) -> tuple[tirx.Stmt, tirx.Stmt | None]:
    return branch.then_case, branch.else_case


def _join(*states: _State) -> _State:
    """Return what may be true if one of these states is."""
    return _State(*(frozenset().union(*memories) for memories in zip(*states, strict=True)))


def _stored_in(stmt: tirx.Stmt) -> _Memory:
    """Return the thread-local memory that ``stmt`` stores to, or whose address it passes to a
    call."""
    stores = nodes_in(stmt, tirx.BufferStore)
    return _local(store.buffer.data for store in stores) | _passed_in(stmt)


def _passed_in(node: tirx.PrimExpr | tirx.Stmt) -> _Memory:
    """Return the thread-local memory whose address is passed to a call."""
    calls = nodes_in(node, tirx.Call)
    addresses = [call for call in calls if op_name(call) == "tirx.address_of"]
    loads = [load for call in addresses for load in nodes_in(call, tirx.BufferLoad)]
    pointers = [call for call in calls if op_name(call).endswith("access_ptr")]
    variables = [value for call in pointers for value in call.args if isinstance(value, tirx.Var)]
    return _local([*(load.buffer.data for load in loads), *variables])


def _local(variables: Iterable[tirx.Var]) -> _Memory:
    """Return the variables that point to thread-local memory."""
    scopes = {v: getattr(v.type_annotation, "storage_scope", "") for v in variables}
    return frozenset(v for v, scope in scopes.items() if scope.startswith("local"))
