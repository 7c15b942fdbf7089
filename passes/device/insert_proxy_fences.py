"""Make data visible to the TMA and to wgmma."""

from __future__ import annotations

import re

from tilelang import tvm
from tvm import tirx

from ...builtins.memory import fence_proxy_async
from ...builtins.spec import declaration_of
from ..ir.memory_order import acquires
from ..ir.origin import tensor_of
from ..ir.shared_memory.proxies import unfenced_accesses
from ..ir.walk import (
    calls_in,
    children_of,
    flatten,
    headers_of,
    is_async_load,
    is_async_store,
    is_leaf,
    nodes_in,
    rewrite_children,
    variables_in,
)

_ANY = "*"
"""Name of a bulk access that any wait may be for."""
_DESCRIPTOR = re.compile(r"_desc(_\d+)?$")
"""End of the name of the parameter with the TMA descriptor of a tensor."""


def insert_proxy_fences(func: tirx.PrimFunc, symmetric: set[str]) -> tirx.PrimFunc:
    """Insert a ``fence.proxy.async`` where the async proxy reads or writes what the generic proxy
    has accessed: after waits, and before products.

    The acquire of a wait orders the generic proxy, but the TMA reads and writes by the async proxy.
    The TMA must see the published data, and must not overwrite data that a peer still reads. Each
    wait that a TMA or bulk access may need has one fence. Pipeline stages have none, because a
    fence in each stage slows down a GEMM by several percent. Barriers acquire like waits.

    A wait that the compiler inserts for the read or write of a tensor concerns later bulk accesses
    to this tensor. It also proves that symmetric memory is free, so it concerns bulk stores to all
    tensors that others may read. The other waits concern all bulk accesses.

    ``cp.async`` and stores write shared memory by the generic proxy. By the async proxy, bulk
    stores and wgmma read it, and bulk loads overwrite it. TileLang inserts fences before reads, in
    the order of the text. So they are missing before loads, where other threads write, before an
    mbarrier or a barrier of both, and after ``cp.async``. Such accesses have a fence before them.

    Args:
        symmetric: names of the symmetric tensors.

    Before: ``T.tileweave.wait_ge(...); ... T.tma_load(...); ... T.warpgroup_arrive()``
    After:  ``T.tileweave.wait_ge(...); T.tileweave.fence_proxy_async(); ... T.tma_load(...); ...
    T.fence_proxy_async(); T.warpgroup_arrive()``
    """
    return func.with_body(_Fences(func, symmetric).insert(func.body, frozenset())[0])


class _Fences:
    """Inserts fences into the body of a function."""

    def __init__(self, func: tirx.PrimFunc, symmetric: set[str]) -> None:
        self._parameters = {_name(param) for param in func.params}
        self._observed = symmetric | self._read_tensors(func)
        self._accesses: dict[tirx.Stmt, frozenset[str]] = {}
        self._unfenced = unfenced_accesses(func)

    def insert(self, stmt: tirx.Stmt, follows: frozenset[str]) -> tuple[tirx.Stmt, frozenset[str]]:
        """Insert fences.

        Args:
            follows: names of the tensors that bulk accesses after ``stmt`` access.

        Returns:
            The statement, and the names of those that it or later bulk accesses access.
        """
        if isinstance(stmt, tirx.SeqStmt):
            out = []
            for inner in reversed(stmt.seq):
                new, follows = self.insert(inner, follows)
                out.append(new)
            return flatten(out[::-1]), follows
        before = follows | self._bulk_accesses(stmt)
        if is_leaf(stmt):
            return self._leaf(stmt, follows), before
        inner_follows = before if isinstance(stmt, (tirx.For, tirx.While)) else follows
        has_condition = isinstance(stmt, (tirx.IfThenElse, tirx.While))
        condition = stmt.condition if has_condition else tirx.const(True)

        def case(inner: tirx.Stmt) -> tirx.Stmt:
            new, accesses = self.insert(inner, inner_follows)
            if isinstance(stmt, tirx.While):
                accesses = self._bulk_accesses(inner)
            return flatten([_fence(), new]) if _needs_fence(condition, accesses) else new

        new = rewrite_children(stmt, case)
        leaves = isinstance(stmt, tirx.While) or getattr(stmt, "else_case", None) is None
        if leaves and _needs_fence(condition, follows):
            new = flatten([new, _fence()])
        return new, before

    def _leaf(self, stmt: tirx.Stmt, follows: frozenset[str]) -> tirx.Stmt:
        if stmt in self._unfenced:
            fence = tirx.call_intrin("handle", tvm.ir.Op.get("tl.fence_proxy_async"))
            return flatten([tirx.Evaluate(fence), stmt])
        return flatten([stmt, _fence()]) if _needs_fence(stmt, follows) else stmt

    def _bulk_accesses(self, stmt: tirx.Stmt) -> frozenset[str]:
        """Return the names of the tensors that bulk accesses in ``stmt`` access."""
        if stmt not in self._accesses:
            own = map(self._called, [stmt] if is_leaf(stmt) else headers_of(stmt))
            inner = map(self._bulk_accesses, children_of(stmt))
            self._accesses[stmt] = frozenset().union(*own, *inner)
        return self._accesses[stmt]

    def _called(self, node: tirx.Stmt | tirx.PrimExpr) -> set[str]:
        """Return the names of the tensors that bulk accesses in a leaf or expression access."""
        names: set[str] = set()
        for call in calls_in(node, lambda call: is_async_load(call) or is_async_store(call)):
            tensors = self._tensors_of(call)
            if not tensors or (is_async_store(call) and tensors & self._observed):
                names.add(_ANY)
            names |= tensors
        return names

    def _tensors_of(self, node) -> set[str]:
        return {_name(var) for var in variables_in(node)} & self._parameters

    def _read_tensors(self, func: tirx.PrimFunc) -> set[str]:
        """Return the names of the tensors that the function accesses other than by stores."""
        nodes = nodes_in(func.body, tirx.BufferLoad, tirx.Call)
        calls = [node for node in nodes if isinstance(node, tirx.Call) and not is_async_store(node)]
        names = {node.buffer.data.name for node in nodes if isinstance(node, tirx.BufferLoad)}
        for call in calls:
            pointers = [a for a in call.args if isinstance(a, tirx.Call) and a.dtype == "handle"]
            for node in [call] if is_async_load(call) else pointers:
                names |= self._tensors_of(node)
        return names


def _needs_fence(node: tirx.Stmt | tirx.PrimExpr, follows: frozenset[str]) -> bool:
    """Return whether an acquire in ``node`` may be for one of the bulk accesses ``follows``."""
    for call in calls_in(node, acquires) if follows else ():
        tensor = tensor_of(call)
        if tensor is None or tensor in follows or _ANY in follows:
            return True
    return False


def _name(var: tirx.Var) -> str:
    """Return the name of the tensor whose address or descriptor a variable has."""
    return _DESCRIPTOR.sub("", var.name)


def _fence() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("handle", declaration_of(fence_proxy_async).op))
