# RUN: %python %s | %filecheck %s
"""The producer waits for the end of a launch; consumer warps do not."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W

M, N, K = 512, 512, 512


def show(name, after):
    @T.prim_func
    def program(
        A: W.Symmetric((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        F: W.Symmetric((8,), "uint32"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            A_tile = T.alloc_shared((128, 64), "bfloat16")
            B_tile = T.alloc_shared((128, 64), "bfloat16")
            total = T.alloc_fragment((128, 128), "float32")
            T.clear(total)
            for k in T.Pipelined(K // 64, num_stages=3):
                T.copy(A[W.rank(), by * 128, k * 64], A_tile)
                T.copy(B[bx * 128, k * 64], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C[by * 128, bx * 128])
            after(F, by)

    verdicts.show_unordered(program, name)


@T.macro
def wait(F, by):
    if by == 3:
        for flag in T.serial(8):
            W.wait_ge(F[W.rank(), flag], 1)


# CHECK-LABEL: TEST: last
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_load(
# CHECK: if (((int)blockIdx.y) == 3) {
# CHECK: tw::wait_ge
# CHECK: } else {
# CHECK: tl::wgmma_ss
# CHECK-NOT: tw::wait_ge
# CHECK: TEST: followed
show("last", wait)


@T.macro
def wait_and_signal(F, by):
    wait(F, by)
    W.signal(F[W.rank(), by], 1)


# A wait before another statement stays there.
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK-NOT: tw::wait_ge
# CHECK: tl::wgmma_ss
# CHECK: tw::wait_ge
# CHECK: tw::signal
show("followed", wait_and_signal)


@T.prim_func
def repeated(
    A: T.Tensor((M, K), "bfloat16"),
    F: W.Symmetric((8,), "uint32"),
    C: W.Symmetric((M, N), "bfloat16"),
):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        A_tile = T.alloc_shared((128, 64), "bfloat16")
        B_tile = T.alloc_shared((128, 64), "bfloat16")
        total = T.alloc_fragment((128, 128), "float32")
        for step in T.serial(2):
            T.clear(total)
            for k in T.Pipelined(K // 64, num_stages=3):
                T.copy(A[by * 128, k * 64], A_tile)
                T.copy(A[bx * 128, k * 64], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C[1, by * 128, bx * 128])
            W.wait_ge(F[W.rank(), step], 1)


# At the end of an iteration a wait guards the stores of the next one, so the consumers run it.
# CHECK-LABEL: TEST: repeated
# CHECK: for (int step = 0; step < 2; ++step) {
# CHECK-NOT: tw::wait_ge
# CHECK: tl::wgmma_ss
# CHECK: tw::wait_ge
verdicts.show_unordered(repeated)


@T.macro
def wait_by_one_thread(F, by):
    if T.get_thread_binding() == 0:
        W.wait_ge(F[W.rank(), 0], 1)


# Thread 0 of the program is a consumer: no producer would meet the condition.
# CHECK-LABEL: TEST: chosen
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK-NOT: tw::wait_ge
# CHECK: tl::wgmma_ss
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK-NEXT: tw::wait_ge
show("chosen", wait_by_one_thread)
