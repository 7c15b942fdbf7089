# RUN: %python %s | %filecheck %s
"""A fence is one instruction without a block barrier; its qualifiers are given by position or name."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def fences():
    with T.Kernel(1, threads=32):
        W.fence("sys")
        W.fence("gpu", "sc")
        W.fence(scope="cta", sem="acq_rel")
        W.fence_proxy_async()


# CHECK-LABEL: TEST: fences
# CHECK-NOT: __syncthreads
# CHECK: tw::fence<tw::Scope::sys, tw::Sem::acq_rel>();
# CHECK-NEXT: tw::fence<tw::Scope::gpu, tw::Sem::sc>();
# CHECK-NEXT: tw::fence<tw::Scope::cta, tw::Sem::acq_rel>();
# CHECK-NEXT: tw::fence_proxy_async();
show(fences)
