# RUN: %python %s | %filecheck %s
"""The block synchronizes before a signal; then one thread changes the flag once."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def plain(S: W.Symmetric((128,), "float32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        S[1, T.get_thread_binding()] = 1.0
        W.signal(F[1, 2])


# CHECK-LABEL: TEST: plain
# CHECK: S[{{.*}}] = 0x1p+0f
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(F[268435458])), (uint)1);
show(plain)


@T.prim_func
def words(F: W.Symmetric((8,), "int64")):
    with T.Kernel(1, threads=128):
        W.signal(F[0, 0], -2, op="set", scope="gpu", sem="relaxed")


# CHECK-LABEL: TEST: words
# CHECK: tw::signal<tw::Type::s64, tw::Op::set, tw::Scope::gpu, tw::Sem::relaxed>((&(F[0])), -2);
show(words)


@T.prim_func
def guarded(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        thread = T.get_thread_binding()
        if thread < 4:
            W.signal(F[thread, 0])


# Each thread that reaches it signals; the block synchronizes before the condition.
# CHECK-LABEL: TEST: guarded
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 4) {
# CHECK-NEXT: tw::signal<
# CHECK-NOT: __syncthreads
# CHECK-LABEL: TEST: specialized
show(guarded)


@T.prim_func
def specialized(
    A: T.Tensor((512, 512), "bfloat16"),
    S: W.Symmetric((512, 512), "bfloat16"),
    F: W.Symmetric((8,), "uint32"),
):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        As = T.alloc_shared((128, 64), "bfloat16")
        Bs = T.alloc_shared((64, 128), "bfloat16")
        Cl = T.alloc_fragment((128, 128), "float32")
        T.clear(Cl)
        for k in T.Pipelined(8, num_stages=3):
            T.copy(A[by * 128, k * 64], As)
            T.copy(A[k * 64, bx * 128], Bs)
            T.gemm(As, Bs, Cl)
        T.copy(Cl, S[1, by * 128, bx * 128])
        W.signal(F[1, 0])


# The 256 consumers synchronize, and the first of them, thread 128, signals.
# CHECK: *(uint1*)(S +
# CHECK: tl::__sync_thread_partial({{[0-9]+}}, 256);
# CHECK-NEXT: if (((int)threadIdx.x) == 128) {
# CHECK-NEXT: tw::signal<
show(specialized)
