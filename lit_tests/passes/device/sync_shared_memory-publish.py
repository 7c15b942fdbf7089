# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Accesses of the first threads are ordered before what the program's threads publish later."""

import tilelang.language as T

from tests import verdicts
from tests.simulator.device.miscompiled import reads_in_producers
from tileweave import language as W


def make(reads_before: bool, branches: bool):
    @T.prim_func
    def program(
        A: T.Tensor((64, 64), "float16"),
        B: T.Tensor((64, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
        X: T.Tensor((128,), "float32"),
        Y: T.Tensor((128,), "float32"),
    ):
        with T.Kernel(2, threads=128) as block:
            S = W.alloc_symmetric((128,), "float32")
            A_tile = T.alloc_shared((64, 32), "float16")
            B_tile = T.alloc_shared((64, 32), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            me = W.rank()
            if block == 1:
                for i in T.Parallel(128):
                    S[(me + 1) % 2, i] = X[i]
            if reads_before:
                for i in T.Parallel(128):
                    if block == 0:
                        Y[i] = S[me, i]
            if not branches or block == 0:
                T.clear(total)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[0, k * 32], A_tile)
                    T.copy(B[0, k * 32], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                if block == 0:
                    T.copy(total, C)
            else:
                for i in T.Parallel(128):
                    Y[i] = S[me, i]

    return program


def show(name, **options):
    verdicts.show(make(**options), name, world_size=2, pass_configs={"tileweave.reuse": "credit"})


# All 256 threads meet after the reads: thread 128 counts the end of the launch.
# CHECK-LABEL: TEST: before
# CHECK: Y[((int)threadIdx.x)] = S[
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 128) {
# CHECK: tw::atom_add<
show("before", reads_before=True, branches=False)

# A barrier of the block follows the branch beside the specialized one.
# CHECK-LABEL: TEST: beside
# CHECK: Y[((int)threadIdx.x)] = S[
# CHECK: __syncthreads();
# CHECK-NEXT: if (128 <= ((int)threadIdx.x)) {
# CHECK: tw::atom_add<
show("beside", reads_before=False, branches=True)


# A producer reads the announced rows in the specialized part. All threads meet before its end counts.
# CHECK-LABEL: TEST: inside
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: int n = ((int)inbox_announced[
# CHECK: } else {
# CHECK: __syncthreads();
# CHECK-NEXT: if (128 <= ((int)threadIdx.x)) {
# CHECK-NEXT: tl::__sync_thread_partial(
# CHECK: tw::atom_add<
verdicts.show(
    reads_in_producers(), "inside", world_size=2, pass_configs={"tileweave.reuse": "credit"}
)


def loop(reads_in_loop: bool):
    @T.prim_func
    def program(
        X: T.Tensor((128,), "int32"),
        A: T.Tensor((64, 64), "float16"),
        B: T.Tensor((64, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
        Y: T.Tensor((2, 128), "int32"),
    ):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((128,), "int32")
            A_tile = T.alloc_shared((64, 32), "float16")
            B_tile = T.alloc_shared((64, 32), "float16")
            C_tile = T.alloc_shared((64, 64), "float32")
            total = T.alloc_fragment((64, 64), "float32")
            me = W.rank()
            for i in T.Parallel(128):
                S[1 - me, i] = X[i]
            count = S[me, 0]
            for wave in T.serial(count):
                if reads_in_loop:
                    for i in T.Parallel(128):
                        Y[wave % 2, i] = S[me, i]
                T.clear(total)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[0, k * 32], A_tile)
                    T.copy(B[0, k * 32], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C_tile)
                T.copy(C_tile, C)

    return program


def show_loop(name, **options):
    verdicts.show(loop(**options), name, world_size=2, pass_configs={"tileweave.reuse": "credit"})


# One barrier after the loop orders what all its iterations read.
# CHECK-LABEL: TEST: reads before the loop
# CHECK: int count = S[
# CHECK: for (int wave
# CHECK-NOT: __syncthreads();
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK-NOT: __syncthreads();
# CHECK: tl::tma_store(
# CHECK: __syncthreads();
# CHECK-NEXT: if (128 <= ((int)threadIdx.x)) {
show_loop("reads before the loop", reads_in_loop=False)

# CHECK-LABEL: TEST: reads in the loop
# CHECK: for (int wave
# CHECK-NOT: __syncthreads();
# CHECK: tl::tma_store(
# CHECK: __syncthreads();
# CHECK-NEXT: if (128 <= ((int)threadIdx.x)) {
show_loop("reads in the loop", reads_in_loop=True)
