"""Publish data only after the whole block has finished it."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import tirx
from tvm.ir import structural_equal

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.block_barrier import is_sync_threads, sync_threads
from ..ir.guards import first_thread
from ..ir.memory_order import acquires, releases
from ..ir.operators import is_placeholder, placeholder
from ..ir.origin import hint_of, name_of
from ..ir.uniformity import ThreadControl
from ..ir.walk import (
    calls_in,
    effects_in,
    flatten,
    is_leaf,
    is_parallel,
    location,
    op_name,
    rewrite_children,
)


def order_releases(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a placeholder and a block barrier before each release.

    A release publishes what its own thread wrote or observed. With the barrier it covers the writes
    of the whole block. At the placeholder, bulk stores must be complete; ``complete_bulk_stores``
    keeps it if a bulk store reaches it.

    Both are placed before conditions on the thread index, where every thread arrives. A second
    placeholder inside the condition is for bulk stores of the releasing thread itself. A fence has
    no barrier, because it publishes only the accesses of its own thread. A loop in which the first
    thread only releases has one barrier before all iterations.

    Before: ``if thread == 0: T.tileweave.red_add(..., "release")``
    After:  ``T.tileweave.complete_bulk_stores(); T.sync_threads(); if thread == 0: ...``
    """
    control = ThreadControl(func)

    def order(stmt: tirx.Stmt) -> list[tirx.Stmt]:
        if isinstance(stmt, tirx.SeqStmt):
            out: list[tirx.Stmt] = []
            for number, inner in enumerate(stmt.seq):
                _append(out, order(inner))
                if control.after(inner):
                    _require_no_release(stmt.seq[number + 1 :])
            return out
        if isinstance(stmt, tirx.Bind):
            control.bind(stmt)
        if isinstance(stmt, tirx.While) and _releases_in(stmt.condition):
            (call, *_) = _releases_in(stmt.condition)
            raise LanguageError(
                f"{name_of(call)}: releases in the condition of a loop; expected a release in its "
                f"body{location(stmt)}"
            )
        if isinstance(stmt, tirx.For) and stmt.thread_binding is None and _releases_in(stmt):
            if _only_leader_releases(stmt, first_thread(control.threads)):
                return [placeholder(), sync_threads(), _without_barriers(stmt)]
        guarded = bool(control.enter(stmt))
        if not guarded and not is_leaf(stmt):
            return [rewrite_children(stmt, lambda s: flatten(order(s)))]
        release_calls = _releases_in(stmt)
        if not release_calls:
            return [stmt]
        fences_only = all(builtin_of(c).is_fence for c in release_calls)
        barrier = [] if fences_only else [sync_threads()]
        return [placeholder(), *barrier, _Branch().order(stmt) if guarded else stmt]

    return func.with_body(flatten(order(func.body)))


def _require_no_release(stmts: Iterable[tirx.Stmt]) -> None:
    """Refuse releases that a ``continue`` skips in some threads: no barrier can precede them."""
    for stmt in stmts:
        for call in _releases_in(stmt):
            if not builtin_of(call).is_fence:
                raise LanguageError(
                    f"{name_of(call)}: releases after a continue that some threads may execute; "
                    f"expected a condition around the rest of the iteration instead of continue"
                    f"{hint_of(call)}{location(stmt)}"
                )


class _Branch:
    """Statements under a condition that is false in some threads, where no barrier is possible."""

    def __init__(self) -> None:
        self._unordered_op = ""
        self._at_start = True

    def order(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if is_parallel(stmt):
            return stmt
        if isinstance(stmt, (tirx.For, tirx.While)):
            self._at_start = False
        if is_leaf(stmt):
            before = self._complete_before(stmt, stmt)
            self._at_start = False
            return flatten([*before, stmt])
        before = []
        if isinstance(stmt, tirx.IfThenElse):
            before = self._complete_before(stmt.condition, stmt)
        return flatten([*before, rewrite_children(stmt, self.order)])

    def _complete_before(self, node, stmt: tirx.Stmt) -> list[tirx.Stmt]:
        """Return a placeholder if ``node``, which ``stmt`` evaluates first, releases."""
        release = next(iter(_releases_in(node)), None)
        if release is not None and self._unordered_op:
            raise LanguageError(
                f"{name_of(release)}: releases after {self._unordered_op} under a condition that "
                "does not hold in every thread of the block; expected T.sync_threads() between "
                f"the two, or a release outside the condition{hint_of(release)}{location(stmt)}"
            )
        for call in calls_in(node, lambda c: True):
            name = op_name(call)
            if name.startswith("tl.tileop."):
                self._unordered_op = "T." + name.removeprefix("tl.tileop.")
            elif name == "tirx.tvm_storage_sync":
                self._unordered_op = ""
        return [placeholder()] if release is not None and not self._at_start else []


def _only_leader_releases(stmt: tirx.Stmt, leader: tirx.PrimExpr) -> bool:
    """Return whether ``stmt`` contains only block barriers and releases by the first thread."""
    if is_sync_threads(stmt):
        return True
    if isinstance(stmt, tirx.SeqStmt):
        return all(_only_leader_releases(s, leader) for s in stmt.seq)
    if isinstance(stmt, tirx.For):
        return stmt.thread_binding is None and _only_leader_releases(stmt.body, leader)
    if isinstance(stmt, tirx.Bind):
        return not effects_in(stmt)
    if not isinstance(stmt, tirx.IfThenElse) or effects_in(stmt.condition) or stmt.else_case:
        return False
    if not structural_equal(stmt.condition, leader):
        return _only_leader_releases(stmt.then_case, leader)
    only_releases = all(releases(c) and not acquires(c) for c in effects_in(stmt.then_case))
    return isinstance(stmt.then_case, tirx.Evaluate) and only_releases


def _without_barriers(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return ``stmt`` without the block barriers inside."""
    if isinstance(stmt, tirx.SeqStmt):
        return flatten([_without_barriers(s) for s in stmt.seq if not is_sync_threads(s)])
    return rewrite_children(stmt, _without_barriers)


def _append(out: list[tirx.Stmt], ordered: list[tirx.Stmt]) -> None:
    """Append ``ordered`` to ``out``, with one barrier instead of several consecutive ones.

    The barrier follows the placeholder, because a thread must complete its bulk stores before it
    synchronizes with the releasing thread.
    """
    if len(ordered) > 1 and is_placeholder(ordered[0]):
        has_barrier = is_sync_threads(ordered[1])
        while out and is_sync_threads(out[-1]):
            barrier = out.pop()
            if not has_barrier:
                ordered.insert(1, barrier)
                has_barrier = True
    out.extend(ordered)


def _releases_in(node) -> list[tirx.Call]:
    return calls_in(node, releases)
