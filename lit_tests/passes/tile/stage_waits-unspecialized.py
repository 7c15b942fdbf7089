# RUN: %python %s | %filecheck %s
"""Without warp specialization, a wait in a pipelined loop runs iterations ahead, like its loads."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


def gemm(between, name):
    @T.prim_func
    def program(
        S: W.Symmetric((512, 512), "float16"),
        B: T.Tensor((512, 512), "float16"),
        F: W.Symmetric((8,), "uint32"),
        C: T.Tensor((512, 512), "float16"),
    ):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            As = T.alloc_shared((128, 64), "float16")
            Bs = T.alloc_shared((64, 128), "float16")
            Cl = T.alloc_fragment((128, 128), "float32")
            T.clear(Cl)
            for k in T.Pipelined(8, num_stages=3):
                W.wait_reached(F[W.rank(), k], 5)
                T.copy(S[W.rank(), by * 128, k * 64], As)
                between(Cl, F, k)
                T.copy(B[k * 64, bx * 128], Bs)
                T.gemm(As, Bs, Cl)
            T.copy(Cl, C[by * 128, bx * 128])

    return program.with_attr("global_symbol", name)


@T.macro
def nothing(Cl, F, k):
    pass


@T.macro
def scale(Cl, F, k):
    for i, j in T.Parallel(128, 128):
        Cl[i, j] *= 2.0
    W.wait_ge(F[W.rank(), k], 6)


# Two iterations load before the loop, each after its own wait; the loop loads iteration k + 2.
# CHECK-LABEL: TEST: plain sm_80
# CHECK: __global__ void __launch_bounds__
# CHECK-NOT: cp_async_gs
# CHECK: tw::wait_reached
# CHECK: cp_async_gs
# CHECK: cp_async_commit
# CHECK-NOT: cp_async_gs
# CHECK: tw::wait_reached
# CHECK: cp_async_commit
# CHECK: for (int k = 0; k < 6
# CHECK-NEXT: tw::wait_reached{{.*}} + (int64_t)2)
# CHECK: cp_async_gs{{.*}}((k + 2) % 3)
# CHECK: mma_sync
# CHECK-NOT: tw::wait_reached
show(gemm(nothing, "plain"), arch="sm_80")

# Arithmetic between two loads stays in its iteration, after them; the second wait stays before the
# second load.
# CHECK-LABEL: TEST: between sm_80
# CHECK: for (int k = 0; k < 6
# CHECK-NEXT: tw::wait_reached
# CHECK: cp_async_gs
# CHECK: tw::wait_ge{{.*}} + (int64_t)2)
# CHECK: cp_async_gs
# CHECK: 0x1p+1f
# CHECK: mma_sync
show(gemm(scale, "between"), arch="sm_80")

# With warp specialization, TileLang does not use the schedule.
# CHECK-LABEL: TEST: plain sm_90a
# CHECK: < 128) {
# CHECK: tw::wait_reached
# CHECK: tl::tma_load
# CHECK: } else {
# CHECK-NOT: tw::wait_reached
show(gemm(nothing, "plain"), arch="sm_90a")


@T.prim_func
def forward(S: W.Symmetric((512, 512), "float16"), B: T.Tensor((512, 512), "float16")):
    with T.Kernel(4, threads=128) as bx:
        tile = T.alloc_shared((64, 64), "float16")
        sums = T.alloc_fragment((64, 64), "float32")
        T.clear(sums)
        for k in T.Pipelined(8, num_stages=3):
            W.put_block(B[k * 64, 0], S[0, k * 64, 0], 64, peer=W.rank() + 1)
            T.copy(S[W.rank(), bx * 64, k * 64], tile)
            for i, j in T.Parallel(64, 64):
                sums[i, j] += tile[i, j]
        T.copy(sums, B[bx * 64, 0])


# A builtin that writes another rank's copy of the loaded tensor stays with the computation.
# CHECK-LABEL: TEST: forward sm_80
# CHECK: __global__ void __launch_bounds__
# CHECK-NOT: tw::put_block
# CHECK: for (int k = 0; k < 6
# CHECK: tw::put_block((&(B[(k * 32768)]))
# CHECK: cp_async_gs{{.*}}((k + 2) % 3)
# CHECK: cp_async_wait
# CHECK: sums +
# CHECK: tw::put_block((&(B[196608]))
# CHECK: tw::put_block((&(B[229376]))
# CHECK-NOT: tw::put_block
show(forward, arch="sm_80")
