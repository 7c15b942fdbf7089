"""Thread-local memory that TileLang computes in the consumer warps only."""

import pytest
from tilelang import tvm
from tvm import tirx

import tileweave as tw
from tileweave.passes.device.verify_locals import verify_locals
from tileweave.passes.ir.warp_roles import SCOPE


def nested(depth, reads, iterations=None):
    """Return ``depth`` loops around a specialized part, in which only consumers compute ``row``.

    Args:
        reads: whether all warps read ``row`` after it.
        iterations: extent of a loop before the read, in which all warps compute ``row``; None if
            there is no such loop.
    """
    row, copy = (tirx.decl_buffer((1,), "int32", name, scope="local") for name in ("row", "copy"))
    thread = tirx.Var("tx", "int32")
    computed, copied = (
        tirx.BufferStore(row, 1, [0]),
        tirx.BufferStore(copy, tirx.BufferLoad(row, [0]) if reads else 1, [0]),
    )
    branch = tirx.IfThenElse(thread < 128, tirx.Evaluate(0), computed)
    scope = tirx.AttrStmt([128, 128], SCOPE, 0, branch)
    parts = [scope, copied]
    if iterations is not None:
        z = tirx.Var("z", "int32")
        parts.insert(1, tirx.For(z, 0, iterations, tirx.ForKind.SERIAL, computed))
    body = tirx.SeqStmt(parts)
    for level in range(depth):
        body = tirx.For(tirx.Var(f"i{level}", "int32"), 0, 2, tirx.ForKind.SERIAL, body)
    axis = tirx.IterVar(tvm.ir.Range(0, 256), thread, tirx.IterVar.ThreadIndex, "threadIdx.x")
    return tirx.PrimFunc([], tirx.AttrStmt(axis, "thread_extent", 256, body))


def test_the_time_does_not_double_with_each_loop():
    verify_locals(nested(40, False))
    with pytest.raises(tw.LanguageError, match=r"^row: TileLang moves"):
        verify_locals(nested(40, True))


def test_a_loop_that_may_run_zero_times_does_not_replace_a_value():
    verify_locals(nested(1, True, iterations=tirx.IntImm("int32", 1)))
    with pytest.raises(tw.LanguageError, match=r"^row: TileLang moves"):
        verify_locals(nested(1, True, iterations=tirx.Var("n", "int32")))
