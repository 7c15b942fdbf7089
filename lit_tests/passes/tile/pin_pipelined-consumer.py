# RUN: %python %s | %filecheck %s
"""In a pipelined loop, waits move to the producer; other builtins stay with the consumers."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


def gemm(head, tail, name, stages=3):
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
            T.clear(Cl)
            for k in T.Pipelined(8, num_stages=stages):
                head(S, B, F, k)
                T.copy(S[W.rank(), by * 128, k * 64], As)
                T.copy(B[k * 64, bx * 128], Bs)
                T.gemm(As, Bs, Cl)
                tail(S, B, F, k)
            T.copy(Cl, C[by * 128, bx * 128])

    return program.with_attr("global_symbol", name)


@T.macro
def nothing(S, B, F, k):
    pass


@T.macro
def wait(S, B, F, k):
    W.wait_ge(F[W.rank(), k], 1)


@T.macro
def put(S, B, F, k):
    W.put_block(B[k, 0], S[0, k, 0], 64, peer=1)


@T.macro
def send(S, B, F, k):
    W.st(F[1, k], 1)


# CHECK-LABEL: TEST: wait_first
# CHECK: < 128) {
# CHECK: tw::wait_ge
# CHECK: } else {
# CHECK-NOT: tw::wait_ge
# CHECK: tw::put_block({{.*}} - 128), 256);
show(gemm(wait, put, "wait_first"))

# CHECK-LABEL: TEST: put_first
# CHECK: < 128) {
# CHECK-NOT: tw::
# CHECK: } else {
# CHECK: tw::put_block({{.*}} - 128), 256);
# CHECK-NOT: complete_bulk_stores
show(gemm(put, nothing, "put_first"))

# CHECK-LABEL: TEST: store_first
# CHECK: < 128) {
# CHECK-NOT: tw::
# CHECK: } else {
# CHECK: tw::st<
show(gemm(send, nothing, "store_first"))


@T.macro
def wait_for_all(S, B, F, k):
    for r in T.serial(W.world_size()):
        W.wait_ge(F[r, k], 1)


# A loop of waits moves like one wait.
# CHECK-LABEL: TEST: loop_of_waits
# CHECK: < 128) {
# CHECK: for (int [[R:[a-z0-9_]+]] = 0; [[R]] < 4
# CHECK-NEXT: tw::wait_ge
# CHECK: tl::tma_load
# CHECK: } else {
# CHECK-NOT: tw::wait_ge
show(gemm(wait_for_all, nothing, "loop_of_waits"))

# It also moves with the sleeps of tileweave.delays.
# CHECK-LABEL: TEST: delayed_waits
# CHECK: < 128) {
# CHECK: for (int [[R:[a-z0-9_]+]] = 0; [[R]] < 4
# CHECK-NEXT: tw::wait_ge
# CHECK-NEXT: tw::fence_proxy_async
# CHECK-NEXT: tw::delay
# CHECK: tl::tma_load
# CHECK: } else {
# CHECK-NOT: tw::
show(gemm(wait_for_all, nothing, "delayed_waits"), pass_configs={"tileweave.delays": 3})

# A loop that is not pipelined does not change.
# CHECK-LABEL: TEST: serial
# CHECK: for k in range(8):
# CHECK-NEXT: put_block(
show(gemm(put, nothing, "serial", stages=0), stage="tile")
