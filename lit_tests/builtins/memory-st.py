# RUN: %python %s | %filecheck %s
"""A store converts the value to the element's type; a vector is stored by one instruction."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def elements(S: W.Symmetric((64,), "float16"), F: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        W.st(S[1, 0], 1.5)
        W.st(S[1, 1], F[0], scope="sys")


# CHECK-LABEL: TEST: elements
# CHECK-NOT: __syncthreads
# CHECK: tw::st<tw::Scope::gpu, tw::Sem::relaxed>((&(S[536870912])), half_t(0x1.8p+0f{{.*}}));
# CHECK: tw::st<tw::Scope::sys, tw::Sem::relaxed>((&(S[536870913])), ((half_t)F[0]));
show(elements)


@T.prim_func
def release(S: W.Symmetric((64,), "float32"), x: T.float32):
    with T.Kernel(1, threads=32):
        S[1, T.get_thread_binding()] = x
        if T.get_thread_binding() == 0:
            W.st(S[1, 40], x, scope="sys", sem="release")


# The block synchronizes before the condition, where all its threads arrive.
# CHECK-LABEL: TEST: release
# CHECK: S[{{.*}}] = x;
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::st<tw::Scope::sys, tw::Sem::release>(
show(release)


@T.prim_func
def instructions(
    S: T.Tensor((64,), "bfloat16"), B: T.Tensor((64,), "uint8"), L: T.Tensor((64,), "int64")
):
    with T.Kernel(1, threads=32):
        x = T.alloc_local((8,), "bfloat16")
        for i in T.serial(8):
            x[i] = S[i]
        W.st(S[8], x[0:8], scope="sys", sem="release")
        W.st(S[16], x[0:2])
        W.st(B[0], B[1] + T.uint8(1))
        W.st(L[0], -1)


# C++ widens the sum of bytes and the literal; they are stored in the tensor's type.
# CHECK-LABEL: TEST: instructions
# CHECK: st.release.sys.global.b128
# CHECK: st.relaxed.gpu.global.b32
# CHECK: st.relaxed.gpu.global.b8
# CHECK: st.relaxed.gpu.global.b64
show(instructions, stage="ptx")
