# RUN: %python %s | %filecheck %s
"""A load reads an element or a vector in one instruction; equal loads are not merged."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def elements(S: W.Symmetric((64,), "float32"), B: T.Tensor((64,), "uint8")):
    with T.Kernel(1, threads=32):
        S[0, 0] = W.ld(S[1, 1])
        S[0, 2] = W.ld(S[1, 3], scope="sys", sem="relaxed")
        B[0] = W.ld(B[1], sem="volatile")


# CHECK-LABEL: TEST: elements
# CHECK: elements_kernel(uchar* B, float* S)
# CHECK: S[{{.*}}0] = tw::ld<tw::Scope::gpu, tw::Sem::acquire, 1>((&(S[268435457])));
# CHECK: S[{{.*}}2] = tw::ld<tw::Scope::sys, tw::Sem::relaxed, 1>((&(S[268435459])));
# CHECK: B[0] = tw::ld<tw::Scope::gpu, tw::Sem::volatile_, 1>((&(B[1])));
show(elements)


@T.prim_func
def vectors(S: T.Tensor((64,), "bfloat16"), F: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        x = T.alloc_local((8,), "bfloat16")
        x[0:8] = W.ld(S[0], 8)
        x[0:4] = W.ld(S[0], 4) + W.ld(S[0], 4)
        F[0:4] = W.ld(F[4], 4)


# CHECK-LABEL: TEST: vectors
# CHECK: uint4 [[A:value[_0-9]*]] = tl::load_global_128(tw::bits(tw::ld<tw::Scope::gpu, tw::Sem::acquire, 8>((&(S[0])))));
# CHECK: *(uint4*)(x + 0) = [[A]];
# CHECK: uint2 {{.*}} = tl::load_global_64(tw::bits(tw::ld<tw::Scope::gpu, tw::Sem::acquire, 4>((&(S[0])))));
# CHECK: uint2 {{.*}} = tl::load_global_64(tw::bits(tw::ld<tw::Scope::gpu, tw::Sem::acquire, 4>((&(S[0])))));
# CHECK: float4 [[C:value[_0-9]*]] = tl::load_global_128(tw::bits(tw::ld<{{.*}}, 4>((&(F[4])))));
# CHECK-NEXT: *(float4*)(F + 0) = [[C]];
show(vectors)


@T.prim_func
def instructions(
    S: T.Tensor((64,), "bfloat16"),
    F: T.Tensor((64,), "float32"),
    Q: T.Tensor((64,), "float8_e4m3fn"),
):
    with T.Kernel(1, threads=32):
        F[0:4] = W.ld(F[4], 4, scope="sys")
        S[0:4] = W.ld(S[4], 4, scope="cta", sem="relaxed")
        S[8] = W.ld(S[9])
        Q[0:4] = W.ld(Q[4], 4)
        Q[8] = W.ld(Q[9], sem="volatile")


# One access of 128 bits, not a vector, which may be torn.
# CHECK-LABEL: TEST: instructions
# CHECK: ld.acquire.sys.global.b128
# CHECK: ld.relaxed.cta.global.b64
# CHECK: ld.acquire.gpu.global.b16
# CHECK: ld.acquire.gpu.global.b32
# CHECK: ld.volatile.global.b8
show(instructions, stage="ptx")
