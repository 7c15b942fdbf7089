# RUN: %python %s | %filecheck %s
"""A second pipelined loop whose tile comes from a peer: each wait precedes the loads that it guards.

TileLang specializes the warps of one loop of a kernel; the consumers load the tiles of the other.
"""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N, STEPS = 64, 4


def program(num_stages):
    @T.prim_func
    def second_loop(A: T.Tensor((STEPS, N, N), "float16"), out: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((STEPS, N, N), "float16")
            loaded = T.alloc_shared((N, N), "float16")
            received = T.alloc_shared((N, N), "float16")
            total = T.alloc_fragment((N, N), "float32")
            T.clear(total)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(A[k, 0, 0], loaded)
                for i, j in T.Parallel(N, N):
                    total[i, j] += loaded[i, j]
            for k in T.serial(STEPS):
                T.copy(total, S[1 - W.rank(), k, 0, 0])
            for k in T.Pipelined(STEPS, num_stages=num_stages):
                T.copy(S[W.rank(), k, 0, 0], received)
                T.gemm(received, received, total)
            T.copy(total, out)

    return second_loop


# CHECK-LABEL: TEST: stages: 3
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_load(
# CHECK: } else {
# CHECK-NOT: tl::cp_async_gs
# CHECK: tw::wait_reached<{{.*}}>((&(S_arrived[
# CHECK: tl::cp_async_gs<16>((&(((half_t*)received)[
# CHECK: tw::wait_reached<{{.*}}>((&(S_arrived[
# CHECK: tl::cp_async_gs<16>((&(((half_t*)received)[
# CHECK: for (int k_3 = 0; k_3 < 2; ++k_3) {
# CHECK-NEXT: tw::wait_reached<{{.*}}>((&(S_arrived[{{.*}}((int64_t)k_3)) + (int64_t)2)
# CHECK: tl::cp_async_gs<16>((&(((half_t*)received)[{{.*}}((k_3 + 2) % 3)
print("TEST: stages: 3")
print(tw.emit(program(3), world_size=2))

# CHECK-LABEL: TEST: stages: 1
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_load(
# CHECK: } else {
# CHECK: for (int k_3 = 0; k_3 < 4; ++k_3) {
# CHECK-NEXT: tw::wait_reached<{{.*}}>((&(S_arrived[{{.*}}((int64_t)k_3)
# CHECK: *(uint4*)(((half_t*)received) + {{.*}} = *(uint4*)(S +
print("TEST: stages: 1")
print(tw.emit(program(1), world_size=2))
