"""Refuse values of single threads that TileLang passes to other threads of a specialized loop."""

from __future__ import annotations

from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Range

from ...builtins.errors import LanguageError
from ..ir.accesses import is_private
from ..ir.walk import arrows, children_of, headers_of, line_of, nodes_in, variables_in
from ..ir.warp_roles import WarpRoles, roles_of

_Name = tirx.Var
"""A bound name, or the data pointer of a local variable or array."""


def verify_thread_values(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse a value that depends on the thread index before the specialized part, and is read in
    it or after it.

    Before the specialized part the program's threads are the first ones of the block, after it they
    are those after the producers. A statement that TileLang moves there gets the other index. One
    that stays, because a statement before the specialized part also reads its result, does not:
    each thread has the value of another one.

    Raises:
        LanguageError: names the value, and the lines of the assignment and of the read.

    Before: ``v = x[tx]; y[tx] = v; T.attr([128, 128], "kWarpSpecializationScope", 0): ...; if tx >=
    128: z[tx - 128] = v``
    After:  LanguageError; legal programs stay unchanged
    """
    roles = roles_of(func)
    if roles is not None:
        _Verifier(roles).visit(func.body, False)
    return func


class _Verifier:
    """Visits the statements in order.

    Attributes:
        values: values that differ between a thread and its successor after the producers, and
            their assignments.
    """

    def __init__(self, roles: WarpRoles) -> None:
        self.roles = roles
        self.values: dict[_Name, tirx.Stmt] = {}
        self.analyzer = Analyzer()
        self.analyzer.bind(roles.thread, Range(roles.producers, 1 << 10))

    def visit(self, stmt: tirx.Stmt, is_divergent: bool) -> None:
        """Find the values that ``stmt`` assigns.

        Args:
            is_divergent: whether a condition around it depends on the thread index.
        """
        if self.roles.is_divided(stmt):
            return self._verify(stmt)
        is_divergent = is_divergent or any(map(self._depends, headers_of(stmt)))
        if isinstance(stmt, tirx.Bind) and self._depends(stmt.value):
            self.values[stmt.var] = stmt
        if isinstance(stmt, tirx.BufferStore) and _is_local(stmt.buffer):
            if is_divergent or self._depends(stmt.value):
                self.values[stmt.buffer.data] = stmt
        for inner in children_of(stmt):
            self.visit(inner, is_divergent)
        return None

    def _depends(self, expr: tirx.PrimExpr) -> bool:
        """Return whether ``expr`` has another value in the thread that executes the program after
        the producers."""
        if self._read_in(expr):
            return True
        if self.roles.thread not in variables_in(expr):
            return False
        moved = self.roles.for_consumers(tirx.Evaluate(expr)).value
        return not self.analyzer.can_prove_equal(expr, moved)

    def _read_in(self, node: tirx.PrimExpr | tirx.Stmt) -> list[_Name]:
        """Return the names in ``self.values`` that ``node`` reads."""
        nodes = nodes_in(node, tirx.Var, tirx.BufferLoad)
        names = [n.buffer.data if isinstance(n, tirx.BufferLoad) else n for n in nodes]
        return [name for name in names if name in self.values]

    def _verify(self, stmt: tirx.Stmt) -> None:
        """Refuse reads of values in ``stmt``, unless it assigns them first."""
        inner = children_of(stmt)
        for node in headers_of(stmt) if inner else [stmt]:
            for name in self._read_in(node):
                if isinstance(stmt, tirx.BufferStore) and stmt.buffer.data in self.values:
                    continue
                raise self._error(name, stmt)
        if isinstance(stmt, tirx.BufferStore):
            self.values.pop(stmt.buffer.data, None)
        for part in inner:
            self._verify(part)

    def _error(self, name: _Name, read: tirx.Stmt) -> LanguageError:
        places = [("assignment", line_of(self.values[name])), ("read", line_of(read))]
        return LanguageError(
            f"{name.name}: its value depends on the thread index, and is read before T.Pipelined "
            "and later, when warps with other indices execute the program; expected it to be "
            f"computed again, or shared memory{arrows(places)}"
        )


def _is_local(buffer: tirx.Buffer) -> bool:
    return is_private(buffer) and buffer.scope() != "local.fragment"
