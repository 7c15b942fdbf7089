"""Control flow that may differ between the threads of a block."""

from __future__ import annotations

from enum import IntEnum

from tvm import tirx

from ...builtins.ranks import HOST_VALUES
from ...builtins.spec import builtin_of
from .accesses import is_private
from .origin import ORIGIN
from .walk import calls_in, has_effect, nodes_in, op_name, rewrite_children

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
        self._follow_registers(func.body)

    def bind(self, stmt: tirx.Bind) -> None:
        """Record a binding: the variable has the divergence of its value."""
        if op_name(stmt.value) == "tl.launch_thread_idx":
            self.threads.append(stmt.var)
        self._divergence[stmt.var] = self.divergence_of(stmt.value)

    def enter(self, stmt: tirx.Stmt) -> Divergence:
        """Return the divergence that ``stmt`` itself causes for the statements inside it."""
        if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
            return self.divergence_of(stmt.condition)
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
        return max(self.divergence_of(stmt.min), self.divergence_of(stmt.extent))

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
        if isinstance(stmt, tirx.BufferStore) and is_private(stmt.buffer):
            values = (self.divergence_of(e) for e in (stmt.value, *stmt.indices))
            self._differs(stmt.buffer, max(divergence, *values))
        if isinstance(stmt, tirx.Evaluate):
            for call in calls_in(stmt.value, lambda c: True):
                for argument in call.args:
                    if isinstance(argument, tirx.BufferLoad) and is_private(argument.buffer):
                        self._differs(argument.buffer, Divergence.MAYBE_DIVERGENT)
        divergence = max(divergence, self.enter(stmt))
        return rewrite_children(stmt, lambda s: self._follow(s, divergence))

    def _differs(self, buffer: tirx.Buffer, divergence: Divergence) -> None:
        divergence = max(self._registers.get(buffer.data, Divergence.UNIFORM), divergence)
        self._registers[buffer.data] = min(divergence, Divergence.MAYBE_DIVERGENT)


def _is_fixed(call: tirx.Call) -> bool:
    """Return whether ``call`` returns one value to all threads of a launch: a value that the host
    binds, or the number of the launch, which all threads read before it changes. The compiler
    inserts no other load."""
    spec = builtin_of(call)
    if spec is not None and (spec.uniform or (spec.loads and ORIGIN in call.annotations)):
        return True
    return op_name(call) in HOST_VALUES
