# RUN: %python %s | %filecheck %s
"""Assignments and atomics before a warp-specialized loop run in the program's own threads."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def show(name, before, arch="sm_90a"):
    @T.prim_func
    def program(
        A: T.Tensor((512, 512), "bfloat16"),
        X: T.Tensor((4096,), "float32"),
        Y: T.Tensor((4096,), "float32"),
        N: T.Tensor((8,), "int32"),
        C: T.Tensor((512, 512), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            As = T.alloc_shared((128, 64), "bfloat16")
            Bs = T.alloc_shared((64, 128), "bfloat16")
            Cl = T.alloc_fragment((128, 128), "float32")
            W.fence("gpu")
            before(X, Y, N, bx * 256 + T.get_thread_binding())
            T.clear(Cl)
            for k in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 128, k * 64], As)
                T.copy(A[k * 64, bx * 128], Bs)
                T.gemm(As, Bs, Cl)
            T.copy(Cl, C[by * 128, bx * 128])
            T.atomic_add(N[7], 1)

    print("TEST:", name, arch)
    try:
        print(tw.emit(program, arch=arch, pass_configs={"tileweave.verify": "off"}))
    except tw.LanguageError as error:
        print(error)


@T.macro
def write(X, Y, N, place):
    Y[place] = X[place] + 1
    T.atomic_add(N[0], 1)


# After the loop, the consumers are the program's threads.
# CHECK-LABEL: TEST: write sm_90a
# CHECK: __launch_bounds__(384
# CHECK: if (((int)threadIdx.x) < 256) {
# CHECK: Y[
# CHECK: AtomicAdd((&(N[0])), 1);
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: } else {
# CHECK-NOT: < 256
# CHECK: AtomicAdd((&(N[7])), 1);
show("write", write)

# CHECK-LABEL: TEST: write sm_80
# CHECK: __launch_bounds__(256
# CHECK-NOT: < 256
# CHECK: AtomicAdd((&(N[7])), 1);
show("write", write, "sm_80")


@T.macro
def select(X, Y, N, place):
    if T.get_thread_binding() == 37:
        N[T.atomic_add(N[0], 1, return_prev=True)] = 1
    for i in T.Parallel(384):
        Y[i] = X[i] + 1


# A selected thread, and loops that TileLang divides, need no guard.
# CHECK-LABEL: TEST: select
# CHECK-NOT: < 256
# CHECK: if (((int)threadIdx.x) == 37) {
# CHECK-NOT: < 256
# CHECK: Y[((int)threadIdx.x)] =
# CHECK-NOT: < 256
# CHECK: if (((int)threadIdx.x) < 128) {
show("select", select)


@T.macro
def arrive(X, Y, N, place):
    full = T.alloc_barrier(256)
    T.mbarrier_arrive(full[0])
    T.mbarrier_wait_parity(full[0], 0)


# CHECK-LABEL: TEST: arrive
# CHECK: if (((int)threadIdx.x) < 256) {
# CHECK-NEXT: full[0].arrive();
# CHECK-NEXT: }
# CHECK-NEXT: full[0].wait(0);
show("arrive", arrive)


@T.macro
def answer(X, Y, N, place):
    old = T.atomic_add(N[0], 1, return_prev=True)
    if old == 7:
        N[1] = 1


# CHECK-LABEL: TEST: answer
# CHECK-NEXT: atomic operation before T.Pipelined: its result is used, and the threads that load tiles would execute it, too; expected it under a condition on the thread index, such as if T.get_thread_binding() == 0, or after the loop
# LINE: CHECK-NEXT: --> {{.*}}restrict_threads-writes.py:[[# @LINE - 7]]
show("answer", answer)
