# RUN: %python %s | %filecheck %s
"""Indices whose loop variables have negative factors keep their values."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def show(index, name):
    @T.prim_func
    def program(x: T.Tensor((16,), "int32"), y: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            me = W.rank()
            for i in T.serial(4):
                y[i] = x[index(me, i)]

    print("TEST:", name)
    print(tw.emit(program.with_attr("global_symbol", name)))


# CHECK-LABEL: TEST: remainder
# CHECK: y[i] = x[((((i * 3) + rank) + 3) & 3)];
show(lambda me, i: (me + 3 - i) % 4, "remainder")

# CHECK-LABEL: TEST: quotient
# CHECK: y[i] = x[(((i + 7) >> 1) - i)];
show(lambda me, i: (7 - i) // 2, "quotient")

# CHECK-LABEL: TEST: below_zero
# CHECK: y[i] = x[(((((i * 2) + 2) / 3) + 1) - i)];
show(lambda me, i: (2 - i) // 3 + 1, "below_zero")

# The multiples would not fit into 32 bits.
# CHECK-LABEL: TEST: large
# CHECK: y[i] = x[{{.*}}int64_t{{.*}}];
show(lambda me, i: (me + 3 - i * 1000000001) % 16, "large")

# Positive factors do not change.
# CHECK-LABEL: TEST: forward
# CHECK: y[i] = x[((i + rank) & 3)];
show(lambda me, i: (me + i) % 4, "forward")
