"""Control flow that may differ between the threads of a block."""

from __future__ import annotations

from enum import IntEnum

from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit

from ...builtins.ranks import HOST_VALUES
from .accesses import is_private
from .walk import calls_in, has_effect, op_name, rewrite_children

_THREAD_OPS = frozenset(
    {
        "tl.tl_shuffle_elect",
        "tl.get_lane_idx",
        "tl.get_warp_idx",
        "tl.get_warp_idx_sync",
        "tl.get_warp_group_idx",
        "tl.activemask",
        "tl.launch_thread_idx",
    }
)


class Divergence(IntEnum):
    """How sure it is that the threads of a block differ in a value or in the way they take."""

    UNIFORM = 0
    MAYBE_DIVERGENT = 1
    DIVERGENT = 2


class ThreadControl:
    """Follows, from the top of ``func``, which variables depend on the thread index.

    A register is the same in all threads if every value stored to it is, and every store is reached
    by all threads. ``threads`` lists the thread indices, x first, of the kernel entered last: a
    program may hold several. A load of global memory is taken to be the same in all threads, as
    that of a tile index or a count is; whether another rank changes it meanwhile is unknown.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.threads: list[tirx.Var] = []
        self._divergence: dict[tirx.Var, Divergence] = {}
        self._registers: dict[tirx.Var, Divergence] = {}
        self._follow_registers(func.body)

    def bind(self, stmt: tirx.Bind) -> None:
        """Note a binding; its variable differs between threads if its value does."""
        if op_name(stmt.value) == "tl.launch_thread_idx":
            self.threads.append(stmt.var)
        self._divergence[stmt.var] = self.of(stmt.value)

    def enter(self, stmt: tirx.Stmt) -> Divergence:
        """How what stands inside ``stmt`` may differ between threads, by ``stmt`` alone."""
        if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
            return self.of(stmt.condition)
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            self._index(stmt.node.thread_tag, stmt.node.var)
        if not isinstance(stmt, tirx.For):
            return Divergence.UNIFORM
        tag = stmt.thread_binding.thread_tag if stmt.thread_binding is not None else ""
        if self._index(tag, stmt.loop_var):
            return Divergence.UNIFORM
        if stmt.kind == tirx.ForKind.PARALLEL:
            self._divergence[stmt.loop_var] = Divergence.DIVERGENT
            return Divergence.DIVERGENT
        return max(self.of(stmt.min), self.of(stmt.extent))

    def _index(self, tag: str, variable: tirx.Var) -> bool:
        """Note an index of blocks or threads; whether it is one of threads."""
        if tag == "blockIdx.x":
            self.threads.clear()
        if not tag.startswith("threadIdx"):
            return False
        self.threads.append(variable)
        self._divergence[variable] = Divergence.DIVERGENT
        return True

    def of(self, expr: tirx.PrimExpr) -> Divergence:
        """How ``expr`` may differ between threads: a call with effects may answer each its own."""
        found = Divergence.UNIFORM

        def visit(node):
            nonlocal found
            if isinstance(node, tirx.Var):
                found = max(found, self._divergence.get(node, Divergence.UNIFORM))
            elif isinstance(node, tirx.Call):
                if op_name(node) in _THREAD_OPS:
                    found = Divergence.DIVERGENT
                elif op_name(node) not in HOST_VALUES and has_effect(node):
                    found = max(found, Divergence.MAYBE_DIVERGENT)
            elif isinstance(node, tirx.BufferLoad) and is_private(node.buffer):
                found = max(found, self._registers.get(node.buffer.data, Divergence.UNIFORM))

        post_order_visit(expr, visit)
        return found

    def _follow_registers(self, body: tirx.Stmt) -> None:
        before = None
        while self._registers != before:
            before = dict(self._registers)
            self._follow(body, Divergence.UNIFORM)

    def _follow(self, stmt: tirx.Stmt, divergence: Divergence) -> tirx.Stmt:
        if isinstance(stmt, tirx.Bind):
            self.bind(stmt)
        if isinstance(stmt, tirx.BufferStore) and is_private(stmt.buffer):
            values = (self.of(e) for e in (stmt.value, *stmt.indices))
            self._differs(stmt.buffer, max(divergence, *values))
        if isinstance(stmt, tirx.Evaluate):
            for call in calls_in(stmt.value, lambda c: True):
                for argument in call.args:
                    if isinstance(argument, tirx.BufferLoad) and is_private(argument.buffer):
                        self._differs(argument.buffer, Divergence.MAYBE_DIVERGENT)
        divergence = max(divergence, self.enter(stmt))
        return rewrite_children(stmt, lambda s: self._follow(s, divergence))

    def _differs(self, buffer: tirx.Buffer, divergence: Divergence) -> None:
        found = max(self._registers.get(buffer.data, Divergence.UNIFORM), divergence)
        self._registers[buffer.data] = min(found, Divergence.MAYBE_DIVERGENT)
