# RUN: %python %s | %filecheck %s
"""A traced kernel records its blocks, loops, waits, signals and transfers."""

import tilelang.language as T

import tileweave as tw
from tests import verdicts
from tileweave import language as W
from tileweave.passes import pipeline

TRACE = {"tileweave.verify": "off", "tileweave.trace": True}


def show(program, name, arch="sm_90a"):
    verdicts.show(program, name, arch=arch, world_size=2, pass_configs=TRACE)


@T.prim_func
def ring(F: W.Symmetric((8,), "uint32"), epoch: T.uint32):
    with T.Kernel(8, threads=128) as block:
        me = W.rank()
        W.signal(F[1 - me, block], 3)
        W.wait_reached(F[me, block], epoch)


# One thread reads the clock and the flag; the event contains the flag, its value before, and the
# awaited value.
# CHECK-LABEL: TEST: ring
# CHECK: int64_t tileweave_context, int tileweave_launch) {
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK: tw::record<0>(0, {{.*}}, 0, 0, tileweave_context, tileweave_launch);
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: int64_t [[B:event_begin[_0-9]*]] = tw::globaltimer();
# CHECK-NEXT: tw::signal<{{.*}}F[
# CHECK-NEXT: tw::record<1>([[B]], (&(F[{{.*}}])), (int64_t)0, (int64_t)3, tileweave_context
# CHECK: = tw::globaltimer();
# CHECK: = ((int64_t)tw::ld<tw::Scope::sys, tw::Sem::relaxed, 1>((&(F[
# CHECK: tw::wait_reached<{{.*}}F[
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::record<2>(event_begin{{.*}}, (&(F[{{.*}}])), event_seen, ((int64_t)epoch), tile
# CHECK: tw::record<3>(
# CHECK-NOT: tw::record
show(ring, "ring")

M, N, K = 128, 128, 128


@T.prim_func
def gemm(
    A: T.Tensor((M, K), "float16"),
    B: T.Tensor((N, K), "float16"),
    S: W.Symmetric((M, N), "float16"),
    F: W.Symmetric((1,), "uint32"),
):
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((M, 32), "float16")
        B_tile = T.alloc_shared((N, 32), "float16")
        C_tile = T.alloc_shared((M, N), "float16")
        total = T.alloc_fragment((M, N), "float32")
        T.clear(total)
        for step in T.Pipelined(K // 32, num_stages=2):
            T.copy(A[0, step * 32], A_tile)
            T.copy(B[0, step * 32], B_tile)
            T.gemm(A_tile, B_tile, total, transpose_B=True)
        T.copy(total, C_tile)
        T.copy(C_tile, S[1 - W.rank(), 0, 0])
        W.signal(F[1 - W.rank(), 0])


# Producers and consumers record by their own first threads. A TMA store lasts until the wait for
# the read of its tile, and its event contains the rank that it writes to. Before TileLang 0.1.14,
# a tile has another number of stores.
# CHECK-LABEL: TEST: specialized
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK: tw::record<0>(
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK: tw::record<1>(
# CHECK: tw::record<2>(
# CHECK: for (int step = 0;
# CHECK: tw::record<3>(
# CHECK: tw::record<4>(
# CHECK: } else {
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK: tw::record<5>(
# CHECK: for (int step_1 = 0;
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK: tw::record<6>(
# SINCE_0_1_14: CHECK: [[B:event_begin[_0-9]*]] = tw::globaltimer();
# SINCE_0_1_14: CHECK: tl::tma_store(S_desc,
# SINCE_0_1_14: CHECK: tl::tma_store_wait<0, true>();
# SINCE_0_1_14: CHECK: tw::record<7>([[B]], {{.*}}, (int64_t)0, ((int64_t)1 - ((int64_t)rank)), tileweave
# CHECK: tw::signal<
# SINCE_0_1_14: CHECK: tw::record<8>(
# CHECK: if (((int)threadIdx.x) == 128) {
# SINCE_0_1_14: CHECK: tw::record<9>(
# SINCE_0_1_14: CHECK-NOT: tw::record
show(gemm, "specialized")


@T.prim_func
def plain(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            B[i] = A[i] + 1.0


# A kernel without any other builtin is recorded as well.
# CHECK-LABEL: TEST: plain
# CHECK: int tileweave_launch) {
# CHECK: tw::record<0>(
# CHECK: B[((int)threadIdx.x)] =
# CHECK: tw::record<1>(
show(plain, "plain")


def emitted(**configs):
    configs = {"tileweave.verify": "off", **configs}
    return "".join(tw.emit(p, world_size=2, pass_configs=configs) for p in (ring, gemm))


# Without a trace not one instruction is added.
# CHECK: begin
# CHECK-NOT: record<
# CHECK-NOT: globaltimer
# CHECK-NOT: tileweave_launch
# CHECK: end
off = emitted()
print("begin", off, "end", sep="\n")

# The passes for traces change nothing then: without them the code is the same, and with the option
# False too. The option True gives other code.
# CHECK: without the passes: same
# CHECK-NEXT: trace False: same
# CHECK-NEXT: trace True: differs
stock = pipeline.PIPELINE
pipeline.PIPELINE = [p for p in stock if p.name not in ("instrument", "record_events")]
assert len(pipeline.PIPELINE) == len(stock) - 2
print("without the passes:", "same" if emitted() == off else "differs")
pipeline.PIPELINE = stock
for value in (False, True):
    same = emitted(**{"tileweave.trace": value}) == off
    print(f"trace {value}:", "same" if same else "differs")
