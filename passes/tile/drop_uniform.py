"""Replace ``W.rank_uniform`` by its operand before TileLang compiles the program."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.ranks import rank_uniform
from ...builtins.spec import declaration_of
from ..ir.walk import op_name, uses_op


def drop_uniform(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace each call by its operand, which is its result.

    TileLang cannot prove that all threads of a block receive the same result of an operator that it
    does not know. In a branch on it, TileLang moves barriers between accesses of shared memory out
    of the branch, where they no longer order these accesses.

    Before: ``if bx < T.tileweave.rank_uniform(num[0]): T.copy(X[bx, 0], tile); T.copy(tile, Y[bx,
    0])``
    After:  ``if bx < num[0]: T.copy(X[bx, 0], tile); T.copy(tile, Y[bx, 0])``
    """
    name = declaration_of(rank_uniform).op_name
    if not uses_op(func.body, name):
        return func

    def drop(call: tirx.Call) -> tirx.PrimExpr | None:
        return call.args[0] if op_name(call) == name else None

    return func.with_body(ir_transform(func.body, None, drop, ["tirx.Call"]))
