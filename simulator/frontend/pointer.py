"""Operands that are pointers to an element."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...passes.ir.walk import base_of
from ..machine.block import Frame
from ..memory.values import numpy_dtype
from ..report.errors import SimulationError, uninitialized, unsupported
from .accesses import GlobalRef, is_poisoned
from .expressions import Expr
from .statements import Statements

if TYPE_CHECKING:
    from .multimem_ops import MulticastRef


class Pointer:
    """A compiled ``T.access_ptr(tensor[index], ...)``."""

    def __init__(self, c: Statements, node: Any, op: str, loc: str) -> None:
        buffer, indices = c.pointee(node, loc)
        self.buffer, self.loc, self.op = buffer, loc, op
        self.dtype = numpy_dtype(buffer.dtype)
        self.index = c.indices([base_of(i) for i in indices], buffer.name, loc)
        self.slot = c.tiles.get(buffer.data, -1)
        if self.slot >= 0 or buffer.data in c.globals:
            self.index = c.in_whole(buffer, self.index, loc)
        self._name, self._memory = c.globals.get(buffer.data), c.memory_of(buffer)
        if self._name is None and self.slot < 0:
            raise self._unsupported()

    @cached_property
    def ref(self) -> GlobalRef:
        """Reference to the tensor in global memory.

        Raises:
            SimulationError: the pointer is not to global memory.
        """
        if self._name is None:
            raise self._unsupported()
        return GlobalRef(self._name, self.op, self.loc)

    def _unsupported(self) -> SimulationError:
        return unsupported(f"{self.op} of {self.buffer.name} in {self._memory} memory", self.loc)


def refuse_poison(frame: Frame, expr: Expr, pointer: Pointer | MulticastRef) -> None:
    if expr.poison is not None and is_poisoned(expr.poison(frame), frame):
        use = f"the operand of {pointer.op} on {pointer.buffer.name} is computed from"
        raise uninitialized(use, frame.block, pointer.loc)
