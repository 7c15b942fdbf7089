# RUN: %python %s | %filecheck %s
"""Dispatch: ranks exchange tokens in chunks, and store them in the rows of their experts.

The program contains no synchronization; its kernel does.
"""

import inspect
import re

import tileweave as tw
from tileweave.ops.moe.kernels import dispatch
from tileweave.ops.moe.kernels.row_layout import RowLayout


def show(tokens, choices, ranks, clear_rest=False):
    layout = RowLayout.of(3584, "int32")
    rows = tokens * choices
    blocks = dispatch.DispatchBlocks(tokens, choices, rows, ranks, layout, clear_rest=clear_rest)
    print("TEST:", tokens, "tokens,", choices, "choices,", ranks, "ranks")
    print("blocks:", blocks.of_chunk, blocks.chunks, blocks.height, blocks.clearers)
    print(tw.emit(dispatch.dispatch_program(blocks), world_size=ranks))


# CHECK-LABEL: TEST: synchronization in the source
# CHECK-NEXT: none
print("TEST: synchronization in the source")
source = inspect.getsource(dispatch)
print(re.findall(r"W\.(?:signal|wait|fence|barrier|ll_)\w*|sync_threads", source) or "none")

# Most tokens have experts at both ranks, so a block stores its two tokens on the other rank, and one
# signal follows both. A block that stores rows waits for the chunk of the other rank only.
# CHECK-LABEL: TEST: 4096 tokens, 8 choices, 2 ranks
# CHECK-NEXT: blocks: 258 24 2 0
# CHECK: if ((((int)blockIdx.x) % 258) < 86) {
# CHECK-NEXT: tw::wait_reached<{{.*}}>((&(finished[
# CHECK: *(int4*)(row + {{.*}} = *(int4*)(x +
# CHECK: *(int4*)(rows + {{[(]*}}(int64_t)rank) + (int64_t)1) & (int64_t)1) * (int64_t)268435456)
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(rows_arrived[
# CHECK-SAME: (uint)2);
# CHECK-NOT: tw::signal
# CHECK: *(int4*)(row + {{.*}} = *(int4*)(x +
# CHECK: tw::wait_reached<{{.*}}>((&(rows_arrived[{{.*}}(epoch * (uint)172)
# CHECK: *(int4*)(row + {{.*}} = *(int4*)(rows + {{[(]*}}(int64_t)rank) * (int64_t)268435456)
# CHECK: for (int choice = 0; choice < 8; ++choice) {
# CHECK: *(int4*)(out +
show(4096, 8, 2)

# Many tokens have no experts at a rank, so a rank stores tokens in its own memory, and the others
# load what they need. The last blocks clear rows without tokens.
# CHECK-LABEL: TEST: 16 tokens, 2 choices, 4 ranks
# CHECK-NEXT: blocks: 80 1 1 32
# CHECK: *(int4*)(rows + {{[(]*}}(int64_t)rank) * (int64_t)268435456)
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(rows_arrived[
# CHECK: tw::wait_reached<{{.*}}>((&(rows_arrived[
# CHECK: *(int4*)(row + {{.*}} = *(int4*)(rows + {{[(]*}}(((int64_t)((int)blockIdx.x)){{.*}} + ((int64_t)rank)) + (int64_t)3) & (int64_t)3) * (int64_t)268435456)
# CHECK: if (source[
# CHECK: *(int4*)(out +
show(16, 2, 4, clear_rest=True)
