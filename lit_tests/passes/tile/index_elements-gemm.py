# RUN: %python %s | %filecheck %s
"""Vectors of a tile that tensor cores read are stored in registers, then in the swizzled tile."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def product(X: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        S = W.alloc_symmetric((64, 64), "float16")
        sent = T.alloc_shared((64, 64), "float16")
        received = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        T.copy(X, sent)
        T.copy(sent, S[1 - W.rank(), 0, 0])
        T.copy(S[W.rank(), 0, 0], received)
        T.clear(total)
        T.gemm(received, received, total, transpose_B=True)
        T.copy(total, Y)


print(tw.emit(product, world_size=2, pass_configs={"tileweave.protocol": {"S": "ll"}}))
# No other operator chooses the layout of `sent`.
# CHECK: half_t vector[4];
# CHECK: tw::ll_st<tw::Scope::sys>({{.*}}tw::bits(*(uint2*)(((half_t*)sent) +
# CHECK: uint2 value = {{.*}}tw::ll_ld<tw::Scope::sys, 2>
# CHECK-NEXT: *(uint2*)(vector + 0) = value;
# CHECK-NEXT: *(uint2*)(((half_t*)received) + ({{.*}}) = *(uint2*)(vector + 0);
# CHECK-NOT: tw::ll_
