"""Buffers that a statement reads and writes, by their data pointers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx

from . import origin
from .walk import calls_in, effects_in, nodes_in, op_name

REGIONS = ("tl.region", "tl.access_ptr")
"""Operators that name a box of memory and its access mode."""
READS, WRITES = 1, 2
"""Bits of an access mode."""


@dataclass
class Accesses:
    """Buffers that statements read and write, each by its data pointer."""

    reads: dict[tirx.Var, tirx.Buffer] = field(default_factory=dict)
    writes: dict[tirx.Var, tirx.Buffer] = field(default_factory=dict)

    def add(self, node) -> None:
        """Add the buffers that the statement or expression ``node`` accesses."""
        for _, buffer, mode in touches_in(node):
            if mode & READS:
                self.reads[buffer.data] = buffer
            if mode & WRITES:
                self.writes[buffer.data] = buffer


Touch = tuple[tirx.Call | tirx.BufferStore | tirx.BufferLoad, tirx.Buffer, int]
"""A node that accesses memory, the buffer, and ``READS``, ``WRITES`` or both."""


def touches_in(node) -> list[Touch]:
    """Return the accesses of a statement or expression: regions first, then single elements.

    A load that only names the start of a region is part of the region.
    """
    regions: list[Touch] = []
    elements: list[Touch] = []
    starts: set[tirx.BufferLoad] = set()
    for n in nodes_in(node, tirx.Call, tirx.BufferStore, tirx.BufferLoad):
        if op_name(n) in REGIONS and isinstance(n.args[0], tirx.BufferLoad):
            starts.add(n.args[0])
            regions.append((n, n.args[0].buffer, mode_of(n)))
        elif isinstance(n, tirx.BufferStore):
            elements.append((n, n.buffer, WRITES))
        elif isinstance(n, tirx.BufferLoad):
            elements.append((n, n.buffer, READS))
    return [*regions, *(e for e in elements if e[0] not in starts)]


def mode_of(region: tirx.Call) -> int:
    """Return the access mode of an operator of ``REGIONS``; both bits if it is unknown."""
    mode = region.args[1] if op_name(region) == "tl.region" else region.args[-1]
    return int(mode) if isinstance(mode, tirx.IntImm) else READS | WRITES


def written_tensors(body: tirx.Stmt) -> set[tirx.Var]:
    """Return the data pointers of the tensors that a program writes."""
    return set(accesses_of(body).writes)


def accesses_of(*nodes) -> Accesses:
    """Return the buffers that statements or expressions access."""
    accesses = Accesses()
    for node in nodes:
        accesses.add(node)
    return accesses


def is_private(buffer: tirx.Buffer) -> bool:
    """Return whether each thread has its own part of ``buffer``, as of fragments and variables."""
    return buffer.scope().startswith("local")


def name_of(stmt: tirx.Stmt) -> str:
    """Return the name of ``stmt`` for messages: a builtin or what it is inserted for, a TileLang
    operator, or an assignment."""
    for call in effects_in(stmt):
        return origin.name_of(call)
    for call in calls_in(stmt, lambda c: op_name(c).startswith("tl.tileop.")):
        return "T." + op_name(call).removeprefix("tl.tileop.")
    return "assignment to " + next((b.name for b in accesses_of(stmt).writes.values()), "memory")
