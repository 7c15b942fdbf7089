# REQUIRES: since-0.1.15
# RUN: %python %s | %filecheck %s
"""A reduction of a part of a fragment, of which TileLang reduces all elements: refused."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


@T.prim_func
def reduced(X: T.Tensor((32, 64), "float32"), Y: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=128):
        W.fence("gpu")
        x = T.alloc_fragment((32, 64), "float32")
        total = T.alloc_fragment((32,), "float32")
        T.copy(X, x)
        T.reduce_sum(x[:, 0:16], total, dim=1)
        T.copy(total, Y)


# CHECK: reduced: T.reduce: a part of the fragment x of shape (32, 64), of which TileLang reduces or writes all elements; expected a part of a tile in shared memory, or a fragment of the size of the part
with print_verdict("reduced"):
    tw.emit(reduced, arch="sm_90a")
