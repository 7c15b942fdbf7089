# RUN: %python %s | %filecheck %s
"""``tw.emit`` prints a program at each stage of its compilation."""

import tilelang.language as T

from tests.verdicts import show_unordered
from tileweave import language as W


@T.prim_func
def program(A: T.Tensor((64,), "float32"), S: W.Symmetric((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            S[W.world_size() - 1, i] = A[i]


# CHECK-LABEL: TEST: tile
# CHECK: T.match_buffer({{.*}}, (4, 64), strides=(T.int64(268435456), 1))
# CHECK: T.parallel(64)
show_unordered(program, "tile", stage="tile")

# CHECK-LABEL: TEST: device
# CHECK: "calling_conv": 2
# CHECK: T.launch_thread("blockIdx.x", 1)
show_unordered(program, "device", stage="device")

# CHECK-LABEL: TEST: cuda
# CHECK: __global__ void __launch_bounds__(64, 1) program_kernel
show_unordered(program, "cuda", stage="cuda")
