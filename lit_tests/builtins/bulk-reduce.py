# RUN: %python %s | %filecheck %s
"""bulk_reduce becomes the PTX instruction for its operation and type."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


def program(dtype, op):
    @T.prim_func
    def reduce(S: W.Symmetric((256,), dtype), A: T.Tensor((256,), dtype)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((256,), dtype)
            T.copy(A, tile)
            W.bulk_reduce(S[1, 0], tile, 256, op=op)

    return reduce


# CHECK-LABEL: TEST: reduce
# CHECK: tw::bulk_reduce<tw::Type::bf16, tw::Op::add>((&(S[536870912])), (&(tile[0])), 256);
show(program("bfloat16", "add"))

# CHECK-LABEL: TEST: reduce
# CHECK: tw::bulk_reduce<tw::Type::u64, tw::Op::and_>(
show(program("uint64", "and"))

# CHECK-LABEL: TEST: reduce
# CHECK: cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s32 [
show(program("int32", "max"), stage="ptx")
