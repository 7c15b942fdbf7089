# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""One thread of a block with several axes issues each operation of the TMA."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W


def show(threads, name):
    @T.prim_func
    def program(X: T.Tensor((16, 32), "float32"), S: W.Symmetric((16, 32), "float32")):
        with T.Kernel(1, threads=threads):
            tile = T.alloc_shared((16, 32), "float32")
            T.copy(X, tile)
            T.copy(tile, S[W.rank(), 0, 0])

    verdicts.show(program, name)


# CHECK-LABEL: TEST: two_axes
# CHECK: threadIdx.x) == 0) && (((int)threadIdx.y) == 0)
# CHECK-NEXT: tl::fence_proxy_async();
# CHECK-NEXT: tl::tma_store(
show((32, 4), "two_axes")

# CHECK-LABEL: TEST: one_axis
# CHECK: if (tl::tl_shuffle_elect<128>()) {
# CHECK-NEXT: tl::fence_proxy_async();
# CHECK-NEXT: tl::tma_store(
show(128, "one_axis")
