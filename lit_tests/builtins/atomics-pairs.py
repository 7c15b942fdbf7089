# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Pairs of half-precision values are elements of a tensor of pairs, or slices of a tensor of halves."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def slices(S: T.Tensor((64,), "bfloat16")):
    with T.Kernel(1, threads=32):
        x = T.alloc_local((2,), "bfloat16")
        x[0] = T.bfloat16(1)
        W.red_add(S[T.get_thread_binding() * 2], x[0:2])


# CHECK-LABEL: TEST: slices
# CHECK: bfloat16_t [[X:x]][2];
# CHECK: tw::red_add<tw::Type::bf16x2, tw::Scope::gpu, tw::Sem::relaxed>((&(S[(((int)threadIdx.x) * 2)])), tw::bits(*(uint1*)([[X]] + 0)));
show(slices)


@T.prim_func
def elements(P: T.Tensor((64,), "float16x2")):
    with T.Kernel(1, threads=32):
        P[1] = W.atom_exch(P[0], P[2])


# CHECK-LABEL: TEST: elements
# CHECK: uint1 [[OLD:value]] = tl::load_global_32(tw::bits(tw::atom_exch<tw::Type::f16x2, tw::Scope::gpu, tw::Sem::relaxed>((&(P[0])), tw::bits(P[2]))));
# CHECK: P[1] = [[OLD]];
show(elements)


@T.prim_func
def instructions(S: T.Tensor((64,), "bfloat16"), H: T.Tensor((64,), "float16x2")):
    with T.Kernel(1, threads=32):
        x = T.alloc_local((2,), "bfloat16")
        x[0:2] = W.atom_add(S[0], x[0:2], scope="sys")
        W.red_add(S[2], x[0:2])
        H[1] = W.atom_cas(H[0], H[1], H[2])
        H[3] = W.atom_exch(H[4], H[5])


# CHECK-LABEL: TEST: instructions
# CHECK: atom.relaxed.sys.global.add.noftz.bf16x2
# CHECK: red.relaxed.gpu.global.add.noftz.bf16x2
# CHECK: atom.relaxed.gpu.global.cas.b32
# CHECK: atom.relaxed.gpu.global.exch.b32
show(instructions, stage="ptx")
