"""Complete bulk stores before the data that they wrote is published."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilelang import tvm
from tvm import tirx

from ...builtins.spec import builtin_of
from ..ir.operators import is_placeholder
from ..ir.walk import calls_in, flatten, is_async_store, nodes_in, op_name, rewrite_children


def complete_bulk_stores(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep each placeholder of ``order_releases`` that a TMA or bulk store reaches.

    The other placeholders are removed. TileLang ends a store with a wait for the *read* of shared
    memory, after which the data may still be in flight to the peer. A kept placeholder becomes a
    full ``cp.async.bulk.wait_group 0``. All threads execute it, including the issuing one, before
    the block barrier of the release.

    Before: ``T.tma_store(...); T.tma_store_wait(0, read=True); T.tileweave.complete_bulk_stores()``
    After:  the same; without the store, the placeholder is removed
    """
    pending = _Pending()
    pending.follow(func.body, frozenset(), frozenset())

    def resolve(stmt: tirx.Stmt) -> tirx.Stmt:
        if is_placeholder(stmt) and stmt not in pending.reached:
            return tirx.Evaluate(tirx.IntImm("int32", 0))
        if isinstance(stmt, tirx.SeqStmt):
            new = [resolve(s) for s in stmt.seq]
            return flatten([s for s in new if not _is_empty(s)] or new[:1])
        return rewrite_children(stmt, resolve)

    return func.with_body(resolve(func.body))


Path = frozenset[tuple[int, bool]]
"""Conditions on the thread index, each as its hash and whether it holds."""


@dataclass(frozen=True)
class _Store:
    """A bulk store that may be in flight.

    Attributes:
        path: conditions that hold in the issuing threads.
        committed: whether the store is in a group.
    """

    path: Path
    committed: bool = False


class _Pending:
    """Analysis of the bulk stores that may be in flight on every path through a function.

    A wait completes only the stores of its own thread: a wait under ``thread == 0`` completes the
    stores that were issued under ``thread == 0``. The other threads have no stores then.

    Attributes:
        reached: placeholders at which stores may be in flight.
    """

    def __init__(self) -> None:
        self.reached: set[tirx.Stmt] = set()
        self._indices: set[tirx.Var] = set()

    def follow(self, stmt: tirx.Stmt, stores: frozenset[_Store], path: Path) -> frozenset[_Store]:
        """Return the stores in flight after ``stmt``, given those before it."""
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                stores = self.follow(inner, stores, path)
            return stores
        if isinstance(stmt, tirx.IfThenElse):
            after = [
                self.follow(case, entering, path | condition) if case is not None else entering
                for case, holds in ((stmt.then_case, True), (stmt.else_case, False))
                for condition, entering in [self._take(stmt.condition, holds, stores)]
            ]
            return after[0] | after[1]
        if isinstance(stmt, (tirx.For, tirx.While)):
            after_iteration = self.follow(stmt.body, stores, path)
            return self.follow(stmt.body, after_iteration | stores, path) | stores
        if isinstance(stmt, tirx.AttrStmt):
            if stmt.attr_key == "thread_extent":
                self._indices.add(stmt.node.var)
            return self.follow(stmt.body, stores, path)
        if is_placeholder(stmt):
            if stores:
                self.reached.add(stmt)
            return frozenset()
        if isinstance(stmt, (tirx.Evaluate, tirx.Bind)):
            return _after_calls(stmt.value, stores, path)
        return stores

    def _take(self, condition: tirx.PrimExpr, holds: bool, stores: frozenset[_Store]) -> tuple:
        """Return the path's addition for one side of a condition, and the stores of that side."""
        if not self._is_on_indices(condition):
            return frozenset(), stores
        key = tvm.ir.structural_hash(condition)
        stores_of_side = frozenset(s for s in stores if (key, not holds) not in s.path)
        return frozenset({(key, holds)}), stores_of_side

    def _is_on_indices(self, condition: tirx.PrimExpr) -> bool:
        """Return whether ``condition`` always has the same value in a thread."""
        return all(
            node in self._indices
            if isinstance(node, tirx.Var)
            else op_name(node) == "tl.tl_shuffle_elect"
            for node in nodes_in(condition, tirx.Var, tirx.Call, tirx.BufferLoad)
        )


def _after_calls(expr: tirx.PrimExpr, stores: frozenset[_Store], path: Path) -> frozenset[_Store]:
    for call in calls_in(expr, lambda c: True):
        group = _group_role(call)
        if is_async_store(call):
            stores |= {_Store(path)}
        elif group == "commit":
            stores = frozenset(replace(s, committed=True) for s in stores)
        elif group == "wait":
            groups, read = int(call.args[0]), bool(call.args[1])
            if groups == 0 and not read:
                stores = frozenset(s for s in stores if not s.committed)
    return stores


_TMA_GROUPS = {"tl.tma_store_arrive": "commit", "tl.tma_store_wait": "wait"}


def _group_role(call: tirx.Call) -> str:
    spec = builtin_of(call)
    return spec.bulk_group if spec is not None else _TMA_GROUPS.get(op_name(call), "")


def _is_empty(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)
