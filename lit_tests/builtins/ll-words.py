# RUN: %python %s | %filecheck %s
"""Words of the LL protocol: one access of 8 bytes, or of 16 bytes for two words, and no fence."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W

N = 64


@T.prim_func
def calls(
    X: T.Tensor((N,), "float32"),
    H: T.Tensor((N,), "bfloat16"),
    S: W.Symmetric((N,), "uint64"),
    epoch: T.uint32,
):
    with T.Kernel(1, threads=8):
        t = T.get_thread_binding()
        W.ll_st(S[1, t], X[t], epoch)
        W.ll_st(S[1, 2 * t], X[2 * t : 2 * t + 2], epoch, scope="gpu")
        W.ll_st(S[1, t], H[2 * t : 2 * t + 2], 7)
        X[t] = W.ll_ld(S[0, t], epoch, dtype="float32", peer=1)
        X[2 * t : 2 * t + 2] = W.ll_ld(S[0, 2 * t], epoch, words=2, dtype="float32", scope="gpu")
        H[4 * t : 4 * t + 4] = W.ll_ld(S[0, 2 * t], epoch, words=2, dtype="bfloat16")


# CHECK-LABEL: TEST: calls
# CHECK: tw::ll_st<tw::Scope::sys>((&(S[{{.*}}])), X[((int)threadIdx.x)], epoch);
# CHECK: tw::ll_st<tw::Scope::gpu>((&(S[{{.*}}])), tw::bits(*(float2*)(X + {{.*}})), epoch);
# CHECK: tw::ll_st<tw::Scope::sys>((&(S[{{.*}}])), tw::bits(*(uint1*)(H + {{.*}})), (uint)7);
# CHECK: float [[VALUE:[a-z_0-9]+]] = tw::ll_ld<tw::Scope::sys, 1>((&(S[{{.*}}])), epoch, 1, tileweave_context, {{[0-9]+}});
# CHECK-NEXT: X[{{.*}}] = [[VALUE]];
# CHECK: float2 {{.*}} = tl::load_global_64(tw::bits(tw::ll_ld<tw::Scope::gpu, 2>((&(S[{{.*}}])), epoch, -1,
# CHECK: uint2 {{.*}} = tl::load_global_64(tw::bits(tw::ll_ld<tw::Scope::sys, 2>((&(S[{{.*}}])), epoch, -1,
show(calls, world_size=2)


@T.prim_func
def exchange(
    X: T.Tensor((N,), "bfloat16"), S: W.Symmetric((N,), "uint64"), Y: T.Tensor((N,), "bfloat16"),
    epoch: T.uint32,
):  # fmt: skip
    with T.Kernel(1, threads=16):
        t = T.get_thread_binding()
        W.ll_st(S[1 - W.rank(), 2 * t], X[4 * t : 4 * t + 4], epoch)
        Y[4 * t : 4 * t + 4] = W.ll_ld(S[W.rank(), 2 * t], epoch, words=2, dtype="bfloat16")


# The data is loaded by one access. v2.b64 is two atomic accesses; v4.b32 would be four.
# CHECK-LABEL: TEST: exchange
# CHECK: .entry exchange_kernel(
# CHECK-NOT: {{fence|membar|bar.sync}}
# CHECK: ld.global.v2.u32
# CHECK-NOT: {{fence|membar|bar.sync}}
# CHECK: st.relaxed.sys.global.v2.b64
# CHECK-NOT: {{fence|membar|bar.sync}}
# CHECK: ld.relaxed.sys.global.v2.b64
# CHECK-NOT: {{fence|membar|bar.sync}}
# CHECK: setp.{{.*}}
# CHECK-NOT: {{fence|membar|bar.sync}}
# CHECK: mov.u64 %rd{{[0-9]+}}, %globaltimer;
# CHECK-NOT: {{fence|membar|bar.sync}}
# CHECK: ret;
show(exchange, world_size=2, stage="ptx")
