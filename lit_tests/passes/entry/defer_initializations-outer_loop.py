# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Initializations before loops around T.Pipelined run once; TileLang alone runs them in each
iteration, because warp specialization moves them next to the pipelined loop."""

import tilelang.language as T

from tests.verdicts import print_verdict
from tests.verdicts import show_unordered as show
from tileweave import language as W

D, S, STEPS = 64, 256, 4
LOWEST = -T.infinity("float32")


def attention(before, loops, name, threads=256, B=128):
    """Build flash attention without scaling: three accumulators, and two products for each tile."""

    @T.prim_func
    def program(
        q: T.Tensor((S, D), "bfloat16"),
        k: W.Symmetric((S, D), "bfloat16"),
        flags: W.Symmetric((8,), "uint32"),
        counts: T.Tensor((8,), "int32"),
        o: T.Tensor((S, D), "float32"),
    ):
        with T.Kernel(S // B, threads=threads) as block:
            Q = T.alloc_shared((B, D), "bfloat16")
            K = T.alloc_shared((B, D), "bfloat16")
            scores = T.alloc_fragment((B, B), "float32")
            weights = T.alloc_fragment((B, B), "bfloat16")
            highest = T.alloc_fragment((B,), "float32")
            total = T.alloc_fragment((B,), "float32")
            acc = T.alloc_fragment((B, D), "float32")
            steps = T.alloc_var("int32")
            T.copy(q[block * B, 0], Q)
            T.clear(acc)
            T.fill(highest, LOWEST)
            T.fill(total, 0)
            steps = counts[0]
            before(q, k, flags, Q, acc)
            for step in loops(counts):
                for j in T.Pipelined(S // B, num_stages=2):
                    T.copy(k[step, j * B, 0], K)
                    T.gemm(
                        Q,
                        K,
                        scores,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.reduce_max(scores, highest, dim=1, clear=False)
                    for a, b in T.Parallel(B, B):
                        weights[a, b] = scores[a, b] - highest[a]
                    for a in T.Parallel(B):
                        total[a] += highest[a] + steps
                    T.gemm(weights, K, acc, policy=T.GemmWarpPolicy.FullRow)
                    steps = steps + 1
            for a, b in T.Parallel(B, D):
                acc[a, b] /= total[a]
            T.copy(acc, o[block * B, 0])

    return program.with_attr("global_symbol", name)


@T.macro
def nothing(q, k, flags, Q, acc):
    pass


def serial(counts):
    return T.serial(STEPS)


# The accumulators are initialized before the first tile, or after the loop if there is none.
# CHECK-LABEL: TEST: one_loop{{$}}
# CHECK: [[DONE:done_[0-9]+]] = 0;
# CHECK: for (int step = 0; step < 4
# CHECK: < 128) {
# CHECK: tl::tma_load
# CHECK: } else {
# CHECK-NEXT: bool [[FIRST:[a-z_0-9]+]] = ([[DONE]] == 0);
# CHECK-NEXT: if ([[FIRST]]) {
# CHECK: *(float4*)(acc
# CHECK: -CUDART_INF_F
# CHECK: *(float2*)(highest
# CHECK: *(float2*)(total
# CHECK: [[DONE]] = 1;
# CHECK-NEXT: }
# CHECK-NEXT: for (int j_
# CHECK-NOT: *(float4*)(acc
# CHECK: tl::wgmma_rs
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK-NEXT: bool [[NEVER:[a-z_0-9]+]] = ([[DONE]] == 0);
# CHECK-NEXT: if ([[NEVER]]) {
show(attention(nothing, serial, "one_loop"))

# CHECK-LABEL: TEST: one_loop_128
# CHECK: for (int step = 0; step < 4
# CHECK: } else {
# CHECK-NEXT: bool [[FIRST:[a-z_0-9]+]] = (done_0 == 0);
# CHECK-NEXT: if ([[FIRST]]) {
# CHECK: *(float4*)(acc
show(attention(nothing, serial, "one_loop_128", threads=128, B=64))

# Without warp specialization TileLang moves nothing.
# CHECK-LABEL: TEST: one_loop sm_80
# CHECK-NOT: done_
show(attention(nothing, serial, "one_loop"), arch="sm_80")


# Local variables are set at their place in the program, for all threads.
# CHECK-LABEL: TEST: single_value
# CHECK: steps = counts[0];
# CHECK: for (int step = 0; step < counts[1]
# CHECK-NOT: steps = counts
show(attention(nothing, lambda counts: T.serial(counts[1]), "single_value"))


@T.macro
def read_overwritten(q, k, flags, Q, acc):
    T.copy(Q, acc)
    T.copy(q[0, 0], Q)


# CHECK-LABEL: TEST: overwritten
# CHECK-NEXT: T.copy: reads Q before T.Pipelined, but warp specialization moves it after T.copy
# CHECK-SAME: which writes Q; expected another buffer for one of them
# LINE: CHECK-NEXT: --> {{.*}}defer_initializations-outer_loop.py:[[#]]
with print_verdict("overwritten"):
    show(attention(read_overwritten, serial, "overwritten"))


@T.macro
def read_released(q, k, flags, Q, acc):
    T.copy(k[0, 0, 0], acc)
    W.signal(flags[1, 0])


# CHECK-LABEL: TEST: released
# CHECK-NEXT: T.copy: reads k before T.Pipelined, but warp specialization moves it after signal,
# CHECK-SAME: which releases it; expected signal after the loop, or k copied to shared memory
with print_verdict("released"):
    show(attention(read_released, serial, "released"))


@T.macro
def read_tile(q, k, flags, Q, acc):
    T.copy(Q, acc)
    W.signal(flags[1, 0])


# No other block can overwrite a tile in shared memory after a signal.
# CHECK-LABEL: TEST: tile
# CHECK-NOT: which releases it
# CHECK: tw::signal
# CHECK: for (int step = 0; step < 4
show(attention(read_tile, serial, "tile"))


@T.prim_func
def conditions(
    q: T.Tensor((S, D), "bfloat16"),
    k: W.Symmetric((S, D), "bfloat16"),
    counts: T.Tensor((8,), "int32"),
    o: T.Tensor((S, D), "float32"),
):
    with T.Kernel(2, threads=256) as block:
        Q = T.alloc_shared((128, D), "bfloat16")
        K = T.alloc_shared((128, D), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        T.copy(q[block * 128, 0], Q)
        for tile in T.serial(3):
            T.clear(acc)
            for step in T.serial(STEPS):
                if counts[step] > 0:
                    for j in T.Pipelined(2, num_stages=2):
                        T.copy(k[W.rank(), j * 128, 0], K)
                        T.gemm(Q, K, acc, transpose_B=True)
            for a, b in T.Parallel(128, D):
                o[block * 128 + a, b] = acc[a, b]


# The flag is reset at the place of the initialization.
# CHECK-LABEL: TEST: conditions
# CHECK: for (int tile = 0; tile < 3
# CHECK: done_0 = 0;
# CHECK: for (int step = 0; step < 4
# CHECK: if (0 <
# CHECK: } else {
# CHECK-NEXT: bool [[FIRST:[a-z_0-9]+]] = (done_0 == 0);
# CHECK: done_0 = 1;
# CHECK: wgmma
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK-NEXT: bool [[NEVER:[a-z_0-9]+]] = (done_0 == 0);
show(conditions)


@T.prim_func
def directly_before(
    q: T.Tensor((S, D), "bfloat16"),
    k: W.Symmetric((S, D), "bfloat16"),
    o: T.Tensor((S, 128), "float32"),
):
    with T.Kernel(2, threads=256) as block:
        Q = T.alloc_shared((128, D), "bfloat16")
        K = T.alloc_shared((128, D), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        T.copy(q[block * 128, 0], Q)
        for tile in T.serial(3):
            T.clear(acc)
            for j in T.Pipelined(2, num_stages=2):
                T.copy(k[W.rank(), j * 128, 0], K)
                T.gemm(Q, K, acc, transpose_B=True)
            T.copy(acc, o[block * 128, 0])


# CHECK-LABEL: TEST: directly_before
# CHECK: for (int tile = 0; tile < 3
# CHECK-NOT: done_
show(directly_before)
