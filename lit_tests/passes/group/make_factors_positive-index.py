# RUN: %python %s | %filecheck %s
"""Remainders of quotients with a negative factor keep their values."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W


def show(index, name):
    @T.prim_func
    def program(x: T.Tensor((64,), "int32"), y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            me = W.rank()
            for i in T.serial(8):
                y[i] = x[index(me, i)]

    verdicts.show(program, name, world_size=8)


# CHECK-LABEL: TEST: quotient
# CHECK: y[i] = x[(((i >> 1) * 7) & 7)];
show(lambda me, i: (8 - i // 2) % 8, "quotient")

# CHECK-LABEL: TEST: remainder
# CHECK: y[i] = x[(((i & 3) * 7) & 7)];
show(lambda me, i: (8 - i % 4) % 8, "remainder")

# CHECK-LABEL: TEST: of_rank
# CHECK: y[i] = x[(i + (((rank >> 1) * 7) & 7))];
show(lambda me, i: (8 - me // 2) % 8 + i, "of_rank")

# The multiples do not fit into 32 bits. TVM reduces the factors again.
# CHECK-LABEL: TEST: large
# CHECK: y[i] = x[(((i >> 1) * 7) & 7)];
show(lambda me, i: (8 - i // 2 * 1000000001) % 8, "large")

# Other negative factors do not change (keep_indices).
# CHECK-LABEL: TEST: other
# CHECK: y[i] = x[(((3 - i) & 7) | 0)];
show(lambda me, i: (3 - i) % 8, "other")
