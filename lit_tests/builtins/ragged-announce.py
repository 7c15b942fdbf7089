# RUN: %python %s | %filecheck %s
"""One thread announces, then the block publishes; loads of counts do not use the read-only cache."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def exchange(
    X: T.Tensor((64,), "bfloat16"), n: T.Tensor((2,), "int32"), Y: T.Tensor((2, 64), "bfloat16")
):
    with T.Kernel(1, threads=64):
        inbox = W.alloc_ragged((), rows=8, row=64, dtype="bfloat16")
        me = W.rank()
        for peer in T.serial(2):
            W.announce(inbox[peer, me, 0, 0], n[peer])
            if n[peer] > 0:
                T.copy(X, inbox[peer, me, n[peer] - 1, 0])
        for source in T.serial(2):
            if W.announced(inbox[me, source, 0, 0]) > 0:
                T.copy(inbox[me, source, 0, 0], Y[source, 0:64])


# A row beyond the capacity of 8 is not stored.
# CHECK: __global__
# CHECK-NOT: const uint* __restrict__ inbox_announced
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::announce((&(inbox_announced[{{.*}}])), n[peer], (&(inbox_total[peer])), 8, 1, 8, tileweave_context, {{[0-9]+}});
# CHECK-NEXT: }
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal<{{.*}}>((&(inbox_announced_posted[
# CHECK: if (n[peer] < 9) {
# CHECK-NEXT: inbox[{{.*}}n[peer]{{.*}}] = X[
# CHECK: __syncthreads();
# CHECK: tw::signal<{{.*}}>((&(inbox_arrived[{{.*}}])), (uint)1);
# CHECK: tw::wait_reached<{{.*}}>((&(inbox_announced_posted[
# CHECK: if (0 < ((int)inbox_announced[
# CHECK: tw::wait_reached<{{.*}}>((&(inbox_arrived[{{.*}}])), inbox_announced[
print(tw.emit(exchange, world_size=2))
