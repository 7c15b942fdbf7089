# RUN: %python %s | %filecheck %s
"""Collectives by multimem operations: vectors of 16 bytes from and to the copies of all ranks."""

import torch

import tileweave as tw
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.core.registry import OPERATORS


def show(op, shape, dtype):
    x = torch.empty(shape, dtype=dtype, device="meta")
    program = OPERATORS[op].steps(checked_problem(op, x, None, 2, ()), "multicast")
    print("TEST:", program.attrs["global_symbol"])
    print(tw.emit(program, world_size=2))


# CHECK-LABEL: TEST: all_reduce_one_shot_multimem
# CHECK: *(uint4*)(parts + {{.*}}) = *(uint4*)(tile_regs
# CHECK-COUNT-2: tw::wait_reached<
# CHECK-COUNT-2: uint4 {{.*}} = *(uint4*)(parts +
# CHECK: __float22bfloat162_rn
# CHECK: *(uint4*)(out +
show("all_reduce", (1 << 14,), torch.bfloat16)

# A block signals once to each rank, after it has copied all parts.
# CHECK-LABEL: TEST: all_reduce_multimem
# CHECK: for (int step = 0; step < 2; ++step) {
# CHECK: *(uint4*)(parts + {{.*}}) = *(uint4*)(tile_regs
# CHECK: for (int [[STEP:step_1]] = 0; [[STEP]] < 2; ++[[STEP]]) {
# CHECK-NEXT: tw::signal<{{.*}}(&(parts_arrived[{{.*}}])), (uint)2);
# CHECK-COUNT-2: tw::wait_reached<
# CHECK-COUNT-2: uint4 {{.*}} = *(uint4*)(parts +
# CHECK: uint4 total =
# CHECK-NEXT: *(uint4*)(sums + {{.*}}) = total;
# CHECK-NEXT: *(uint4*)(sums + {{.*}}) = total;
# CHECK-COUNT-2: tw::signal<{{.*}}(&(sums_arrived[
# CHECK: *(uint4*)(tile_regs + {{.*}}) = *(uint4*)(sums +
show("all_reduce", (1 << 20,), torch.bfloat16)

# CHECK-LABEL: TEST: reduce_scatter_multimem
# CHECK: tw::signal<{{.*}}(&(parts_arrived[{{.*}}])), (uint)2);
# CHECK-COUNT-2: float4 {{.*}} = *(float4*)(parts +
# CHECK: *(float4*)(out +
show("reduce_scatter", (2, 1 << 14), torch.float32)

# CHECK-LABEL: TEST: all_gather_multimem
# CHECK: float4 value = *(float4*)(x +
# CHECK-NEXT: *(float4*)(arrived + {{.*}}) = value;
# CHECK-NEXT: *(float4*)(arrived + {{.*}}) = value;
# CHECK-COUNT-2: tw::signal<{{.*}}(&(arrived_arrived[
show("all_gather", (1 << 14,), torch.uint8)
