"""Control flow that may differ between the threads of a block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum

from tvm import tirx

from ...builtins.ranks import HOST_VALUES
from ...builtins.spec import builtin_of
from .accesses import is_private
from .origin import ORIGIN
from .walk import (
    children_of,
    has_effect,
    headers_of,
    is_leaf,
    nodes_in,
    op_name,
    rewrite_children,
)

THREAD_INDICES = frozenset(
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
"""TileLang's operators whose result depends on the index of the thread."""
BREAKS = frozenset({"tl.loop_break", "tirx.break_loop"})
CONTINUE = frozenset({"tirx.continue_loop"})
RETURN = frozenset({"tirx.thread_return"})
_VOTES = frozenset({"tl.syncthreads_and", "tl.syncthreads_or", "tl.syncthreads_count"})
_REDUCTION = re.compile(r"tl::AllReduce<[^>]*?, (\d+), 1,")


class Divergence(IntEnum):
    """Degree to which the threads of a block may differ in a value, or in the path they take."""

    UNIFORM = 0
    MAYBE_DIVERGENT = 1
    DIVERGENT = 2


class ThreadControl:
    """Analysis of the variables that depend on the thread index, in program order.

    A register is uniform if every value that is stored to it is uniform and all threads reach every
    store. A load of global memory is assumed to be uniform, because programs load tile indices and
    counts. The analysis does not know whether another rank changes that memory at the same time.

    Attributes:
        threads: thread indices, x first, of the last entered kernel; a program may have several.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.threads: list[tirx.Var] = []
        self._divergence: dict[tirx.Var, Divergence] = {}
        self._registers: dict[tirx.Var, Divergence] = {}
        self._jumps = {op_name(stmt.value) for stmt in nodes_in(func.body, tirx.Evaluate)}
        self._stored: dict[tirx.Stmt, list[tirx.Buffer]] = {}
        self._conditions: dict[tuple[tirx.Stmt, frozenset[str]], list[tirx.PrimExpr]] = {}
        """Conditions around the jumps with these names out of an iteration, by statement."""
        self._follow_registers(func.body)

    def bind(self, stmt: tirx.Bind) -> None:
        """Record a binding: the variable has the divergence of its value."""
        if op_name(stmt.value) == "tl.launch_thread_idx":
            self.threads.append(stmt.var)
        self._divergence[stmt.var] = self.divergence_of(stmt.value)

    def enter(self, stmt: tirx.Stmt) -> Divergence:
        """Return the divergence that ``stmt`` itself causes for the statements inside it."""
        if isinstance(stmt, tirx.IfThenElse):
            return self.divergence_of(stmt.condition)
        if isinstance(stmt, tirx.While):
            return max(self.divergence_of(stmt.condition), self.of_breaks(stmt))
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            self._index(stmt.node.thread_tag, stmt.node.var)
        if not isinstance(stmt, tirx.For):
            return Divergence.UNIFORM
        if stmt.thread_binding is not None:
            self._index(stmt.thread_binding.thread_tag, stmt.loop_var)
            return Divergence.UNIFORM
        if stmt.kind == tirx.ForKind.PARALLEL:
            self._divergence[stmt.loop_var] = Divergence.DIVERGENT
            return Divergence.DIVERGENT
        self._divergence[stmt.loop_var] = self.divergence_of(stmt.min)
        bounds = max(self.divergence_of(stmt.min), self.divergence_of(stmt.extent))
        return max(bounds, self.of_breaks(stmt))

    def of_breaks(self, loop: tirx.For | tirx.While) -> Divergence:
        """Return the divergence of the conditions under which a jump ends ``loop``."""
        return self._of_jumps(loop.body, BREAKS | RETURN)

    def after(self, stmt: tirx.Stmt) -> Divergence:
        """Return the divergence that ``stmt`` causes for the statements after it in an iteration:
        that of the conditions under which it continues with the next one, or returns."""
        return self._of_jumps(stmt, CONTINUE | RETURN)

    def _of_jumps(self, stmt: tirx.Stmt, names: frozenset[str]) -> Divergence:
        if names.isdisjoint(self._jumps):
            return Divergence.UNIFORM
        if (stmt, names) not in self._conditions:
            self._conditions[stmt, names] = [c for _, each in jumps_in(stmt, names) for c in each]
        divergences = map(self.divergence_of, self._conditions[stmt, names])
        return min(max(divergences, default=Divergence.UNIFORM), Divergence.MAYBE_DIVERGENT)

    def _index(self, tag: str, variable: tirx.Var) -> bool:
        """Record a block or thread index; return whether it is a thread index."""
        if tag == "blockIdx.x":
            self.threads.clear()
        if not tag.startswith("threadIdx"):
            return False
        self.threads.append(variable)
        self._divergence[variable] = Divergence.DIVERGENT
        return True

    def divergence_of(self, expr: tirx.PrimExpr) -> Divergence:
        """Return the divergence of ``expr``. A call with effects may differ between threads."""
        divergence = Divergence.UNIFORM
        for node in nodes_in(expr, tirx.Var, tirx.Call, tirx.BufferLoad):
            if isinstance(node, tirx.Var):
                divergence = max(divergence, self._divergence.get(node, Divergence.UNIFORM))
            elif isinstance(node, tirx.Call):
                if op_name(node) in THREAD_INDICES:
                    divergence = Divergence.DIVERGENT
                elif not _is_fixed(node) and has_effect(node):
                    divergence = max(divergence, Divergence.MAYBE_DIVERGENT)
            elif is_private(node.buffer):
                register = self._registers.get(node.buffer.data, Divergence.UNIFORM)
                divergence = max(divergence, register)
        return divergence

    def _follow_registers(self, body: tirx.Stmt) -> None:
        before = None
        while self._registers != before:
            before = dict(self._registers)
            self._follow(body, Divergence.UNIFORM)

    def _follow(self, stmt: tirx.Stmt, divergence: Divergence) -> tirx.Stmt:
        if isinstance(stmt, tirx.Bind):
            self.bind(stmt)
        for buffer, stored in self._stores(stmt):
            self._differs(buffer, max(divergence, stored))
        divergence = max(divergence, self.enter(stmt))

        def follow(inner: tirx.Stmt) -> tirx.Stmt:
            nonlocal divergence
            self._follow(inner, divergence)
            divergence = max(divergence, self.after(inner))
            return inner

        return rewrite_children(stmt, follow)

    def _stores(self, stmt: tirx.Stmt) -> Iterator[tuple[tirx.Buffer, Divergence]]:
        """Yield the registers that a leaf statement stores, and the divergence of the values."""
        for buffer in self._stored_in(stmt) if is_leaf(stmt) else ():
            values = (stmt.value, *stmt.indices) if isinstance(stmt, tirx.BufferStore) else ()
            yield buffer, max(map(self.divergence_of, values), default=Divergence.MAYBE_DIVERGENT)

    def _stored_in(self, stmt: tirx.Stmt) -> list[tirx.Buffer]:
        """Return the registers that the leaf statements in ``stmt`` store."""
        if stmt not in self._stored:
            leaves = nodes_in(stmt, tirx.BufferStore, tirx.Evaluate)
            self._stored[stmt] = [buffer for leaf in leaves for buffer in _stored_by(leaf)]
        return self._stored[stmt]

    def _differs(self, buffer: tirx.Buffer, divergence: Divergence) -> None:
        divergence = max(self._registers.get(buffer.data, Divergence.UNIFORM), divergence)
        self._registers[buffer.data] = min(divergence, Divergence.MAYBE_DIVERGENT)


class RegisterFlow(ThreadControl):
    """Analysis of registers along one path through a program: a store replaces the divergence of a
    register, and a reduction or vote of all threads of a role is uniform in them. A load by a
    builtin is assumed to be uniform, like other loads of global memory.

    Args:
        team: number of threads of the role that computes.
    """

    def __init__(self, func: tirx.PrimFunc, team: int) -> None:
        self._team = team
        super().__init__(func)
        self._anywhere, self._registers = self._registers, {}

    def divergence_of(self, expr: tirx.PrimExpr) -> Divergence:
        """Return the divergence of ``expr`` at the current place."""
        if hasattr(expr, "a") and hasattr(expr, "b"):
            return max(self.divergence_of(expr.a), self.divergence_of(expr.b))
        if isinstance(expr, tirx.Cast):
            return self.divergence_of(expr.value)
        if isinstance(expr, tirx.Call) and self._is_shared(expr):
            return Divergence.UNIFORM
        if isinstance(expr, tirx.Call) and (spec := builtin_of(expr)) and spec.loads:
            return max(map(self.divergence_of, expr.args), default=Divergence.UNIFORM)
        return super().divergence_of(expr)

    def _is_shared(self, call: tirx.Call) -> bool:
        """Return whether all threads of the role get one result, whatever the operands are."""
        name = op_name(call)
        callee = call.args[0].value if name.endswith("_extern") else name
        reduction = _REDUCTION.match(callee)
        return name in _VOTES or (reduction is not None and int(reduction[1]) >= self._team)

    @property
    def state(self) -> dict[tirx.Var, Divergence]:
        """Copy of the divergence of the registers at the current place."""
        return dict(self._registers)

    def restore(self, state: dict[tirx.Var, Divergence]) -> None:
        """Continue from an earlier ``state``."""
        self._registers = dict(state)

    def join(self, state: dict[tirx.Var, Divergence]) -> None:
        """Continue after the current path or one that ended with ``state``."""
        for data, divergence in state.items():
            self._registers[data] = max(divergence, self._registers.get(data, Divergence.UNIFORM))

    def store(self, stmt: tirx.Stmt) -> None:
        """Record what a leaf statement stores to registers."""
        for buffer, divergence in self._stores(stmt):
            if all(int(extent) == 1 for extent in buffer.shape):
                self._registers.pop(buffer.data, None)
            self._differs(buffer, divergence)

    def enter_loop(self, stmt: tirx.Stmt) -> None:
        """Record that a loop begins: another iteration may have stored what its body stores."""
        self.join({b.data: self._anywhere[b.data] for b in self._stored_in(stmt)})

    def leave(self, stmt: tirx.Stmt) -> None:
        """Record that threads may differ in whether, or how often, they executed ``stmt``."""
        self.join({b.data: Divergence.MAYBE_DIVERGENT for b in self._stored_in(stmt)})


def _stored_by(stmt: tirx.BufferStore | tirx.Evaluate) -> list[tirx.Buffer]:
    """Return the registers that ``stmt`` stores, or passes to a call."""
    if isinstance(stmt, tirx.BufferStore):
        return [stmt.buffer] if is_private(stmt.buffer) else []
    arguments = [argument for call in nodes_in(stmt, tirx.Call) for argument in call.args]
    loads = [argument for argument in arguments if isinstance(argument, tirx.BufferLoad)]
    return [load.buffer for load in loads if is_private(load.buffer)]


def jumps_in(
    stmt: tirx.Stmt, names: frozenset[str] = BREAKS | CONTINUE | RETURN,
    conditions: tuple[tirx.PrimExpr, ...] = (),
) -> Iterator[tuple[tirx.Stmt, tuple[tirx.PrimExpr, ...]]]:  # fmt: skip
    """Yield each jump of these names that leaves an iteration of the loop around ``stmt``, and the
    conditions in ``stmt`` around it."""
    if isinstance(stmt, tirx.For | tirx.While):
        names &= RETURN
        conditions = *conditions, *headers_of(stmt)
    if not names:
        return
    if isinstance(stmt, tirx.IfThenElse):
        conditions = *conditions, stmt.condition
    for child in children_of(stmt):
        yield from jumps_in(child, names, conditions)
    if op_name(getattr(stmt, "value", None)) in names:
        yield stmt, conditions


def _is_fixed(call: tirx.Call) -> bool:
    """Return whether ``call`` returns one value to all threads of a launch: a value that the host
    binds, or the number of the launch, which all threads read before it changes. The compiler
    inserts no other load."""
    spec = builtin_of(call)
    if spec is not None and (spec.uniform or (spec.loads and ORIGIN in call.annotations)):
        return True
    return op_name(call) in HOST_VALUES
