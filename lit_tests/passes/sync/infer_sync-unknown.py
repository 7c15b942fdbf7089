# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""A wait for a flag with data-dependent indices: the producer warp waits in each iteration, before
its TMA loads."""

import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tileweave import language as W
from tileweave import passes
from tileweave.emit import EMIT_HEAP_STRIDE, lowered

RANKS, ROWS, DIM, M, N, BF16 = 4, 1024, 64, 128, 64, "bfloat16"


def show(name):
    @T.prim_func
    def attend(
        Q: T.Tensor((ROWS, DIM), BF16),
        offsets: T.Tensor((9,), "int32"),
        K: W.Symmetric((RANKS, ROWS, DIM), BF16),
        V: W.Symmetric((RANKS, ROWS, DIM), BF16),
        Out: T.Tensor((ROWS, DIM), BF16),
    ):
        with T.Kernel(ROWS // M, threads=256) as block:
            Q_tile = T.alloc_shared((M, DIM), BF16)
            K_tile = T.alloc_shared((N, DIM), BF16)
            V_tile = T.alloc_shared((N, DIM), BF16)
            S = T.alloc_fragment((M, N), "float32")
            P = T.alloc_fragment((M, N), BF16)
            out = T.alloc_fragment((M, DIM), "float32")
            steps = T.alloc_var("int32")
            me, first = W.rank(), offsets[block]
            steps = T.ceildiv(offsets[block + 1] - first, N)
            T.copy(Q[block * M, 0], Q_tile)
            T.clear(out)
            for step in T.Pipelined(RANKS * steps, num_stages=2):
                owner = (me + RANKS - step // steps) % RANKS
                row = first + step % steps * N
                T.copy(K[me, owner, row, 0], K_tile)
                T.copy(V[me, owner, row, 0], V_tile)
                T.gemm(
                    Q_tile, K_tile, S, transpose_B=True, clear_accum=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )  # fmt: skip
                T.copy(S, P)
                T.gemm(P, V_tile, out, policy=T.GemmWarpPolicy.FullRow)
            T.copy(out, Out[block * M, 0])

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        Q: T.Tensor((ROWS, DIM), BF16),
        offsets: T.Tensor((9,), "int32"),
        mine: T.Tensor((ROWS, DIM), BF16),
        K: W.Symmetric((RANKS, ROWS, DIM), BF16),
        V: W.Symmetric((RANKS, ROWS, DIM), BF16),
        Out: T.Tensor((ROWS, DIM), BF16),
    ):
        for to in (K, V):
            for peer in p.peers():
                p.copy(to[peer, p.rank], mine, stream="copies")
            p.copy(to[p.rank, p.rank], mine)
        p.launch(attend, Q, offsets, K, V, Out)

    kernels = [k for k in plan.kernels(RANKS) if k.attrs["global_symbol"] == "attend"]
    mod = passes.run_group(tvm.IRModule({"attend": kernels[0]}), RANKS, EMIT_HEAP_STRIDE)
    print("TEST:", name)
    print(lowered(mod["attend"], "sm_90a", {}).kernel_source)


# CHECK-LABEL: TEST: attend
# CHECK: if ((((int)threadIdx.x) & 127) < 32) {
# CHECK: for (int step = 0; step < (steps * 4); ++step) {
# CHECK: if (owner != rank) {
# CHECK-NEXT: if (waited != owner) {
# CHECK-NEXT: tw::wait_reached<{{.*}}(&(K_arrived[{{.*}}owner
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK-NEXT: tw::wait_reached<{{.*}}(&(V_arrived[{{.*}}owner
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK: tl::tma_load(K_desc,{{.*}} row, owner, rank);
# CHECK: tl::tma_load(V_desc,{{.*}} row, owner, rank);

# At the end of the launch it waits for the data that no block has read.
# CHECK: if (((int)blockIdx.x) == 7) {
# CHECK-NEXT: for (int granule = 0; granule < 4; ++granule) {
# CHECK-NEXT: if (granule != rank) {
# CHECK-NEXT: tw::wait_reached<{{.*}}(&(K_arrived[{{.*}}granule

# CHECK: } else {
# CHECK: tl::wgmma
show("attend")
