"""Refuse operators and jumps that TileLang compiles wrongly, whatever the tiles are."""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.arith import Analyzer
from tvm.target import Target

from ...builtins.errors import LanguageError
from ..ir.jumps import verify_jumps
from ..ir.pipelined_loops import loop_name
from ..ir.tma import may_have_producer
from ..ir.walk import children_of, format_expr, headers_of, location, nodes_in, op_name

_PRODUCTS = ("tl.tileop.gemm", "tl.tileop.gemm_py")
_INNER = 7
"""Position of the inner extent in the arguments of a product."""
_ROW_BYTES = 32
"""Bytes of a row of an operand in one instruction, for all types of elements."""


def verify_operators(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Refuse ``T.gemm`` of short rows, ``T.reduce_sum`` and similar between parts of fragments,
    bounds of loops in shared memory, and jumps out of loops, see ``verify_jumps``.

    TileLang compiles ``T.gemm`` whose rows are not a multiple of 32 bytes, such as 16 elements of
    fp8, but the instructions load 32 bytes of each row: they overwrite other registers.

    If a reduction names a part of a fragment, TileLang reduces all elements, and writes all
    results. A part of a tile in shared memory is first copied to a fragment of its size, so only
    its result may be wrong.

    TileLang fails for a loop whose bounds it reads from shared memory.

    Before: ``T.gemm(A, B, C, transpose_B=True)`` with tiles ``A`` and ``B`` of 64 x 16 in fp8;
    ``T.reduce_sum(x[:, 0:16], total, dim=1)`` with a fragment ``x`` of 32 columns
    After:  LanguageError; legal programs stay unchanged
    """

    def visit(stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.Evaluate):
            if op_name(stmt.value) in _PRODUCTS:
                _verify_product(stmt)
            if op_name(stmt.value) == "tl.tileop.reduce":
                for region in stmt.value.args[:2]:
                    _verify_whole(region, stmt)
        if isinstance(stmt, tirx.For):
            _verify_bounds(stmt)
        for child in children_of(stmt):
            visit(child)

    verify_jumps(func, may_have_producer(target))
    visit(func.body)
    return func


def _verify_bounds(loop: tirx.For) -> None:
    loads = (load for header in headers_of(loop) for load in nodes_in(header, tirx.BufferLoad))
    for load in loads:
        if load.buffer.scope().startswith("shared"):
            name = format_expr(load)
            raise LanguageError(
                f"{loop_name(loop)}: the number of iterations depends on {name} in shared memory; "
                f"expected a variable: n = {name} before the loop, and n in place of {name}"
                f"{location(loop)}"
            )


def _verify_product(stmt: tirx.Evaluate) -> None:
    operand, inner = stmt.value.args[0].args[0].buffer, int(stmt.value.args[_INNER])
    elements = _ROW_BYTES * 8 // DataType(str(operand.dtype)).bits
    if inner % elements:
        raise LanguageError(
            f"T.gemm: the inner extent of {operand.name} is {inner}; expected a multiple of "
            f"{elements}, which tensor cores read of each row of {operand.dtype}{location(stmt)}"
        )


def _verify_whole(region: tirx.Call, stmt: tirx.Evaluate) -> None:
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
