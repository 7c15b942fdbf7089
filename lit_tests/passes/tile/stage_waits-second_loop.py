# RUN: %python %s | %filecheck %s
"""A second pipelined loop whose tile comes from a peer: each wait precedes the loads that it guards.

TileLang specializes the warps of one loop of a kernel; the consumers load the tiles of the other.
"""

import tileweave as tw
from tests.passes.second_loop import second_loop

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
print(tw.emit(second_loop(3), world_size=2))

# CHECK-LABEL: TEST: stages: 1
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_load(
# CHECK: } else {
# CHECK: for (int k_3 = 0; k_3 < 4; ++k_3) {
# CHECK-NEXT: tw::wait_reached<{{.*}}>((&(S_arrived[{{.*}}((int64_t)k_3)
# CHECK: *(uint4*)(((half_t*)received) + {{.*}} = *(uint4*)(S +
print("TEST: stages: 1")
print(tw.emit(second_loop(1), world_size=2))
