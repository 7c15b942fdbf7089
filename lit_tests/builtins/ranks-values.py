# RUN: %python %s | %filecheck %s
"""rank is a run-time parameter of the kernel; world_size is a constant of the group."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def both(A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=32):
        A[0] = W.rank()
        A[1] = W.world_size()
        A[2] = (W.rank() + 1) % W.world_size()


# CHECK-LABEL: TEST: both
# CHECK: both_kernel(int* {{.*}}A, int [[RANK:rank]])
# CHECK: A[0] = [[RANK]];
# CHECK-NEXT: A[1] = 4;
# CHECK-NEXT: A[2] = (([[RANK]] + 1) & 3);
show(both)

# CHECK-LABEL: TEST: both
# CHECK: A[1] = 1;
# CHECK-NEXT: A[2] = 0;
show(both, world_size=1)
