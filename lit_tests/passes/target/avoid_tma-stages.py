# RUN: %python %s | %filecheck %s
"""A tile whose stages would begin between multiples of 128 bytes is copied without the TMA."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W


def show(columns, name, rows=1, first=0):
    @T.prim_func
    def program(x: T.Tensor((4, 64, 512), "float32"), y: T.Tensor((4, rows, columns), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((rows + first, columns), "float32")
            W.fence("gpu")
            for i in T.Pipelined(4, num_stages=2):
                T.copy(x[i, 0:rows, 0:columns], tile[first : first + rows, 0:columns])
                for r, j in T.Parallel(rows, columns):
                    y[i, r, j] = tile[first + r, j]

    verdicts.show(program, name, arch="sm_90a")


# CHECK-LABEL: TEST: of_32_bytes
# CHECK-NOT: tma_load
# CHECK: cp_async
show(8, "of_32_bytes")

# CHECK-LABEL: TEST: of_128_bytes
# CHECK: tl::tma_load
show(32, "of_128_bytes")

# CHECK-LABEL: TEST: of_96_bytes
# CHECK-NOT: tma_load
# CHECK: cp_async
show(8, "of_96_bytes", rows=3)
