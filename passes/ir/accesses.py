"""Memory that a statement reads and writes, by the data pointers of its buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit

from ...builtins.spec import builtin_of
from .walk import calls_in, effects_in, op_name

REGIONS = ("tl.region", "tl.access_ptr")
"""Operators that name a box of memory and how it is accessed."""


@dataclass
class Accesses:
    """Buffers that statements read and write, each by its data pointer."""

    reads: dict[tirx.Var, tirx.Buffer] = field(default_factory=dict)
    writes: dict[tirx.Var, tirx.Buffer] = field(default_factory=dict)

    def add(self, node) -> None:
        """Add what the statement or expression ``node`` accesses."""
        bases: list[tirx.BufferLoad] = []

        def region(n) -> None:
            if op_name(n) in REGIONS and isinstance(n.args[0], tirx.BufferLoad):
                mode = n.args[1] if op_name(n) == "tl.region" else n.args[-1]
                buffer = n.args[0].buffer
                bases.append(n.args[0])
                if not isinstance(mode, tirx.IntImm) or int(mode) & 1:
                    self.reads[buffer.data] = buffer
                if not isinstance(mode, tirx.IntImm) or int(mode) & 2:
                    self.writes[buffer.data] = buffer

        def element(n) -> None:
            if isinstance(n, tirx.BufferStore):
                self.writes[n.buffer.data] = n.buffer
            elif isinstance(n, tirx.BufferLoad) and not any(n.same_as(b) for b in bases):
                self.reads[n.buffer.data] = n.buffer

        post_order_visit(node, region)
        post_order_visit(node, element)


def accesses_of(*nodes) -> Accesses:
    """Memory that statements or expressions access."""
    accesses = Accesses()
    for node in nodes:
        accesses.add(node)
    return accesses


def is_private(buffer: tirx.Buffer) -> bool:
    """Return whether each thread has its own part of ``buffer``: fragments and local variables."""
    return buffer.scope().startswith("local")


def name_of(stmt: tirx.Stmt) -> str:
    """Return what a program calls ``stmt``: its builtin, TileLang's operator, or an assignment."""
    for call in effects_in(stmt):
        return builtin_of(call).name
    for call in calls_in(stmt, lambda c: op_name(c).startswith("tl.tileop.")):
        return "T." + op_name(call).removeprefix("tl.tileop.")
    return "assignment to " + next((b.name for b in accesses_of(stmt).writes.values()), "memory")
