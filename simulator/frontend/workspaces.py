"""Global memory that a program allocates for a launch, as implicit parameters."""

from __future__ import annotations

from tvm import tirx

from ...passes.ir.implicit import Implicit, with_implicit
from ...passes.ir.walk import line_of_span, nodes_in, rewrite_children, with_block
from ..report.errors import unsupported


def with_workspaces(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with an implicit parameter in place of each ``T.alloc_global``.

    Raises:
        SimulationError: an extent is not a constant.
    """
    blocks = nodes_in(func.body, tirx.SBlock)
    buffers = [b for block in blocks for b in block.alloc_buffers if b.scope() == "global"]
    if not buffers:
        return func
    for buffer in buffers:
        if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
            what = f"global memory {buffer.name} of shape {tuple(buffer.shape)}"
            raise unsupported(what, line_of_span(buffer.span) or str(func.attrs["global_symbol"]))
    implicit = [
        Implicit(b.name, False, tuple(map(int, b.shape)), str(b.dtype), scratch=True)
        for b in buffers
    ]
    return with_implicit(func.with_body(_without_allocations(func.body)), implicit, buffers)


def _without_allocations(stmt: tirx.Stmt) -> tirx.Stmt:
    new = rewrite_children(stmt, _without_allocations)
    if not isinstance(new, tirx.SBlockRealize):
        return new
    buffers = [b for b in new.block.alloc_buffers if b.scope() != "global"]
    return with_block(new, alloc_buffers=buffers)
