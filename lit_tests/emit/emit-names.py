# RUN: %python %s | %filecheck %s
"""The program keeps the name of its thread index, although TileLang renames it when it lowers a
T.gemm to mma."""

import tilelang
import tilelang.language as T
from tilelang import tvm

import tileweave as tw

F32 = "float32"


@T.prim_func
def gemm(A: T.Tensor((16, 16), F32), B: T.Tensor((16, 16), F32), C: T.Tensor((16, 16), F32)):
    with T.Kernel(1, threads=32):
        A_tile, B_tile = T.alloc_shared((16, 16), F32), T.alloc_shared((16, 16), F32)
        total = T.alloc_fragment((16, 16), F32)
        T.copy(A, A_tile)
        T.copy(B, B_tile)
        T.clear(total)
        T.gemm(A_tile, B_tile, total)
        T.copy(total, C)


tw.emit(gemm)
print("TEST: lowered by tw.emit")
print(tw.emit(gemm, stage="tile"))
# CHECK-LABEL: TEST: lowered by tw.emit
# CHECK: tx: T.int32 = T.launch_thread_idx(0)

target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
with target:
    tilelang.lower(gemm, target=target)
print("TEST: lowered by TileLang")
print(tw.emit(gemm, stage="tile"))
# CHECK-LABEL: TEST: lowered by TileLang
# CHECK: thread_binding: T.int32 = T.launch_thread_idx(0)
