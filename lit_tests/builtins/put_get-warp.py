# RUN: %python %s | %filecheck %s
"""The lanes of the warp that reaches a warp copy execute it."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def warps(A: T.Tensor((4, 4096), "float32"), S: W.Symmetric((4, 4096), "float32"), n: T.int32):
    with T.Kernel(1, threads=128):
        warp = T.get_thread_binding() // 32
        W.put_warp(A[warp, 0], S[0, warp, 0], n, peer=1)
        if warp == 3:
            W.get_warp(S[0, 0, 0], A[0, 0], n, peer=2)


# CHECK-LABEL: TEST: warps
# CHECK: tw::put_warp({{.*}}, n, ((int)threadIdx.x));
# CHECK-NOT: sync
# CHECK: if ((((int)threadIdx.x) >> 5) == 3) {
# CHECK-NEXT: tw::get_warp((&(S[536870912])), (&(A[0])), n, ((int)threadIdx.x));
show(warps)
