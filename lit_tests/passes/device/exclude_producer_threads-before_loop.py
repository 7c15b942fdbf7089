# RUN: %python %s | %filecheck %s
"""Builtins that write before a warp-specialized loop run in the program's own threads."""

import tilelang.language as T

from tests.verdicts import print_verdict
from tests.verdicts import show_unordered as show
from tileweave import language as W


def gemm(before, name):
    @T.prim_func
    def program(
        S: W.Symmetric((512, 512), "bfloat16"),
        B: T.Tensor((512, 512), "bfloat16"),
        F: W.Symmetric((8,), "uint32"),
        C: T.Tensor((512, 512), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            As = T.alloc_shared((128, 64), "bfloat16")
            Bs = T.alloc_shared((64, 128), "bfloat16")
            Cl = T.alloc_fragment((128, 128), "float32")
            before(S, B, F)
            T.clear(Cl)
            for k in T.Pipelined(8, num_stages=3):
                T.copy(B[by * 128, k * 64], As)
                T.copy(B[k * 64, bx * 128], Bs)
                T.gemm(As, Bs, Cl)
            T.copy(Cl, C[by * 128, bx * 128])
            W.red_add(F[1, 7], 1)

    return program.with_attr("global_symbol", name)


@T.macro
def send(S, B, F):
    W.put_block(B[0, 0], S[0, 0, 0], 512, peer=1)
    W.red_add(F[1, 0], 1)


# In the specialized part, the consumers execute the builtins.
# CHECK-LABEL: TEST: send{{$}}
# CHECK: __launch_bounds__(384
# CHECK: if (((int)threadIdx.x) < 256) {
# CHECK-NEXT: tw::put_block({{.*}}, ((int)threadIdx.x), 256);
# CHECK: if (((int)threadIdx.x) < 256) {
# CHECK-NEXT: tw::red_add
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: } else {
# CHECK-NOT: < 256
# CHECK: tw::red_add
show(gemm(send, "send"))

# CHECK-LABEL: TEST: send sm_80
# CHECK: __launch_bounds__(256
# CHECK-NOT: < 256
# CHECK: tw::put_block
show(gemm(send, "send"), arch="sm_80")


@T.macro
def observe(S, B, F):
    W.wait_ge(F[W.rank(), 0], 1)
    W.signal(F[1, 0])
    if T.get_thread_binding() == 37:
        W.red_add(F[1, 1], W.atom_add(F[0, 2], 1))


# Waits, a leader, and a selected thread need no guard.
# CHECK-LABEL: TEST: observe
# CHECK-NOT: < 256
# CHECK: tw::wait_ge
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal
# CHECK: if (((int)threadIdx.x) == 37) {
# CHECK-NEXT: tw::red_add
show(gemm(observe, "observe"))


@T.macro
def store_answer(S, B, F):
    F[0, 3] = W.atom_add(F[0, 2], 1)


# CHECK-LABEL: TEST: store_answer
# CHECK: if (((int)threadIdx.x) < 256) {
# CHECK-NEXT: F[{{.*}}3] = tw::atom_add
show(gemm(store_answer, "store_answer"))


@T.macro
def answer(S, B, F):
    old = W.atom_add(F[0, 2], 1)
    if old == T.uint32(7):
        W.red_add(F[1, 1], 1)


# CHECK-LABEL: TEST: answer
# CHECK: atom_add: its result is used outside of warp specialization, where more than the program's 256 threads run; expected a call under a condition on the thread index, such as if T.get_thread_binding() == 0
with print_verdict("answer"):
    show(gemm(answer, "answer"))
