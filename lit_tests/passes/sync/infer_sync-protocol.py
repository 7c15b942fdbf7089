# RUN: %python %s | %filecheck %s
"""With tileweave.protocol, words with flags replace counters, signals, waits and the TMA."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N = 64


@T.prim_func
def shift(X: T.Tensor((4, N), "float16"), Y: T.Tensor((4, N), "float16")):
    with T.Kernel(4, threads=32) as block:
        S = W.alloc_symmetric((4, N), "float16")
        tile = T.alloc_shared((N,), "float16")
        T.copy(X[block, 0], tile)
        T.copy(tile, S[(W.rank() + 1) % W.world_size(), block, 0])
        T.copy(S[W.rank(), block, 0], tile)
        T.copy(tile, Y[block, 0])


def show(protocol, stage="cuda"):
    print("TEST:", protocol, stage)
    configs = {"tileweave.protocol": {"S": protocol}}
    print(tw.emit(shift, world_size=2, stage=stage, pass_configs=configs))


# CHECK-LABEL: TEST: flag cuda
# CHECK-NOT: tw::ll_
# CHECK: tw::signal<
# CHECK: tw::wait_reached<
show("flag")

# CHECK-LABEL: TEST: ll cuda
# CHECK: shift_kernel(uint64_t* S, half_t* X, half_t* Y, uint* launches, int rank, int64_t tileweave_context)
# CHECK: uint epoch = (tw::ld<{{.*}}>((&(launches[0]))) + (uint)1);
# CHECK-NOT: tw::signal<
# CHECK: tw::ll_st<tw::Scope::sys>((&(S[{{.*}}epoch & (uint)1{{.*}}])), tw::bits(*(uint2*)(vector + 0)), epoch);
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: uint2 {{.*}} = tl::load_global_64(tw::bits(tw::ll_ld<tw::Scope::sys, 2>((&(S[{{.*}}])), epoch, -1,
# CHECK-NOT: tw::{{signal|wait}}
show("ll")

# One access of 16 bytes for two words, and no fence at system scope.
# CHECK-LABEL: TEST: auto ptx
# CHECK: .entry shift_kernel(
# CHECK-NOT: .acq_rel.sys
# CHECK: st.relaxed.sys.global.v2.b64
# CHECK-NOT: .acq_rel.sys
# CHECK: ld.relaxed.sys.global.v2.b64
# CHECK-NOT: {{fence|membar|bar.sync}}
# CHECK: %globaltimer;
show("auto", "ptx")
