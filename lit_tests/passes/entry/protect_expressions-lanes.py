# RUN: %python %s | %filecheck %s
"""Scalar loads compile whose index has a factor that TileLang takes for a number of lanes."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import show
from tileweave import language as W


def first_of_row(columns):
    @T.prim_func
    def program(x: T.Tensor((16, columns), "int32"), y: T.Tensor((16,), "int32")):
        with T.Kernel(16, threads=32) as row:
            W.sync_ranks()
            y[row] = x[row, 0]

    return program


@T.prim_func
def from_the_peer(y: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((2, 4), "int32")
        me = W.rank()
        S[1 - me, me, 0] = y[0]
        y[0] = S[me, 1 - me, 0]


# CHECK-LABEL: TEST: 40000 columns
# CHECK: = x[((((int)blockIdx.x) * 39999) + (((int)blockIdx.x) | 0))];
print("TEST: 40000 columns", tw.emit(first_of_row(40000), world_size=2))

# CHECK-LABEL: TEST: 1000 columns
# CHECK: y[((int)blockIdx.x)] = x[(((int)blockIdx.x) * 1000)];
print("TEST: 1000 columns", tw.emit(first_of_row(1000), world_size=2))

# CHECK-LABEL: TEST: from_the_peer
# CHECK: y[0] = S[(((((int64_t)rank) * (int64_t)268435451) + ((int64_t)(rank | 0))) + (int64_t)4)];
show(from_the_peer, world_size=2, pass_configs={"tileweave.reuse": "credit"})
