# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""A T.clear of an accumulator in a pipelined loop keeps no wait back: the wait runs in the producer
before its load, the clear in the consumers, in each iteration."""

import tilelang.language as T

from tests.verdicts import print_verdict
from tests.verdicts import show_unordered as show
from tileweave import language as W

S, B, D = 256, 64, 64


def attention(head, middle, name):
    @T.prim_func
    def program(
        q: T.Tensor((S, D), "bfloat16"),
        k: W.Symmetric((S, D), "bfloat16"),
        flags: W.Symmetric((8,), "uint32"),
        o: T.Tensor((S, D), "float32"),
    ):
        with T.Kernel(S // B, threads=128) as block:
            Q = T.alloc_shared((B, D), "bfloat16")
            K = T.alloc_shared((B, D), "bfloat16")
            scores = T.alloc_fragment((B, B), "float32")
            acc = T.alloc_fragment((B, D), "float32")
            T.copy(q[block * B, 0], Q)
            T.fill(acc, 3)
            for j in T.Pipelined(S // B, num_stages=2):
                head(q, k, flags, scores, j)
                T.copy(k[W.rank(), j * B, 0], K)
                middle(flags, scores, block, j)
                T.gemm(Q, K, scores, transpose_B=True)
                for a, b in T.Parallel(B, D):
                    acc[a, b] += scores[a, b]
            T.copy(acc, o[block * B, 0])

    return program.with_attr("global_symbol", name)


@T.macro
def nothing(flags, scores, block, j):
    pass


@T.macro
def wait(q, k, flags, scores, j):
    W.wait_ge(flags[W.rank(), j], 1)


@T.macro
def clear(flags, scores, block, j):
    T.clear(scores)


# CHECK-LABEL: TEST: clear_after
# CHECK: < 128) {
# CHECK: for (int j = 0; j < 4
# CHECK: tw::wait_ge
# CHECK: tl::tma_load(k_desc
# CHECK: } else {
# CHECK-NOT: tw::wait_ge
# CHECK: for (int j_1 = 0; j_1 < 4
# CHECK: *(float4*)(scores
# CHECK: tl::wgmma_ss
show(attention(wait, clear, "clear_after"))


@T.macro
def clear_then_wait(q, k, flags, scores, j):
    T.clear(scores)
    W.wait_ge(flags[W.rank(), j], 1)


# CHECK-LABEL: TEST: clear_before{{$}}
# CHECK: < 128) {
# CHECK: for (int j = 0; j < 4
# CHECK: tw::wait_ge
# CHECK: tl::tma_load(k_desc
# CHECK: } else {
# CHECK-NOT: tw::wait_ge
# CHECK: for (int j_1 = 0; j_1 < 4
# CHECK: *(float4*)(scores
show(attention(clear_then_wait, nothing, "clear_before"))

# Without warp specialization the wait and the load run iterations ahead of the clear.
# CHECK-LABEL: TEST: clear_before sm_80
# CHECK: for (int j = 0; j < 3
# CHECK-NEXT: tw::wait_ge{{.*}} + (int64_t)1)
# CHECK: cp_async_gs
# CHECK: scores
# CHECK: mma_sync
show(attention(clear_then_wait, nothing, "clear_before"), arch="sm_80")


@T.macro
def mask(flags, scores, block, j):
    if j == block:
        for a, b in T.Parallel(B, B):
            scores[a, b] = T.if_then_else(a >= b, 0, -T.infinity("float32"))
    else:
        T.clear(scores)


# This is the causal mask of TileLang's flash attention.
# CHECK-LABEL: TEST: masked
# CHECK: < 128) {
# CHECK: tw::wait_ge
# CHECK: tl::tma_load(k_desc
# CHECK: } else {
# CHECK-NOT: tw::wait_ge
# CHECK: for (int j_1 = 0; j_1 < 4
# CHECK: CUDART_INF_F
# CHECK: tl::wgmma_ss
show(attention(wait, mask, "masked"))


@T.macro
def put(flags, scores, block, j):
    W.st(flags[1, j], 1)


# A builtin between the wait and the first use also stays with the consumers.
# CHECK-LABEL: TEST: builtin_after
# CHECK: < 128) {
# CHECK: tw::wait_ge
# CHECK: tl::tma_load(k_desc
# CHECK: } else {
# CHECK-NOT: tw::wait_ge
# CHECK: tw::st<
show(attention(wait, put, "builtin_after"))


@T.macro
def put_then_wait(q, k, flags, scores, j):
    W.st(flags[1, j], 1)
    W.wait_ge(flags[W.rank(), j], 1)


# No wait passes a builtin, because another rank may need its effect.
# CHECK-LABEL: TEST: builtin_before
# CHECK-NEXT: wait_ge: loads of T.Pipelined overtake it, because st before it keeps it in the consumer
# CHECK-SAME: warps; expected st after the loads
# LINE: CHECK-NEXT: --> {{.*}}hoist_waits-clear.py:[[#]]
with print_verdict("builtin_before"):
    show(attention(put_then_wait, nothing, "builtin_before"))


@T.macro
def read_then_wait(q, k, flags, scores, j):
    T.copy(k[W.rank(), 0, 0], scores)
    W.wait_ge(flags[W.rank(), j], 1)


# CHECK-LABEL: TEST: read_before
# CHECK-NEXT: wait_ge: loads of T.Pipelined overtake it, because T.copy before it keeps it in the
with print_verdict("read_before"):
    show(attention(read_then_wait, nothing, "read_before"))


@T.macro
def no_wait(q, k, flags, scores, j):
    T.clear(scores)


# A loop without a wait does not change.
# CHECK-LABEL: TEST: no_wait
# CHECK: for j in T.serial(4
# CHECK-NEXT: T.fill(
# CHECK-NEXT: T.copy(
# CHECK-NEXT: T.gemm(
show(attention(no_wait, nothing, "no_wait"), stage="tile")
