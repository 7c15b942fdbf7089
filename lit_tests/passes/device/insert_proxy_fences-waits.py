# RUN: %python %s | %filecheck %s
"""One proxy fence follows each acquire before an access by the TMA."""

import tilelang.language as T

from tests import verdicts
from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def generic(
    F: W.Symmetric((8,), "uint32"),
    S: W.Symmetric((128,), "float32"),
    A: T.Tensor((128,), "float32"),
):
    with T.Kernel(1, threads=128):
        W.wait_ge(F[W.rank(), 0], 1)
        A[T.get_thread_binding()] = S[W.rank(), T.get_thread_binding()]


# CHECK-LABEL: TEST: generic
# CHECK: tw::wait_ge
# CHECK-NOT: fence_proxy_async
# CHECK: A[{{.*}}] = S[
show(generic)


@T.prim_func
def bulk(F: W.Symmetric((8,), "uint32"), S: W.Symmetric((4096,), "uint8"), n: T.int32):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        full = T.alloc_barrier(1)
        W.wait_ge(F[W.rank(), 0], 1)
        W.wait_ge(F[W.rank(), 1], 1, sem="relaxed")
        if n > 3:
            if T.get_thread_binding() == 0:
                W.bulk_load(tile, S[W.rank(), 0], 4096, full[0])
        W.wait_ge(F[W.rank(), 2], 1)


# No fence follows a relaxed wait, or the last wait, because no bulk access follows it.
# CHECK-LABEL: TEST: bulk
# CHECK: tw::wait_ge
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK-NEXT: tw::wait_ge<tw::Type::u32, tw::Scope::sys, tw::Sem::relaxed>
# CHECK-NOT: fence_proxy_async
# CHECK: tw::bulk_load(
# CHECK: tw::wait_ge
# CHECK-NOT: fence_proxy_async
# CHECK-LABEL: TEST: pipelined
show(bulk)


@T.prim_func
def pipelined(
    S: W.Symmetric((512, 512), "bfloat16"),
    B: T.Tensor((512, 512), "bfloat16"),
    F: W.Symmetric((8,), "uint32"),
    C: T.Tensor((512, 512), "bfloat16"),
):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        As = T.alloc_shared((128, 64), "bfloat16")
        Bs = T.alloc_shared((64, 128), "bfloat16")
        Cl = T.alloc_fragment((128, 128), "float32")
        T.clear(Cl)
        for k in T.Pipelined(8, num_stages=3):
            W.wait_ge(F[W.rank(), k], 1)
            T.copy(S[W.rank(), by * 128, k * 64], As)
            T.copy(B[k * 64, bx * 128], Bs)
            T.gemm(As, Bs, Cl)
        T.copy(Cl, C[by * 128, bx * 128])


# In the producer, one fence is between the wait and all loads.
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tw::wait_ge
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK-NOT: fence_proxy_async
# CHECK: tl::tma_load(S_desc
# CHECK-NOT: fence_proxy_async
# CHECK: } else {
# CHECK-NOT: tw::
show(pipelined)


@T.prim_func
def barrier_and_atomics(S: W.Symmetric((4096,), "uint8"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        full = T.alloc_barrier(1)
        W.sync_grid()
        if T.get_thread_binding() == 0:
            while W.ld(F[W.rank(), 0], scope="sys") < T.uint32(4):
                pass
            if W.atom_add(F[W.rank(), 1], 1, sem="acq_rel") == T.uint32(3):
                W.bulk_load(tile, S[W.rank(), 0], 4096, full[0])


# A barrier acquires. An acquiring load or atomic does, too, also in a condition.
# CHECK-LABEL: TEST: barrier_and_atomics
# CHECK: tw::sync_grid(
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK: while
# CHECK: tw::ld<
# CHECK-NEXT: }
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK: tw::atom_add
# CHECK: tw::fence_proxy_async();
# CHECK: tw::bulk_load(
show(barrier_and_atomics)


@T.prim_func
def writer(F: W.Symmetric((8,), "uint32"), S: W.Symmetric((4096,), "uint8")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        T.clear(tile)
        W.wait_ge(F[W.rank(), 0], 1)
        W.bulk_store(S[1, 0], tile, 4096)


# New data must not overtake the peer's read of the old data.
# CHECK-LABEL: TEST: writer
# CHECK: tw::wait_ge
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK: tw::bulk_store(
show(writer)


def received(name, by_tma):
    """Build a program whose tile from the other rank is read by the TMA, or by threads."""

    @T.prim_func
    def program(X: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((64, 64), "float16")
            full = T.alloc_barrier(1)
            tile = T.alloc_shared((64, 64), "float16")
            me = W.rank()
            T.copy(X, tile)
            T.copy(tile, S[(me + 1) % 2, 0, 0])
            if by_tma:
                T.tma_copy(S[me, 0:64, 0:64], tile, barrier=full[0])
                if T.get_thread_binding() == 0:
                    T.barrier_arrive(full[0])
                T.mbarrier_wait_parity(full[0], 0)
            else:
                for i, j in T.Parallel(64, 64):
                    tile[i, j] = S[me, i, j] + 1
            T.copy(tile, Y)

    verdicts.show(program, name, world_size=2, arch="sm_90a")


# Threads read what the compiler waits for. The TMA stores only to a tensor that no other rank or block reads.
# CHECK-LABEL: TEST: received_by_threads
# CHECK: tw::wait_reached
# CHECK-NOT: tw::fence_proxy_async
# CHECK: tl::tma_store((&(Y[
received("received_by_threads", by_tma=False)

# CHECK-LABEL: TEST: received_by_tma
# CHECK: tw::wait_reached
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK: tl::tma_load
received("received_by_tma", by_tma=True)
