# RUN: %python %s | %filecheck %s
"""A prefetch is one instruction; it waits for nothing, and no wait is inferred for it."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def prefetches(A: T.Tensor((64, 64), "float16"), out: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=64):
        parts = W.alloc_symmetric((64, 64), "float16")
        me, peer = W.rank(), (W.rank() + 1) % W.world_size()
        W.prefetch(parts[me, T.get_thread_binding(), 0])
        W.prefetch(parts[peer, T.get_thread_binding(), 0])
        T.copy(A, parts[peer, 0, 0])
        T.copy(parts[me, 0, 0], out)


# CHECK-LABEL: TEST: prefetches
# CHECK-NOT: tw::wait_reached
# CHECK: tw::prefetch((&(parts[{{.*}}])));
# CHECK-NEXT: tw::prefetch((&(parts[{{.*}}])));
# CHECK-NEXT: tw::wait_reached
show(prefetches)
