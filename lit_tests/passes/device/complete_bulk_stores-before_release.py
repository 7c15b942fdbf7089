# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""TMA and bulk stores complete before a release; without stores in flight, no wait is added."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def tma(S: W.Symmetric((128, 128), "bfloat16"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((128, 128), "bfloat16")
        T.clear(tile)
        T.copy(tile, S[1, 0, 0])
        W.signal(F[1, 0])
        W.signal(F[1, 1])


# All threads wait, including the issuing one; at the second signal no store is in flight.
# CHECK-LABEL: TEST: tma
# CHECK: tl::tma_store_wait<0, true>();
# CHECK-NEXT: }
# CHECK-NEXT: tw::complete_bulk_stores();
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal
# CHECK-NOT: complete_bulk_stores
# CHECK: tw::signal
show(tma)

# Without TMA the copy uses ordinary stores.
# CHECK-LABEL: TEST: tma
# CHECK-NOT: complete_bulk_stores
# CHECK: tw::signal
show(tma, arch="sm_80")


@T.prim_func
def plain(S: W.Symmetric((128,), "float32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        S[1, T.get_thread_binding()] = 1.0
        W.signal(F[1, 0])


# CHECK-LABEL: TEST: plain
# CHECK-NOT: complete_bulk_stores
# CHECK: tw::signal
show(plain)


@T.prim_func
def loop(S: W.Symmetric((128, 128), "bfloat16"), F: W.Symmetric((8,), "uint32"), n: T.int32):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((128, 128), "bfloat16")
        T.clear(tile)
        for i in T.serial(n):
            W.signal(F[1, i])
            T.copy(tile, S[1, 0, 0])


# The store of an iteration reaches the signal of the next one.
# CHECK-LABEL: TEST: loop
# CHECK: for (int {{[a-z_0-9]+}} = 0; {{.*}} < n;
# CHECK-NEXT: tw::complete_bulk_stores();
# CHECK: tw::signal
# CHECK: tma_store(
show(loop)


@T.prim_func
def deferred(S: W.Symmetric((128, 128), "bfloat16"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((128, 128), "bfloat16")
        T.clear(tile)
        T.tma_copy(tile, S[1, 0, 0])
        W.signal(F[1, 0])
        T.tma_copy(tile, S[2, 0, 0])
        T.tma_store_wait(0, read=False)
        W.signal(F[2, 0])


# CHECK-LABEL: TEST: deferred
# CHECK: tma_store(
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal
# CHECK: tma_store(
# CHECK: tl::tma_store_wait<0, false>();
# CHECK-NOT: complete_bulk_stores
# CHECK: tw::signal
show(deferred)


@T.prim_func
def branches(S: W.Symmetric((512, 128), "bfloat16"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(4, threads=128) as bx:
        tile = T.alloc_shared((128, 128), "bfloat16")
        T.clear(tile)
        if bx > 1:
            T.tma_copy(tile, S[1, bx * 128, 0])
            T.tma_store_wait(0, read=False)
        else:
            T.atomic_add(S[1, bx * 128, 0], tile, use_tma=True)
        W.signal(F[1, 0])


# Only one branch waits.
# CHECK-LABEL: TEST: branches
# CHECK: tl::tma_store_wait<0, false>();
# CHECK: tl::tma_store_add(
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal
show(branches)
