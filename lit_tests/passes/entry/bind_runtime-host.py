# RUN: %python %s | %filecheck %s
"""The host binds values of the runtime once for each launch, and only if the program uses them."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def twice(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.signal(F[W.rank(), 0])
    with T.Kernel(1, threads=128):
        W.wait_ge(F[W.rank(), 0], W.rank())


# Two kernels share one binding.
# CHECK-LABEL: TEST: twice
# CHECK: T.call_packed("tileweave.bind", {{.*}}, "tileweave.context,tileweave.rank")
# CHECK: rank: T.int32 =
# CHECK-NOT: call_packed
# CHECK-NOT: tileweave.rank()
# CHECK: tileweave.signal(T.access_ptr(F[rank, 0]
# CHECK: tileweave.wait_ge(T.access_ptr(F[rank, 0]{{.*}}, tileweave_context,
show(twice, stage="tile")


@T.prim_func
def neither(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.signal(F[1, 0])


# CHECK-LABEL: TEST: neither
# CHECK-NOT: call_packed
# CHECK-NOT: assume
# CHECK: tileweave.signal(
# CHECK-LABEL: TEST: neither
# CHECK: neither_kernel(uint* __restrict__ F);
show(neither, stage="tile")
show(neither)
