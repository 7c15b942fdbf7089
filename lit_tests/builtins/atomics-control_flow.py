# RUN: %python %s | %filecheck %s
"""Atomics, loads and stores work in macros, branches and pipelined loops, specialized or not."""

import tilelang
import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.macro
def count(F, i):
    W.red_add(F[i], 1)


@T.prim_func
def gemm(
    A: T.Tensor((512, 512), "bfloat16"),
    B: T.Tensor((512, 512), "bfloat16"),
    F: T.Tensor((64,), "uint32"),
    G: T.Tensor((64,), "uint32"),
):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        As = T.alloc_shared((128, 64), "bfloat16")
        Bs = T.alloc_shared((64, 128), "bfloat16")
        Cl = T.alloc_fragment((128, 128), "float32")
        old = T.alloc_local((1,), "uint32")
        T.clear(Cl)
        for k in T.Pipelined(8, num_stages=2):
            T.copy(A[by * 128, k * 64], As)
            T.copy(B[k * 64, bx * 128], Bs)
            if W.ld(G[k], scope="sys", sem="relaxed") > 3:
                count(F, 7)
            if T.get_thread_binding() == 0:
                old[0] = W.atom_add(F[k], 1)
                W.st(G[old[0]], old[0])
            T.gemm(As, Bs, Cl)


# The first consumer thread executes them once in each stage.
# CHECK-LABEL: TEST: specialized
# CHECK: tl::tma_load(
# CHECK-NOT: tw::
# CHECK: } else {
# CHECK: for (int [[K:k_1]] = 0; [[K]] < 8; ++[[K]]) {
# CHECK-NEXT: if ((uint)3 < tw::ld<tw::Scope::sys, tw::Sem::relaxed, 1>((&(G[[[K]]])))) {
# CHECK-NEXT: tw::red_add<tw::Type::u32, tw::Scope::gpu, tw::Sem::relaxed>((&(F[7])), (uint)1);
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK-NEXT: old[0] = tw::atom_add<tw::Type::u32, tw::Scope::gpu, tw::Sem::relaxed>((&(F[[[K]]])), (uint)1);
# CHECK-NEXT: tw::st<tw::Scope::gpu, tw::Sem::relaxed>((&(G[old[0]])), old[0]);
# CHECK-NOT: tw::
show(gemm, "specialized")

# Seven stages are in the loop; the last one is after it.
# CHECK-LABEL: TEST: unspecialized
# CHECK: for (int k = 0; k < 7; ++k) {
# CHECK: if ((uint)3 < tw::ld<tw::Scope::sys, tw::Sem::relaxed, 1>((&(G[k])))) {
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: old[0] = tw::atom_add<{{.*}}>((&(F[k])), (uint)1);
# CHECK: tw::ld<tw::Scope::sys, tw::Sem::relaxed, 1>((&(G[7])))
# CHECK: tw::atom_add<{{.*}}>((&(F[7])), (uint)1);
# CHECK-NOT: tw::atom_add
with tilelang.transform.PassContext(config={"tl.disable_warp_specialized": True}):
    show(gemm, "unspecialized")

# CHECK-LABEL: TEST: ampere
# CHECK: for (int k = 0; k < 7; ++k) {
# CHECK: tl::cp_async
# CHECK: tw::atom_add<{{.*}}>((&(F[k])), (uint)1);
show(gemm, "ampere", arch="sm_80")
