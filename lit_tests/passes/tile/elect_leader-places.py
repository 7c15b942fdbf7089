# RUN: %python %s | %filecheck %s
"""One thread runs a leader builtin that the whole block reaches; else the selected threads run it."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def uniform(F: W.Symmetric((8,), "uint32"), n: T.int32):
    with T.Kernel(4, threads=(32, 4)) as bx:
        if bx > n:
            for i in T.serial(n):
                W.signal(F[1, i])


# CHECK-LABEL: TEST: uniform
# CHECK: if bx > n:
# CHECK-NEXT: complete_bulk_stores
# CHECK-NEXT: tvm_storage_sync("shared")
# CHECK-NEXT: for i in range(n):
# CHECK-NEXT: if [[X:tx]] == 0 and [[Y:ty]] == 0 and [[Z:tz]] == 0:
# CHECK-NEXT: tileweave.signal(
show(uniform, stage="tile")


@T.prim_func
def counter(F: W.Symmetric((8,), "uint32"), n: T.int32):
    with T.Kernel(4, threads=128) as bx:
        tile = T.alloc_var("int32")
        phase = T.alloc_var("int32", 0)
        tile = bx
        while tile < n:
            phase = phase ^ 1
            if phase == 1:
                W.signal(F[1, 0])
            tile = tile + 4


# Registers with the same value in every thread, such as counters of a persistent loop, are uniform.
# CHECK-LABEL: TEST: counter
# CHECK: while tile[0] < n:
# CHECK: if phase[0] == 1:
# CHECK: if tx == 0 and ty == 0 and tz == 0:
# CHECK-NEXT: tileweave.signal(
show(counter, stage="tile")


@T.prim_func
def chosen(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        lane = T.get_thread_binding() % 32
        if lane == 5:
            W.signal(F[1, 0])
        for i in T.Parallel(8):
            W.signal(F[i, 1])


# CHECK-LABEL: TEST: chosen
# CHECK: if lane == 5:
# CHECK-NEXT: tileweave.signal(
# CHECK: for i in T.parallel(8):
# CHECK-NEXT: tileweave.signal(
# CHECK-NOT: == 0
show(chosen, stage="tile")


@T.prim_func
def two_kernels(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.signal(F[1, 0])
    with T.Kernel(1, threads=64):
        W.signal(F[1, 1])


# Each kernel has its own thread 0.
# CHECK-LABEL: TEST: two_kernels
# CHECK: __launch_bounds__(128
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal
# CHECK: __launch_bounds__(64
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal
show(two_kernels)
