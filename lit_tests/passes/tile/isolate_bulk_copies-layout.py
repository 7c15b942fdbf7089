# RUN: %python %s | %filecheck %s
"""Tiles of bulk copies are row-major and share no memory; an operand of a GEMM is refused."""

import tilelang.language as T

from tests.verdicts import print_verdict
from tests.verdicts import show_unordered as show
from tileweave import language as W


# The second tile is written during the store of the first one.
@T.prim_func
def apart(S: W.Symmetric((8192,), "float32"), A: T.Tensor((8192,), "float32")):
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((4096,), "float32")
        b = T.alloc_shared((4096,), "float32")
        for i in T.Parallel(4096):
            a[i] = A[i]
        W.bulk_store(S[1, 0], a, 4096)
        W.bulk_commit()
        for i in T.Parallel(4096):
            b[i] = A[i + 4096]
        W.bulk_store(S[1, 4096], b, 4096)
        W.bulk_commit()
        W.bulk_wait(0)


# CHECK-LABEL: TEST: apart
# CHECK-DAG: a = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK-DAG: b = ((void*)((char*)buf_dyn_shmem + 16384));
# CHECK: tw::bulk_store
show(apart)


# Without a bulk store TileLang reuses the memory of tiles.
@T.prim_func
def reused(S: T.Tensor((8192,), "float32"), A: T.Tensor((8192,), "float32")):
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((4096,), "float32")
        b = T.alloc_shared((4096,), "float32")
        for i in T.Parallel(4096):
            a[i] = A[i]
        for i in T.Parallel(4096):
            S[i] = a[4095 - i]
        for i in T.Parallel(4096):
            b[i] = A[i + 4096]
        for i in T.Parallel(4096):
            S[i + 4096] = b[4095 - i]
        if T.get_thread_binding() == 0:
            W.st(S[0], T.float32(0))


# CHECK-LABEL: TEST: reused
# CHECK-DAG: a = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK-DAG: b = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK: tw::st
show(reused)


@T.prim_func
def gemm(A: T.Tensor((128, 64), "bfloat16"), S: W.Symmetric((128, 128), "bfloat16")):
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((128, 64), "bfloat16")
        B_tile = T.alloc_shared((64, 128), "bfloat16")
        C_tile = T.alloc_shared((128, 128), "bfloat16")
        total = T.alloc_fragment((128, 128), "float32")
        T.copy(A, A_tile)
        T.clear(B_tile)
        T.gemm(A_tile, B_tile, total, clear_accum=True)
        T.copy(total, C_tile)
        W.bulk_store(S[1, 0, 0], C_tile, 128 * 128)
        W.bulk_commit()
        W.bulk_wait(0)


# The result is stored in row-major order, without a swizzle.
# CHECK-LABEL: TEST: gemm
# CHECK: C_tile){{.*}} * 128)
# CHECK-NOT: ^
# CHECK: tw::bulk_store
show(gemm)


@T.prim_func
def operand(A: T.Tensor((128, 64), "bfloat16"), S: W.Symmetric((128, 128), "bfloat16")):
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((128, 64), "bfloat16")
        B_tile = T.alloc_shared((64, 128), "bfloat16")
        total = T.alloc_fragment((128, 128), "float32")
        full = T.alloc_barrier(128)
        W.bulk_load(A_tile, A, 128 * 64, full[0])
        T.mbarrier_arrive(full[0])
        T.mbarrier_wait_parity(full[0], 0)
        T.clear(B_tile)
        T.gemm(A_tile, B_tile, total, clear_accum=True)
        T.copy(total, S[1, 0, 0])


# CHECK-LABEL: TEST: operand
# CHECK-NEXT: bulk copy: A_tile is also an operand of T.gemm, which needs a swizzled layout, but a bulk copy needs a row-major one; expected T.copy instead of the bulk copy, or separate tiles
# LINE: CHECK-NEXT: --> {{.*}}isolate_bulk_copies-layout.py:
with print_verdict("operand"):
    show(operand)
