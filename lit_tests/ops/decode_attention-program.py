# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Decode attention: a producer warp loads pages by the TMA, and ranks exchange words with flags.

The program contains no synchronization; its kernel does.
"""

import inspect
import re
from dataclasses import replace

import tileweave as tw
from tileweave.ops.decode.kernels import attend, decode_attention, merge
from tileweave.ops.decode.kernels.config import DecodeConfig

HEADS = DecodeConfig(
    batch=2, heads=16, kv_heads=2, dim=128, v_dim=128, pages=40, page_size=64, table=64, ranks=1,
    dtype="bfloat16", cache_dtype="bfloat16", scale=0.1,
)  # fmt: skip


def show(ranks, **options):
    config = replace(HEADS, ranks=ranks, **options)
    print("TEST: ranks:", ranks)
    print(tw.emit(decode_attention.decode_attention(config), world_size=ranks))


# CHECK-LABEL: TEST: synchronization in the source
# CHECK-NEXT: none
print("TEST: synchronization in the source")
source = "".join(map(inspect.getsource, (attend, decode_attention, merge)))
print(re.findall(r"W\.(?:signal|wait|fence|barrier|ll_)\w*|sync_threads", source) or "none")

# Two stages of keys and values, and two blocks on an SM. The producer reads the block table. Also a
# block without keys waits for its queries. One signal publishes a part to the blocks of this rank.
# The last blocks of an item wait once for its splits, merge them, and store words to all ranks.
# Other blocks poll them.
# CHECK-LABEL: TEST: ranks: 4
# CHECK: __launch_bounds__(256, 2)
# CHECK: if (((int)blockIdx.x) < 256) {
# CHECK: mbarrier[[[Q:[0-9]+]]].arrive_and_expect_tx(
# CHECK: tl::tma_load(q_desc
# CHECK: seq_lens[
# CHECK: for (int [[STEP:step]] = 0; [[STEP]] < steps; ++[[STEP]]) {
# CHECK: tl::tma_load(k_cache_desc, {{.*}}block_table[
# CHECK: tl::tma_load(v_cache_desc, {{.*}}block_table[
# CHECK: } else {
# CHECK: mbarrier[[[Q]]].wait(0);
# CHECK-NEXT: for (int step_1 = 0; step_1 < steps; ++step_1) {
# CHECK: tl::wgmma_ss<
# CHECK: tl::wgmma_rs<
# CHECK: *(float2*)(partials +
# CHECK: *(float2*)(partials +
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::gpu, tw::Sem::release>(
# CHECK-NOT: tw::signal<
# CHECK: if (56 <= (((int)blockIdx.x) & 63)) {
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::gpu, tw::Sem::acquire>(
# CHECK: partials[
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: tw::ll_st<tw::Scope::sys>((&(sums[
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: if (256 <= ((int)blockIdx.x)) {
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: tw::ll_ld<tw::Scope::sys, 2>((&(sums[
# CHECK-NOT: tw::
# CHECK: (out +
show(4)

# One split has no partials: its block stores words to all ranks.
# CHECK-LABEL: TEST: ranks: 2
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: tw::ll_st<tw::Scope::sys>((&(sums[
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: tw::ll_ld<tw::Scope::sys, 2>((&(sums[
# CHECK-NOT: tw::{{signal|wait}}
# CHECK: (out +
show(2, parts=1)

# One split on one rank exchanges nothing.
# CHECK-LABEL: TEST: ranks: 1
# CHECK-NOT: tw::{{signal|wait|ll_}}
# CHECK: tl::tma_load(k_cache_desc
# CHECK-NOT: tw::{{signal|wait|ll_}}
# CHECK: (out +
show(1, parts=1)

# On one rank the last blocks of an item store the result. Only the thread that counts the launch
# waits for its atomic operation. The producers have read the block table before a part is published.
# CHECK-LABEL: TEST: ranks: 1
# CHECK: tl::tma_load(q_desc
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 127) {
# CHECK-NEXT: tw::atom_add<
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_load(k_cache_desc
# CHECK: __syncthreads();
# CHECK-NEXT: } else {
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 128) {
# CHECK-NEXT: tw::signal<
# CHECK-NOT: sync
# CHECK: tw::wait_reached<
# CHECK-NOT: sync
# CHECK: out[
show(1)

# The TMA loads fp8 tiles, which threads convert before they multiply. Scales change the exponents
# and the result.
# CHECK-LABEL: TEST: ranks: 1
# CHECK: tl::tma_load(k_cache_desc, {{.*}}(fp8_e4_t*)
# CHECK: to_log2 = ({{.*}} * k_scale[0]);
# CHECK: v_scale{{.*}} = v_scale{{.*}}[0];
# CHECK: __tl_cvt_fp8x2_to_float2(
# CHECK: tl::fence_proxy_async();
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16
# CHECK: __tl_cvt_fp8x2_to_float2(
# CHECK: tl::fence_proxy_async();
# CHECK: tl::wgmma_rs<tl::DataType::kBFloat16
show(1, parts=1, cache_dtype="float8_e4m3fn")

# Two warp groups multiply columns of a latent cache, with registers of the producer. Blocks that
# merge ranks use the memory of keys.
# CHECK-LABEL: TEST: ranks: 2
# CHECK-NOT: v_cache
# CHECK: __launch_bounds__(384, 1)
# CHECK: void* v = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK: void* tile = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK: tl::warpgroup_reg_dealloc<40>();
# SINCE_0_1_14: CHECK-COUNT-2: tl::tma_load(k_cache_desc
# SINCE_0_1_14: CHECK-NOT: tl::tma_load(
# CHECK: tl::warpgroup_reg_alloc<232>();
# CHECK-COUNT-2: tl::wgmma_ss<{{.*}}, 64, 32, 16,
# CHECK: tl::wgmma_ss<{{.*}}, 64, 256, 16,
# CHECK: tw::signal<
# CHECK: tw::wait_reached<
# CHECK-NOT: tw::wait_reached<
# CHECK: tw::ll_st<tw::Scope::sys>((&(sums[
# CHECK: tw::ll_ld<tw::Scope::sys, 2>((&(sums[
# CHECK-NOT: tw::
show(2, kv_heads=1, dim=576, v_dim=512)
