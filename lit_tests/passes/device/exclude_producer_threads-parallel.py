# RUN: %python %s | %filecheck %s
"""Builtins in T.Parallel run in the threads among which TileLang divides the loop."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W


def show(before, beside, name):
    @T.prim_func
    def program(
        A: T.Tensor((512, 512), "float16"), counts: T.Tensor((2, 512), "uint32"),
        C: T.Tensor((128, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(2, threads=128) as block:
            tile = T.alloc_shared((128, 64), "float16")
            total = T.alloc_fragment((128, 64), "float32")
            before(counts)
            if block == 0:
                T.clear(total)
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(A[0, k * 64], tile)
                    for i, j in T.Parallel(128, 64):
                        total[i, j] += tile[i, j]
                T.copy(total, C)
            else:
                beside(counts)

    verdicts.show(program, name, arch="sm_90a")


@T.macro
def nothing(counts):
    pass


@T.macro
def count(counts):
    for i in T.Parallel(512):
        W.red_add(counts[0, i], 1)


# All 256 threads run the loop, of which the program has 128.
# CHECK-LABEL: TEST: beside
# CHECK: __launch_bounds__(256
# CHECK: for (int [[I:i[_0-9]*]] = 0; [[I]] < 2; ++[[I]]) {
# CHECK-NEXT: tw::red_add<{{.*}}>((&(counts[(([[I]] * 256) + ((int)threadIdx.x))])), (uint)1);
show(nothing, count, "beside")

# CHECK-LABEL: TEST: before
# CHECK: __launch_bounds__(256
# CHECK: for (int i = 0; i < 2; ++i) {
# CHECK-NEXT: tw::red_add<{{.*}}>((&(counts[((i * 256) + ((int)threadIdx.x))])), (uint)1);
show(count, nothing, "before")
