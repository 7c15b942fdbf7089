# RUN: %python %s | %filecheck %s
"""One thread pads, with counters, row, capacity, units of a row and rows of a tile."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def exchange(
    X: T.Tensor((64,), "bfloat16"), n: T.Tensor((1,), "int32"), Y: T.Tensor((64,), "bfloat16")
):
    with T.Kernel(1, threads=64):
        inbox = W.alloc_packed(rows=8, row=64, dtype="bfloat16")
        me = W.rank()
        T.copy(X, inbox[1 - me, 0, 0])
        W.pad(inbox[me, n[0], 0], 8 - n[0])
        T.copy(inbox[me, 0, 0], Y)


# CHECK: __global__
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal<{{.*}}>((&(inbox_arrived[
# CHECK-NEXT: tw::pad((&(inbox_arrived[{{.*}}])), (8 - n[0]), (&(inbox[{{.*}}])), n[0], 8, 1, 8, tileweave_context, {{[0-9]+}});
# CHECK-NEXT: }
# CHECK: tw::wait_reached<{{.*}}>((&(inbox_arrived[{{.*}}])), (epoch * (uint)8),
print(tw.emit(exchange, world_size=2))
