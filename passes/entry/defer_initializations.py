"""Run statements before a loop around T.Pipelined once, although TileLang moves them inside."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.target import Target

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.accesses import accesses_of, is_private, name_of
from ..ir.group import heap_tensors
from ..ir.leaves import leaves_of
from ..ir.memory_order import releases
from ..ir.operators import hold
from ..ir.pipelined_loops import is_pipelined, uses_tma
from ..ir.tma import may_have_producer
from ..ir.walk import (
    calls_in,
    children_of,
    effects_in,
    flatten,
    has_loads,
    location,
    op_name,
    rewrite_and_allocate,
)


def defer_initializations(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Defer fragment writes before loops around ``T.Pipelined`` to the first iteration.

    Warp specialization moves each statement that writes fragments or local variables of the
    consumers next to ``T.Pipelined``, through all loops and conditions between them. An accumulator
    is then cleared in every iteration, or never. This pass moves the statement there itself, under
    a flag that records whether it has run. If no iteration runs it, it runs before the statements
    after the loops, and in other branches. Local variables need no layout, so an operator that
    reads them keeps their statements in place instead.

    A statement is refused if it reads memory that is overwritten, or released to other blocks,
    before ``T.Pipelined``: TileLang would run it after that.

    Before: ``T.clear(acc); for step in range(4): for k in T.Pipelined(n): ...``
    After:  ``done = 0; hold(done); for step in range(4): if done == 0: T.clear(acc); done = 1;
    for k in T.Pipelined(n): ...``, and after the loop ``if done == 0: T.clear(acc); done = 1``
    """
    if not may_have_producer(target):
        return func
    path = _path_to_pipelined(func.body)
    if path is None:
        return func
    levels = _levels_of(path)
    _sort_statements(path, levels)
    _refuse_overtaken(levels, _overwritten_elsewhere(func))
    return func.with_body(_Rewriter(path, levels).rewrite(func.body, []))


@dataclass
class _Level:
    """A sequence of statements that contains ``T.Pipelined`` at some depth.

    Attributes:
        index: index of the statement that contains ``T.Pipelined``.
        crosses: whether a loop or a condition is between the sequence and ``T.Pipelined``.
        moved: statements before ``T.Pipelined`` that TileLang moves next to it, in order.
        held: local variables whose definitions TileLang would move as well.
    """

    seq: tirx.SeqStmt
    index: int
    crosses: bool
    moved: list[tirx.Stmt] = field(default_factory=list)
    held: list[tirx.PrimExpr] = field(default_factory=list)

    @property
    def before(self) -> list[tirx.Stmt]:
        return list(self.seq[: self.index])

    def is_moved(self, stmt: tirx.Stmt) -> bool:
        return any(stmt.same_as(s) for s in self.moved)


def _path_to_pipelined(stmt: tirx.Stmt) -> list[tirx.Stmt] | None:
    """Return the nested statements from ``stmt`` to the first loop that TileLang specializes."""
    if isinstance(stmt, tirx.For) and is_pipelined(stmt) and uses_tma(stmt):
        return [stmt]
    for child in children_of(stmt):
        path = _path_to_pipelined(child)
        if path is not None:
            return [stmt, *path]
    return None


def _levels_of(path: list[tirx.Stmt]) -> list[_Level]:
    """Return the sequences on ``path`` that the device executes. The values that the host binds,
    such as the rank, are parameters of the kernel."""
    launch = next((i for i, stmt in enumerate(path) if _is_launch(stmt)), 0)
    return [
        _Level(stmt, _index_of(path[i + 1], stmt), any(map(_may_repeat, path[i + 1 : -1])))
        for i, stmt in enumerate(path)
        if i >= launch and isinstance(stmt, tirx.SeqStmt)
    ]


