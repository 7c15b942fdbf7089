# RUN: %python %s | %filecheck %s
"""Load, store, commit and wait that the whole block reaches need no explicit barriers or fences."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def sequence(A: T.Tensor((64, 4096), "bfloat16"), S: W.Symmetric((64, 4096), "bfloat16")):
    with T.Kernel(64, threads=128) as bx:
        tile = T.alloc_shared((4096,), "bfloat16")
        full = T.alloc_barrier(128)
        W.bulk_load(tile, A[bx, 0], 4096, full[0])
        T.mbarrier_arrive(full[0])
        T.mbarrier_wait_parity(full[0], 0)
        W.bulk_store(S[1, bx, 0], tile[0], 4096)
        W.bulk_commit()
        W.bulk_wait(0, read=True)


# CHECK-LABEL: TEST: sequence
# CHECK: tl::fence_proxy_async();
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::bulk_load((&(tile[0])), (&(A[{{.*}}])), 4096, (&(full[0])));
# CHECK-NEXT: }
# CHECK: full[0].arrive();
# CHECK: full[0].wait(0);
# CHECK: tl::fence_proxy_async();
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::bulk_store((&(S[{{.*}}536870912)])), (&(tile[0])), 4096);
# CHECK-NEXT: tw::bulk_commit();
# CHECK-NEXT: tw::bulk_wait<0, true>();
# CHECK-NEXT: }
# CHECK-NEXT: __syncthreads();
show(sequence)


@T.prim_func
def after_stores(A: T.Tensor((4096,), "float32"), S: W.Symmetric((4096,), "float32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "float32")
        for i in T.Parallel(4096):
            tile[i] = A[i] * 2.0
        W.bulk_store(S[1, 0], tile, 4096)
        W.bulk_commit()
        W.bulk_wait()


# After ordinary stores to the tile, each thread fences, the block synchronizes, and one thread stores.
# CHECK-LABEL: TEST: after_stores
# CHECK: *(float4*)(tile +
# CHECK: tl::fence_proxy_async();
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::bulk_store(
# CHECK: tw::bulk_wait<0, false>();
# CHECK-NEXT: }
# CHECK-NEXT: __syncthreads();
show(after_stores)


@T.prim_func
def guarded(A: T.Tensor((64, 4096), "uint8"), B: T.Tensor((64, 4096), "uint8"), n: T.int32):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((4096,), "uint8")
        full = T.alloc_barrier(1)
        if T.get_thread_binding() == 0:
            W.bulk_load(tile, A[0, 0], n * 16, full[0])
            T.mbarrier_arrive(full[0])
        T.mbarrier_wait_parity(full[0], 0)
        if T.get_thread_binding() == 0:
            W.bulk_store(B[0, 0], tile, n * 16)
            W.bulk_commit()
            W.bulk_wait(1)


# Under a condition on the thread index, the compiler adds nothing.
# CHECK-LABEL: TEST: guarded
# CHECK: guarded_kernel(
# CHECK-NOT: fence_proxy_async
# CHECK: tw::bulk_load((&(tile[0])), (&(A[0])), (n * 16), (&(full[0])));
# CHECK-NEXT: full[0].arrive();
# CHECK-NOT: fence_proxy_async
# CHECK: tw::bulk_store((&(B[0])), (&(tile[0])), (n * 16));
# CHECK-NEXT: tw::bulk_commit();
# CHECK-NEXT: tw::bulk_wait<1, false>();
# CHECK-NEXT: }
# CHECK-NEXT: }
show(guarded)


@T.prim_func
def in_two_dimensions(A: T.Tensor((4096,), "uint8"), S: W.Symmetric((4096,), "uint8")):
    with T.Kernel(1, threads=(32, 4)):
        tile = T.alloc_shared((4096,), "uint8")
        T.copy(A, tile)
        W.bulk_store(S[1, 0], tile, 4096)


# CHECK-LABEL: TEST: in_two_dimensions
# CHECK: if ((((int)threadIdx.x) == 0) && (((int)threadIdx.y) == 0)) {
# CHECK-NEXT: tw::bulk_store(
show(in_two_dimensions)
