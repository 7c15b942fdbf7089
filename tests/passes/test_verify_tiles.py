"""Tiles of wgmma must begin where their swizzle repeats."""

import pytest
import tilelang.language as T
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

import tileweave as tw
from tileweave import language as W
from tileweave.emit import lowered
from tileweave.passes.device.verify_tiles import verify_tiles
from tileweave.passes.ir.walk import op_name


@T.prim_func
def multiply(
    A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"), flag: T.Tensor((1,), "uint32"),
):  # fmt: skip
    with T.Kernel(1, threads=128):
        A_tile, B_tile = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        T.clear(total)
        T.copy(A, A_tile)
        T.copy(B, B_tile)
        T.gemm(A_tile, B_tile, total, transpose_B=True)
        T.copy(total, C)
        W.red_add(flag[0], 1)


def moved(func, nbytes):
    """Return ``func`` with all buffers in shared memory ``nbytes`` later."""

    def later(call):
        if not op_name(call).endswith("handle_add_byte_offset"):
            return None
        data, offset = call.args
        return tirx.Call(call.dtype, call.op, [data, offset + nbytes])

    return func.with_body(ir_transform(func.body, None, later, ["tirx.Call"]))


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, True), (1024, True), (512, False)])
def test_offsets(nbytes, aligned):
    (func,) = lowered(multiply, "sm_90a", {}).device_mod.functions.values()
    if aligned:
        assert verify_tiles(moved(func, nbytes)) is not None
    else:
        with pytest.raises(tw.LanguageError, match=r"reads a tile from byte \d+ .* of 1024: give"):
            verify_tiles(moved(func, nbytes))
