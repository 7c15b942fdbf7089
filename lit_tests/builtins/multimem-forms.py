# RUN: %python %s | %filecheck %s
"""Multicast operations accept scalars and vectors; the host checks for multicast before a launch."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def reduce(
    M: T.Tensor((64,), "bfloat16"), F: T.Tensor((64,), "float32"), U: T.Tensor((64,), "uint64")
):
    with T.Kernel(1, threads=32):
        x = T.alloc_local((8,), "bfloat16")
        x[0:8] = W.multimem_ld_reduce(M[0], 8, op="add")
        W.multimem_st(M[0], x[0:8])
        W.multimem_red(M[8], x[0:4], op="add")
        F[0] = W.multimem_ld_reduce(F[1], op="add", sem="acquire")
        U[0] = W.multimem_ld_reduce(U[1], op="max", scope="gpu")
        W.multimem_red(U[2], 6, op="xor", sem="release")


# CHECK-LABEL: TEST: host
# CHECK: "tileweave.require_multicast"
# CHECK: T.tileweave.multimem_ld_reduce(
show(reduce, "host", stage="tile")

# CHECK-LABEL: TEST: cuda
# CHECK: tw::multimem_ld_reduce<tw::Type::bf16x2, tw::Op::add, tw::Scope::sys, tw::Sem::relaxed, 8>((&(M[0])))
# CHECK: tw::multimem_st<tw::Type::bf16x2, tw::Scope::sys, tw::Sem::relaxed>((&(M[0])), tw::bits(*(uint4*)(x + 0)));
# CHECK: tw::multimem_red<tw::Type::bf16x2, tw::Op::add, tw::Scope::sys, tw::Sem::relaxed>((&(M[8])), tw::bits(*(uint2*)(x + 0)));
# CHECK: F[0] = tw::multimem_ld_reduce<tw::Type::f32, tw::Op::add, tw::Scope::sys, tw::Sem::acquire, 1>((&(F[1])));
# CHECK: U[0] = tw::multimem_ld_reduce<tw::Type::u64, tw::Op::max, tw::Scope::gpu, tw::Sem::relaxed, 1>((&(U[1])));
# CHECK: __syncthreads();
# CHECK-NEXT: tw::multimem_red<tw::Type::u64, tw::Op::xor_, tw::Scope::sys, tw::Sem::release>((&(U[2])), (uint64_t)6);
show(reduce, "cuda")

# Sums of half precision accumulate in single precision.
# CHECK-LABEL: TEST: instructions
# CHECK: multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2
# CHECK: multimem.st.relaxed.sys.global.v4.bf16x2
# CHECK: multimem.red.relaxed.sys.global.add.v2.bf16x2
# CHECK: multimem.ld_reduce.acquire.sys.global.add.f32
# CHECK: multimem.ld_reduce.relaxed.gpu.global.max.u64
# CHECK: multimem.red.release.sys.global.xor.b64
show(reduce, "instructions", stage="ptx")
