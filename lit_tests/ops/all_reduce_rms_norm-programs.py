# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""All-reduce with RMSNorm: blocks that send, and blocks that wait once for the rows of all ranks.

The programs contain no synchronization; their kernels do.
"""

import inspect
import re

from tests.verdicts import show
from tileweave.ops.norm.kernels import all_reduce_rms_norm
from tileweave.ops.norm.kernels.all_reduce_rms_norm import (
    NormConfig,
    local_program,
    one_shot_program,
    two_shot_program,
)

# CHECK-LABEL: TEST: synchronization in the source
# CHECK-NEXT: none
print("TEST: synchronization in the source")
source = inspect.getsource(all_reduce_rms_norm)
print(re.findall(r"W\.(?:signal|wait|fence|barrier)\w*|sync_threads", source) or "none")

# A block that sends moves 16 bytes a thread and signals once. A block that waits has loaded weight
# and residual before, waits once, and then loads the rows of all ranks.
# CHECK-LABEL: TEST: all_reduce_rms_norm_one_shot
# CHECK: __launch_bounds__(512, 1)
# CHECK: if (((int)blockIdx.x) < 24) {
# CHECK: = *(uint4*)(x +
# CHECK: *(uint4*)(arrived + {{.*}}rank{{.*}}) = *(uint4*)(row
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == {{[0-9]+}}) {
# CHECK-NEXT: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>(
# CHECK: } else {
# CHECK: = *(uint4*)(weight +
# CHECK: *(uint4*)(residual +
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>({{.*}}(uint)4)
# CHECK-NOT: tw::wait
# CHECK: for (int [[I:i_[0-9]+]] = 0; [[I]] < 8; ++[[I]]) {
# CHECK: *(uint4*)(held + {{.*}}) = *(uint4*)(arrived +
# CHECK: *(uint4*)(residual_out +
# CHECK: tl::AllReduce<tl::SumOp, 512
# CHECK: rsqrtf(
# CHECK: *(uint4*)(out +
# CHECK-NOT: tw::
show(one_shot_program(NormConfig(6, 6144, 4, "bfloat16", 1e-6)), world_size=4)

# The owner of a row sends its sum to all ranks, before it waits for anything else.
# CHECK-LABEL: TEST: all_reduce_rms_norm_two_shot
# CHECK: if (((int)blockIdx.x) < 64) {
# CHECK: *(uint4*)(partials +
# CHECK: tw::signal<
# CHECK: if (((int)blockIdx.x) < 80) {
# CHECK: tw::wait_reached<
# CHECK: = *(uint4*)(partials +
# CHECK: for (int step = 0; step < 4; ++step) {
# CHECK: *(uint4*)(sums +
# CHECK: tw::signal<
# CHECK: } else {
# CHECK: = *(uint4*)(weight +
# CHECK: tw::wait_reached<
# CHECK: = *(uint4*)(sums +
# CHECK: tl::AllReduce<tl::SumOp
# CHECK: *(uint4*)(out +
# CHECK-NOT: tw::
show(two_shot_program(NormConfig(64, 4096, 4, "bfloat16", 1e-6)), world_size=4)

# One rank exchanges nothing. Each 128 columns, in 16 threads, have a scale.
# CHECK-LABEL: TEST: all_reduce_rms_norm_local
# CHECK-NOT: arrived
# CHECK-NOT: tw::signal
# CHECK-NOT: tw::wait
# CHECK: *(uint4*)(residual_out +
# CHECK: tl::AllReduce<tl::SumOp, 512
# CHECK: tl::AllReduce<tl::MaxOp, 16,
# CHECK: scales[
# CHECK: fp8_e4
show(local_program(NormConfig(64, 4096, 1, "bfloat16", 1e-6, quant="fp8_1x128")), world_size=1)
