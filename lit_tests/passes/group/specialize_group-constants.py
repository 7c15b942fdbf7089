# RUN: %python %s | %filecheck %s
"""Size and stride of the group become constants; TileLang knows that the own rank is in range."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def constants(S: W.Symmetric((8, 16), "float32"), A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=32):
        A[0] = W.world_size()
        S[W.rank(), 1, 1] = 2.0


# CHECK-LABEL: TEST: constants
# CHECK: S = T.match_buffer(S_handle, (4, 8, 16), strides=(T.int64(268435456), 16, 1))
# CHECK: T.attr(rank < 4, "tl.assume"
# CHECK: A[0] = 4
show(constants, stage="tile")

# TileLang omits its check of the rank index at each access.
# CHECK-LABEL: TEST: constants
# CHECK: A[0] = 4;
# CHECK-NEXT: S[((((int64_t)rank) * (int64_t)268435456) + (int64_t)17)] =
show(constants)


@T.prim_func
def plain(A: T.Tensor((8,), "int32"), n: T.int32):
    with T.Kernel(1, threads=32):
        A[n] = 1


# A program without a symmetric tensor or builtin gets the number of ranks only.
# CHECK-LABEL: TEST: plain
# CHECK: T.func_attr({"tileweave.group_size": 4})
# CHECK-NOT: assume
show(plain, stage="tile")