def _is_launch(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` has an axis of the blocks or threads of a kernel."""
    if isinstance(stmt, tirx.AttrStmt):
        return stmt.attr_key == "thread_extent"
    return isinstance(stmt, tirx.For) and stmt.thread_binding is not None


def _index_of(child: tirx.Stmt, seq: tirx.SeqStmt) -> int:
    return next(i for i, s in enumerate(seq.seq) if s.same_as(child))


def _may_repeat(stmt: tirx.Stmt) -> bool:
    """Return whether the body of ``stmt`` may run more than once, or not at all."""
    if isinstance(stmt, tirx.For):
        return stmt.thread_binding is None
    return isinstance(stmt, (tirx.IfThenElse, tirx.While))


def _sort_statements(path: list[tirx.Stmt], levels: list[_Level]) -> None:
    """Find the statements that TileLang moves, in the same way as TileLang's pass.

    They write memory that the loop or a statement after it reads, and no statement that stays in
    place needs this memory.
    """
    needed = _names_in(path[-1], *(s for x in levels for s in x.seq[x.index + 1 :]))
    headers = [_header(s) for s in path[:-1]]
    stay = _private_reads(*(h for h in headers if h is not None))
    for level in reversed(levels):
        for stmt in reversed(level.before):
            if isinstance(stmt, tirx.Bind):
                if level.crosses and (has_loads(stmt.value) or effects_in(stmt.value)):
                    level.held.append(stmt.var)
                    stay |= _private_reads(stmt.value)
                elif stmt.var in needed:
                    needed |= _names_in(stmt.value)
                continue
            accesses = accesses_of(stmt)
            reads = {v for v, b in accesses.reads.items() if is_private(b)}
            writes = {v: b for v, b in accesses.writes.items() if is_private(b)}
            values = [b for b in writes.values() if b.scope() == "local.var"]
            if writes.keys().isdisjoint(needed) or (
                not writes.keys().isdisjoint(stay) or len(values) == len(writes)
            ):
                stay |= reads
                if not writes.keys().isdisjoint(needed):
                    needed |= _names_in(stmt)
                    if level.crosses:
                        level.held += [tirx.BufferLoad(b, [0] * len(b.shape)) for b in values]
            else:
                level.moved.insert(0, stmt)
                needed |= _names_in(stmt)


def _names_in(*nodes) -> set[tirx.Var]:
    """Return the private memory that the nodes read, and the names that they use."""
    names = _private_reads(*nodes)
    for node in nodes:
        tirx.stmt_functor.post_order_visit(
            node, lambda n: names.add(n) if isinstance(n, tirx.Var) else None
        )
    return names


def _private_reads(*nodes) -> set[tirx.Var]:
    return {v for v, b in accesses_of(*nodes).reads.items() if is_private(b)}


def _header(stmt: tirx.Stmt) -> tirx.PrimExpr | None:
    if isinstance(stmt, tirx.For):
        return stmt.min + stmt.extent
    return getattr(stmt, "condition", None)


def _overwritten_elsewhere(func: tirx.PrimFunc) -> set[tirx.Var]:
    """Return the tensors that another block may overwrite after a signal of this block."""
    written = accesses_of(func.body).writes.values()
    return {b.data for b in [*heap_tensors(func), *written] if b.scope() == "global"}


def _refuse_overtaken(levels: list[_Level], overwritten: set[tirx.Var]) -> None:
    """Refuse a moved statement if one that stays changes or releases the memory that it reads."""
    moved: list[tirx.Stmt] = []
    for level in levels:
        for stmt in level.before:
            if level.is_moved(stmt):
                moved.append(stmt)
                continue
            for early in moved:
                _refuse_conflict(early, stmt, overwritten)


def _refuse_conflict(early: tirx.Stmt, late: tirx.Stmt, shared: set[tirx.Var]) -> None:
    reads = accesses_of(early).reads
    published = [b for v, b in reads.items() if v in shared]
    for stmt in (leaf.stmt for leaf in leaves_of(late)):
        overwritten = [b for v, b in accesses_of(stmt).writes.items() if v in reads]
        release = next(iter(calls_in(stmt, releases)), None)
        if overwritten:
            name = overwritten[0].name
            cause, legal = f"{name_of(stmt)}, which writes {name}", "another buffer for one of them"
        elif published and release is not None:
            name, cause = published[0].name, f"{builtin_of(release).name}, which releases it"
            legal = f"{builtin_of(release).name} after the loop, or {name} copied to shared memory"
        else:
            continue
        raise LanguageError(
            f"{name_of(early)}: reads {name} before T.Pipelined, but warp specialization moves it "
            f"after {cause}; expected {legal}{location(early)}{location(stmt)}"
        )


@dataclass
class _Deferred:
    """Statements that run once, before ``T.Pipelined``, and the flag ``done`` that records it."""

    done: tirx.Buffer
    stmts: list[tirx.Stmt]

    def unless_done(self) -> tirx.Stmt:
        body = flatten([*self.stmts, self.set(1)])
        return tirx.IfThenElse(tirx.BufferLoad(self.done, [0]) == 0, body, None)

    def set(self, value: int) -> tirx.Stmt:
        return tirx.BufferStore(self.done, tirx.IntImm("int32", value), [0])


class _Rewriter:
    def __init__(self, path: list[tirx.Stmt], levels: list[_Level]) -> None:
        self._path = path
        self._levels = levels
        self._values: dict[tirx.Var, tirx.PrimExpr] = {}
        self._flags: list[tirx.Buffer] = []

    def rewrite(self, stmt: tirx.Stmt, deferred: list[_Deferred]) -> tirx.Stmt:
        """Rewrite a statement of the path; insert ``deferred`` before the pipelined loop."""
        if stmt.same_as(self._path[-1]):
            return flatten([*(d.unless_done() for d in deferred), stmt])
        level = next((x for x in self._levels if x.seq.same_as(stmt)), None)
        if level is None:
            return rewrite_and_allocate(stmt, lambda s: self._on_path(s, deferred), self._flags)
        after = list(level.seq[level.index + 1 :])
        child = level.seq[level.index]
        if not level.crosses:
            before = [*(d.unless_done() for d in deferred), *level.before]
            return flatten([*before, self.rewrite(child, []), *after])
        before: list[tirx.Stmt] = []
        for inner in level.before:
            if isinstance(inner, tirx.Bind) and not self._stays(inner, level):
                self._values[inner.var] = self._inline(inner.value)
            if not level.is_moved(inner):
                before.append(inner)
        before += [hold(value) for value in level.held]
        if not level.moved:
            return self._sequence(before, child, deferred, after)
        done = tirx.decl_buffer((1,), "int32", f"done_{len(self._flags)}", scope="local.var")
        self._flags.append(done)
        new = _Deferred(done, [self._inline(s) for s in level.moved])
        before += [new.set(0), hold(tirx.BufferLoad(done, [0]))]
        return self._sequence(before, child, [*deferred, new], after)

    def _stays(self, bind: tirx.Bind, level: _Level) -> bool:
        """Return whether TileLang does not move the definition of a name."""
        held = any(bind.var.same_as(v) for v in level.held)
        return held or op_name(bind.value) == "tl.launch_thread_idx"

    def _sequence(
        self,
        before: list[tirx.Stmt],
        child: tirx.Stmt,
        deferred: list[_Deferred],
        after: list[tirx.Stmt],
    ) -> tirx.Stmt:
        """Return a sequence that runs ``deferred`` in ``child``, or else before ``after``."""
        missed = [d.unless_done() for d in deferred]
        return flatten([*before, self.rewrite(child, deferred), *missed, *after])

    def _on_path(self, stmt: tirx.Stmt, deferred: list[_Deferred]) -> tirx.Stmt:
        """Rewrite a child of a statement of the path; another branch also runs ``deferred``."""
        if any(stmt.same_as(s) for s in self._path):
            return self.rewrite(stmt, deferred)
        return flatten([*(d.unless_done() for d in deferred), stmt])

    def _inline(self, node):
        """Replace names that are bound before the loops by their values.

        TileLang also moves the definitions of these names.
        """
        if not isinstance(node, tirx.Stmt):
            return self._inline(tirx.Evaluate(node)).value
        return tirx.stmt_functor.substitute(node, self._values)
