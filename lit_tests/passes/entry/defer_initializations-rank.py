# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""A deferred initialization uses the rank that the host passes, not its slot on the host."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W


@T.macro
def fill_with_rank(f):
    T.fill(f, W.rank())


@T.macro
def fill_for_rank(f):
    T.clear(f)
    if W.rank() == 1:
        T.fill(f, 5)


@T.macro
def add_for_each_rank(f):
    T.clear(f)
    for number in T.serial(W.rank() + 1):
        for i, j in T.Parallel(16, 32):
            f[i, j] += number + 1


def show(initialize, name):
    @T.prim_func
    def program(G: T.Tensor((3, 2, 16, 32), "int32"), Y: T.Tensor((16, 32), "int32")):
        with T.Kernel(1, threads=256):
            f = T.alloc_fragment((16, 32), "int32")
            tile = T.alloc_shared((16, 32), "int32")
            initialize(f)
            for step in T.serial(3):
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(G[step, k, 0, 0], tile)
                    for i, j in T.Parallel(16, 32):
                        f[i, j] += tile[i, j]
            T.copy(f, Y)

    verdicts.show(program, name, world_size=2, arch="sm_90a")


# CHECK-LABEL: TEST: fill_with_rank
# CHECK: int rank) {
# CHECK: done_0 = 0;
# CHECK: make_int2(rank, rank)
show(fill_with_rank, "fill_with_rank")

# CHECK-LABEL: TEST: fill_for_rank
# CHECK: int rank) {
# CHECK: done_0 = 0;
# CHECK: rank == 1
show(fill_for_rank, "fill_for_rank")

# CHECK-LABEL: TEST: add_for_each_rank
# CHECK: int rank) {
# CHECK: done_0 = 0;
# CHECK: number < (rank + 1)
show(add_for_each_rank, "add_for_each_rank")
