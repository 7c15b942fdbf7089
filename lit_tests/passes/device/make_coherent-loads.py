# RUN: %python %s | %filecheck %s
"""A kernel that reads memory which other threads may change has no read-only parameters."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def reader(
    F: W.Symmetric((8,), "uint32"), A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")
):
    with T.Kernel(1, threads=128):
        W.wait_ge(F[0, 0], 1)
        B[T.get_thread_binding()] = A[T.get_thread_binding()]


# CHECK-LABEL: TEST: reader
# CHECK-NOT: __restrict__
# CHECK: reader_kernel(float* A, float* B, uint* F
# CHECK-NOT: __restrict__
# CHECK: tw::wait_ge
show(reader)


@T.prim_func
def sender(
    F: W.Symmetric((8,), "uint32"), A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")
):
    with T.Kernel(1, threads=128):
        B[T.get_thread_binding()] = A[T.get_thread_binding()]
        W.signal(F[1, 0])
        W.red_add(F[1, 1], 1, sem="release")


# CHECK-LABEL: TEST: sender
# CHECK: const float* __restrict__ A
# CHECK: tw::signal
show(sender)


@T.prim_func
def instructions(
    F: W.Symmetric((8,), "uint32"), A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")
):
    with T.Kernel(1, threads=128):
        W.wait_ge(F[W.rank(), 0], 1)
        B[T.get_thread_binding()] = A[T.get_thread_binding()]


# No load uses the read-only cache.
# CHECK-LABEL: TEST: instructions
# CHECK: ld.acquire.sys.global
# CHECK-NOT: ld.global.nc
# CHECK: ld.global
# CHECK-NOT: ld.global.nc
show(instructions, stage="ptx")
