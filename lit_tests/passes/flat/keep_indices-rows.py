# RUN: %python %s | %filecheck %s
"""Indices that TVM would simplify wrongly have an operation without effect around them."""

import tilelang.language as T

from tests import verdicts
from tests.simulator.device.miscompiled import row_of_a_tile
from tileweave import language as W


def show(index, name):
    @T.prim_func
    def program(x: T.Tensor((64,), "int32"), y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            W.fence("gpu")
            for j in T.Parallel(64):
                y[j] = x[index(j)]

    verdicts.show(program, name)


# In row 3 the last two bits of the numbers of vectors are inverted.
# CHECK-LABEL: TEST: row
# CHECK: row[0] = ((half_t*)A_tile)[({{.*}} >> 4) + 1) & 1) * 16)){{.*}} >> 3) + 1) & 1) * 8)) + {{.*}} + 192) | 0)];
verdicts.show(row_of_a_tile(), "row", world_size=1)

# CHECK-LABEL: TEST: offsets
# CHECK: y[((int)threadIdx.x)] = x[({{.*}} >> 3) + 1) & 7) * 8) + ({{.*}} & 7) + 1) & 7)) | 0)];
show(lambda j: (j // 8 + 1) % 8 * 8 + (j % 8 + 1) % 8, "offsets")

# CHECK-LABEL: TEST: backward
# CHECK: y[((int)threadIdx.x)] = x[(((63 - ((int)threadIdx.x)) >> 1) | 0)];
show(lambda j: (63 - j) // 2, "backward")

# One offset is simplified rightly.
# CHECK-LABEL: TEST: rotated
# CHECK: y[((int)threadIdx.x)] = x[((((int)threadIdx.x) + 8) & 63)];
show(lambda j: (j // 8 + 1) % 8 * 8 + j % 8, "rotated")


def backward(index, name):
    @T.prim_func
    def program(x: T.Tensor((16,), "int32"), y: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            me = W.rank()
            for i in T.serial(4):
                y[i] = x[index(me, i)]

    verdicts.show(program, name)


# CHECK-LABEL: TEST: of_rank
# CHECK: y[i] = x[((((rank + 3) - i) & 3) | 0)];
backward(lambda me, i: (me + 3 - i) % 4, "of_rank")

# CHECK-LABEL: TEST: below_zero
# CHECK: y[i] = x[(((((2 - i) / 3) + (((2 - i) % 3) >> 31)) + 1) | 0)];
backward(lambda me, i: (2 - i) // 3 + 1, "below_zero")

# CHECK-LABEL: TEST: large
# CHECK: y[i] = x[(((rank + 3) - (i * 1000000001)) & 15)];
backward(lambda me, i: (me + 3 - i * 1000000001) % 16, "large")

# CHECK-LABEL: TEST: forward
# CHECK: y[i] = x[((i + rank) & 3)];
backward(lambda me, i: (me + i) % 4, "forward")
