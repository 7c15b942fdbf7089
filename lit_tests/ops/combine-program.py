# RUN: %python %s | %filecheck %s
"""Combine: ranks add rows of their experts, then the owners of tokens add the sums of the ranks.

The program contains no synchronization; its kernel does.
"""

import inspect
import re

import tileweave as tw
from tileweave.ops.moe.kernels import combine
from tileweave.ops.moe.kernels.row_layout import RowLayout


def show(tokens, capacity, ranks, choices=8):
    layout = RowLayout.of(7168, "bfloat16")
    blocks = combine.CombineBlocks(tokens, choices, capacity, ranks, layout)
    print("TEST: tokens:", tokens)
    print("blocks:", blocks.publishers, blocks.of_chunk, blocks.chunks, blocks.height)
    program = combine.combine_program(blocks)
    print(tw.explain(program, world_size=ranks))
    print(tw.emit(program, world_size=ranks))


# CHECK-LABEL: TEST: synchronization in the source
# CHECK-NEXT: none
print("TEST: synchronization in the source")
source = inspect.getsource(combine)
print(re.findall(r"W\.(?:signal|wait|fence|barrier|ll_)\w*|sync_threads", source) or "none")

# One signal follows the weights of a block, and one the sums of its four tokens. Sums are stored on
# the rank that adds them. A block waits once for the weights of an owner. Rows are loaded 16 bytes
# at a time, before they are added. The wait for weights orders launches, so no block waits for a
# credit.
# CHECK-LABEL: TEST: tokens: 4096
# CHECK-NEXT: blocks: 64 258 12 4
# CHECK-NOT: credit
# CHECK: sums{{ +}}two buffers in turn: every writer waits for its readers' data
# CHECK: if (((int)blockIdx.x) < 64) {
# CHECK: weights[
# CHECK: __syncthreads();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(weights_arrived[
# CHECK: source[
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(weights_arrived[
# CHECK: = weights[
# CHECK-NOT: tw::
# CHECK: for (int choice = 0; choice < 8; ++choice) {
# CHECK: for (int [[V:i_[0-9]+]] = 0; [[V]] < 7; ++[[V]]) {
# CHECK: *(uint4*)(y +
# CHECK: *(uint4*)(row + ([[V]] * 8))
# CHECK-NEXT: }
# CHECK-NOT: tw::
# CHECK: *(uint4*)(sums + {{.*}} / (int64_t)86) + ((int64_t)rank)) + (int64_t)1) & (int64_t)1) * (int64_t)536870912)
# CHECK: __syncthreads();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(sums_arrived[
# CHECK-SAME: (uint)4);
# CHECK-NOT: tw::signal
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(sums_arrived[
# CHECK-NOT: tw::
# CHECK: = *(uint4*)(sums + {{[(]*}}(int64_t)rank) * (int64_t)536870912)
# CHECK-NOT: tw::
# CHECK: *(uint4*)(out +
show(4096, 32768, 2)

# Few tokens have a block each, in one chunk.
# CHECK-LABEL: TEST: tokens: 16
# CHECK-NEXT: blocks: 4 80 1 1
show(16, 512, 4)

# Many tokens have no experts at a rank, so ranks load the sums that they add.
# CHECK-LABEL: TEST: tokens: 4096
# CHECK-NEXT: blocks: 512 260 20 4
# CHECK: *(uint4*)(sums + {{[(]*}}(int64_t)rank) * (int64_t)536870912)
# CHECK: = *(uint4*)(sums + {{[(]*}}(int64_t)rank_{{[0-9]+}}) * (int64_t)536870912)
show(4096, 16384, 4, choices=4)
