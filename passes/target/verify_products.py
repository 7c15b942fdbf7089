"""Refuse products whose inner extent is smaller than what tensor cores read of a row."""

from __future__ import annotations

from tvm import DataType, tirx

from ...builtins.errors import LanguageError
from ..ir.walk import children_of, location, op_name

_PRODUCTS = ("tl.tileop.gemm", "tl.tileop.gemm_py")
_INNER = 7
"""Position of the inner extent in the arguments of a product."""
_ROW_BYTES = 32
"""Bytes of a row of an operand in one instruction, for all types of elements."""


def verify_products(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse ``T.gemm`` whose rows are not a multiple of 32 bytes.

    TileLang compiles ``T.gemm`` of shorter rows, such as of 16 elements of fp8, but the
    instructions load 32 bytes of each row: they overwrite other registers.

    Before: ``T.gemm(A, B, C, transpose_B=True)`` with tiles ``A`` and ``B`` of 64 x 16 in fp8
    After:  LanguageError; legal programs stay unchanged
    """

    def visit(stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) in _PRODUCTS:
            _verify(stmt)
        for child in children_of(stmt):
            visit(child)

    visit(func.body)
    return func


def _verify(stmt: tirx.Evaluate) -> None:
    operand, inner = stmt.value.args[0].args[0].buffer, int(stmt.value.args[_INNER])
    elements = _ROW_BYTES * 8 // DataType(str(operand.dtype)).bits
    if inner % elements:
        raise LanguageError(
            f"T.gemm: the inner extent of {operand.name} is {inner}; expected a multiple of "
            f"{elements}, which tensor cores read of each row of {operand.dtype}{location(stmt)}"
        )
