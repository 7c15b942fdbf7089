# RUN: %python %s | %filecheck %s
"""The include line has the stamp of the headers, builtins and passes."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def ours(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.signal(F[1, 0])


# CHECK-LABEL: TEST: ours
# CHECK-NEXT: #include "{{.*}}/tileweave/tileweave.cuh" // {{[0-9a-f]{16}$}}
# CHECK-NOT: tileweave.cuh
show(ours)


@T.prim_func
def stock(A: T.Tensor((128,), "float32"), S: W.Symmetric((128,), "float32")):
    with T.Kernel(1, threads=128):
        S[1, T.get_thread_binding()] = A[T.get_thread_binding()]


# CHECK-LABEL: TEST: stock
# CHECK-NOT: tileweave
# CHECK: stock_kernel(
show(stock)
