# RUN: %python %s | %filecheck %s
"""Rows that are valid for a number of W.rank_uniform: waits inside the condition, counters cleared."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W

ROWS, N = 4, 64


@T.prim_func
def rows_to_next(
    X: T.Tensor((ROWS, N), "float32"), n: T.Tensor((1,), "int32"), Y: T.Tensor((ROWS, N), "float32")
):
    with T.Kernel(ROWS, threads=64) as row:
        S = W.alloc_symmetric((ROWS, N), "float32")
        if row < W.rank_uniform(n[0]):
            T.copy(X[row, 0:N], S[(W.rank() + 1) % W.world_size(), row, 0:N])
            T.copy(S[W.rank(), row, 0:N], Y[row, 0:N])


# One buffer and a credit: a launch that exchanges no row would not order the launches around it. A
# counter has the units of one launch, because rows take part in some launches only.
# CHECK-LABEL: TEST: rows_to_next
# CHECK: rows_to_next_kernel(float* S, uint* S_arrived, float* X, float* Y, uint* finished, uint* launches, int* n,
# CHECK: (((int)blockIdx.x) < tw::rank_uniform(n[0]))
# CHECK: tw::wait_reached<{{.*}}>((&(finished[{{.*}}])), (epoch - (uint)1),
# CHECK: tw::signal<{{.*}}>((&(S_arrived[
# CHECK: tw::wait_reached<{{.*}}>((&(S_arrived[{{.*}}])), (uint)1, -1,
# CHECK: tw::atom_add<{{.*}}acq_rel>((&(launches[1])), (uint)1);
# CHECK: for (int granule = 0; granule < 4; ++granule) {
# CHECK-NEXT: S_arrived[{{.*}}] = (uint)0;
# CHECK: tw::signal<{{.*}}>((&(finished[
# CHECK-NOT: tw::signal
show(rows_to_next, world_size=2)
