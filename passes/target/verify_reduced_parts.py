"""Refuse reductions of a part of a fragment, which TileLang extends to all elements."""

from __future__ import annotations

from tvm import tirx
from tvm.arith import Analyzer

from ...builtins.errors import LanguageError
from ..ir.walk import children_of, location, op_name

_REDUCE = "tl.tileop.reduce"
_OPERANDS = 2


def verify_reduced_parts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse ``T.reduce_sum`` and similar operations between parts of fragments.

    TileLang ignores the parts: it reduces all elements, and writes all results. A part of a tile in
    shared memory is first copied to a fragment of its size, so only its result may be wrong.

    Before: ``T.reduce_sum(x[:, 0:16], total, dim=1)`` with a fragment ``x`` of 32 columns
    After:  LanguageError; legal programs stay unchanged
    """

    def visit(stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) == _REDUCE:
            for region in stmt.value.args[:_OPERANDS]:
                _verify(region, stmt)
        for child in children_of(stmt):
            visit(child)

    visit(func.body)
    return func


def _verify(region: tirx.Call, stmt: tirx.Evaluate) -> None:
    start, _, *extents = region.args
    equal, shape = Analyzer().can_prove_equal, start.buffer.shape
    if all(equal(extent, size) for extent, size in zip(extents, shape, strict=True)):
        return
    name, sizes = start.buffer.name, tuple(map(int, shape))
    raise LanguageError(
        f"T.reduce: a part of the fragment {name} of shape {sizes}, of which TileLang reduces or "
        "writes all elements; expected a part of a tile in shared memory, or a fragment of the "
        f"size of the part{location(stmt)}"
    )
