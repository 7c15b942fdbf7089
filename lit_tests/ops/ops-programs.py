# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""The tile programs of operators contain no synchronization; their kernels do."""

import inspect
import re
from dataclasses import replace

import torch

import tileweave as tw
from tileweave.ops.attention.flash import tiles_for as flash_tiles_for
from tileweave.ops.attention.kernels import flash_attention as flash_kernel
from tileweave.ops.attention.kernels.flash_attention import flash_attention
from tileweave.ops.attention.problem import AttentionProblem
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.collectives.all_gather import all_gather_plan, all_gather_program, collect_shares
from tileweave.ops.collectives.all_reduce import add_and_share, all_reduce_plan
from tileweave.ops.collectives.all_reduce import one_shot_program as all_reduce_one_shot
from tileweave.ops.collectives.all_reduce import two_shot_program as all_reduce_two_phase
from tileweave.ops.collectives.all_to_all import all_to_all_program
from tileweave.ops.collectives.reduce_scatter import (
    add_partials,
    reduce_scatter_plan,
    reduce_scatter_program,
)
from tileweave.ops.collectives.vectors import TiledView
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.tiles import FEW_ROWS, FP8, LARGE, PERSISTENT_TILES, SMALL
from tileweave.ops.gemm.all_gather_matmul import all_gather_matmul_plan
from tileweave.ops.gemm.kernels import gemm_persistent, partial_sums, pull_tail, push, tile_macros
from tileweave.ops.gemm.kernels.all_gather_gemm import (
    ag_gemm_comm_blocks,
    ag_gemm_copy_engine,
    ag_gemm_push,
)
from tileweave.ops.gemm.kernels.gemm_all_reduce import (
    gemm_ar_one_shot,
    gemm_ar_two_shot,
)
from tileweave.ops.gemm.kernels.gemm_persistent import gemm_ar_persistent, gemm_rs_persistent
from tileweave.ops.gemm.kernels.gemm_reduce_scatter import gemm_rs_one_shot, gemm_rs_store
from tileweave.ops.gemm.matmul_all_reduce import matmul_all_reduce_plan
from tileweave.ops.gemm.matmul_reduce_scatter import matmul_reduce_scatter_plan
from tileweave.runtime.plans.steps import Launch


def show(program):
    print("TEST:", program.attrs["global_symbol"])
    print(tw.emit(program, world_size=4))


WORDS = re.compile(r"signal|wait|fence|barrier|epoch|counter|flag")
print("TEST: synchronization in the source")
for make in (
    gemm_rs_store, gemm_rs_persistent, matmul_reduce_scatter_plan, gemm_rs_one_shot,
    ag_gemm_copy_engine, all_gather_matmul_plan, ag_gemm_comm_blocks, ag_gemm_push,
    gemm_ar_one_shot, gemm_ar_two_shot, gemm_ar_persistent,
    matmul_all_reduce_plan, tile_macros, partial_sums, gemm_persistent, pull_tail, push,
    all_gather_program, collect_shares, all_gather_plan, reduce_scatter_program, add_partials,
    reduce_scatter_plan, all_reduce_one_shot, all_reduce_two_phase, add_and_share, all_reduce_plan,
    all_to_all_program, flash_attention, flash_kernel,
    sp_attention_plan,
):  # fmt: skip
    if found := WORDS.findall(inspect.getsource(make)):
        print(make.__name__, found)
print("none of the others")

# CHECK-LABEL: TEST: synchronization in the source
# CHECK-NEXT: none of the others

# TMA loads the operands of one wgmma loop. Tiles are stored by TMA and complete before their signals.
# Own tiles wait for the parts of other ranks before they read them.
# CHECK-LABEL: TEST: gemm_rs_store
# CHECK: __launch_bounds__(384, 1)
# CHECK: tl::tma_load(A_desc
# CHECK: tl::tma_load(B_desc
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32
# CHECK: tl::tma_store(partials_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(partials_arrived[
# CHECK: } else {
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(partials_arrived[
# CHECK: *(uint4*)(partials
# CHECK: tl::tma_store(C_desc
show(gemm_rs_store(GemmConfig(4000, 8200, 1800, 4, "bfloat16", True, LARGE)))


def launched(plan):
    """Return the kernel of a plan, with the synchronization of its copies."""
    shapes = {p.name: tuple(map(int, p.shape)) for p in plan.parameters}
    steps = plan.trace(0, 4, shapes, {})
    return next(s.program for s in steps if isinstance(s, Launch) and s.number > 0)


# With copy engines blocks are persistent. For own tiles the producer waits for copies, and loads parts
# and the identity after the product. Both halves of other tiles are complete before the signal to the
# stream. The consumer warp groups, 64 rows of all columns each, do not wait.
# CHECK-LABEL: TEST: gemm_rs_persistent
# CHECK: __launch_bounds__(384, 1)
# CHECK: for (int wave = 0; wave < 8;
# CHECK: condval = 124;
# CHECK: condval = 112;
# CHECK: if (112 <= step) {
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(partials_arrived[
# CHECK: tl::tma_load(A_desc
# CHECK: if (112 <= step) {
# CHECK-NEXT: tl::tma_load(partials_desc
# CHECK: tl::tma_load(B_desc
# CHECK: if (112 <= step) {
# CHECK-NEXT: tl::tma_load(identity_desc
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, 256,
# CHECK-NOT: tw::wait_reached
# CHECK: tl::tma_store(products_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(products_made[
# CHECK: } else {
# CHECK-NOT: partials
# CHECK: tl::tma_store(C_desc
persistent = PERSISTENT_TILES[0]
show(
    launched(
        matmul_reduce_scatter_plan(GemmConfig(4096, 8192, 7168, 4, "bfloat16", True, persistent))
    )
)

# With few rows, products for the peer that is served last are stored there and complete before the
# signal. The peer loads them after the parts that copies transfer.
# CHECK-LABEL: TEST: gemm_rs_persistent
# CHECK: for (int wave = 0; wave < 2;
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(last_peer_buf_arrived[
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(partials_arrived[
# CHECK: tl::tma_load(last_peer_buf_desc
# CHECK: tl::tma_load(partials_desc
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32
# CHECK: tl::tma_store(last_peer_buf_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(last_peer_buf_arrived[
# CHECK: tl::tma_store(products_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(products_made[
# CHECK: tl::tma_store(C_desc
show(
    launched(
        matmul_reduce_scatter_plan(GemmConfig(1024, 8192, 7168, 4, "bfloat16", True, persistent))
    )
)

# The first peer's rows arrive in chunks: in the loop, the producer waits for each one when needed.
# CHECK-LABEL: TEST: ag_gemm_copy_engine
# CHECK: for (int step = 0; step < 128;
# CHECK: if (waited !=
# CHECK-SAME: step) >> {{.*}}4
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(gathered_arrived[
# CHECK: tl::tma_load(gathered_desc
four_chunks = replace(PERSISTENT_TILES[1], num_chunks=4)
show(
    launched(all_gather_matmul_plan(GemmConfig(1024, 7168, 8192, 4, "bfloat16", True, four_chunks)))
)

# A kernel without bias has no such parameter; otherwise bias is loaded after the last product.
# CHECK-LABEL: TEST: ag_gemm_copy_engine
# CHECK-NOT: bias
# CHECK: tl::tma_load(gathered_desc
# CHECK: tl::tma_load(B_desc
# CHECK: tl::wgmma_ss<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32
# CHECK-NOT: bias
# CHECK: tl::tma_store(C_desc
show(ag_gemm_copy_engine(GemmConfig(4000, 2056, 8200, 4, "float16", False, LARGE)))

# CHECK-LABEL: TEST: ag_gemm_copy_engine
# CHECK: tl::wgmma_ss<
# CHECK: *(uint1*)(bias + {{.*}} * 256) + (i_{{.*}} * 8)) +
# CHECK: tl::tma_store(C_desc
show(ag_gemm_copy_engine(GemmConfig(4000, 2056, 8200, 4, "float16", False, LARGE, biased=True)))

# The first blocks store own rows at the other ranks, 16 bytes a thread, and signal each strip. The
# other blocks multiply: in the loop, the producer waits for each piece when it is needed.
# CHECK-LABEL: TEST: ag_gemm_comm_blocks
# CHECK: if (((int)blockIdx.x) < 20) {
# CHECK: *(uint4*)(strip_regs + {{.*}} = condval;
# CHECK: *(uint4*)(gathered + {{.*}} = *(uint4*)(strip_regs
# CHECK: __syncthreads();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(gathered_arrived[
# CHECK: if (20 <= ((int)blockIdx.x)) {
# CHECK: if (waited !=
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(gathered_arrived[
# CHECK: tw::fence_proxy_async();
# CHECK: tl::tma_load(gathered_desc
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32
# CHECK: tl::tma_store(C_desc
show(ag_gemm_comm_blocks(GemmConfig(1024, 3584, 4096, 4, "bfloat16", True, PERSISTENT_TILES[0])))

# With few rows blocks store the own rows at all ranks, 16 bytes a thread, signal each rank once, and
# wait once for all rows.
# CHECK-LABEL: TEST: ag_gemm_push
# CHECK: *(uint4*)(gathered +
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(gathered_arrived[
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(gathered_arrived[
# CHECK: tw::fence_proxy_async();
# CHECK-NOT: tw::wait_reached
# CHECK: tl::tma_load(gathered_desc
# CHECK: tl::tma_load(B_desc
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32
# CHECK: tl::tma_store(C_desc
show(ag_gemm_push(GemmConfig(64, 7168, 8192, 4, "bfloat16", True, FEW_ROWS[0])))

# Products stay local, for all owners in one tile; each owner pulls its rows.
# CHECK-LABEL: TEST: gemm_rs_one_shot
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32
# CHECK: tl::tma_store(products_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(products_arrived[
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(products_arrived[
# CHECK: tl::tma_store(C_desc
show(gemm_rs_one_shot(GemmConfig(64, 8192, 7168, 4, "bfloat16", True, FEW_ROWS[0])))

# The owner adds bias after the parts of other ranks.
# CHECK-LABEL: TEST: gemm_rs_store
# CHECK: tl::tma_store(partials_desc
# CHECK-NOT: bias
# CHECK: *(uint4*)(partials
# CHECK: *(uint1*)(bias +
# CHECK: tl::tma_store(C_desc
show(gemm_rs_store(GemmConfig(4000, 8200, 1800, 4, "bfloat16", True, LARGE, biased=True)))

# The sums of a tile of fp8 are added in fp32 and scaled before they are rounded.
# CHECK-LABEL: TEST: gemm_rs_store
# CHECK: tl::tma_load(A_desc
# CHECK: tl::wgmma_ss<tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32
# CHECK-SAME: (product +
# CHECK: mbarrier[{{.*}}].arrive();
# CHECK: {{\*\(float4\*\)\(product \+|product\[}}
# CHECK: (scale_a[0] * scale_b[0])
# CHECK: tl::tma_store(partials_desc
# CHECK: tl::tma_store(C_desc
show(gemm_rs_store(GemmConfig(4000, 8208, 1808, 4, "float8_e4m3fn", True, FP8, result="bfloat16")))

# Tiles stay local, are complete before the signals to all ranks, and are pulled after a wait.
# CHECK-LABEL: TEST: gemm_ar_one_shot
# CHECK: __launch_bounds__(384, 1)
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32
# CHECK: tl::tma_store(products_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(products_arrived[
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(products_arrived[
# CHECK: *(uint4*)(products
# CHECK: tl::tma_store(C_desc
show(gemm_ar_one_shot(GemmConfig(72, 8200, 1800, 4, "bfloat16", True, SMALL)))

# Tiles of other owners are sent immediately. Own tiles are summed up and signalled to all ranks before
# C is written. Tiles of other owners are then pulled.
# CHECK-LABEL: TEST: gemm_ar_two_shot
# CHECK: __launch_bounds__(384, 1)
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32
# CHECK: tl::tma_store(partials_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(partials_arrived[
# CHECK: } else {
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(partials_arrived[
# CHECK: *(uint4*)(partials
# CHECK: tl::tma_store(sums_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(sums_arrived[
# CHECK: tl::tma_store(C_desc
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(sums_arrived[
# CHECK: *(uint4*)(sums
# CHECK: tl::tma_store(C_desc
show(gemm_ar_two_shot(GemmConfig(1000, 8200, 1800, 4, "bfloat16", True, LARGE)))

# Copy engines do both exchanges. The kernel signals products to the stream, and sums after both of
# their stores. Blocks without further tiles pull the last sums, 16 bytes at a time.
# CHECK-LABEL: TEST: gemm_ar_persistent
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(partials_arrived[
# CHECK: tl::tma_load(partials_desc
# CHECK: tl::wgmma_ss<
# CHECK: tl::tma_store(products_desc
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(products_made[
# CHECK: tl::tma_store(C_desc
# CHECK: tl::tma_store(pulled_sums_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(pulled_sums_arrived[
# CHECK: tl::tma_store(C_desc
# CHECK: tl::tma_store(sums_desc
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(sums_
# CHECK-NOT: tw::wait_reached
# CHECK: for (int wave
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(pulled_sums_arrived[
# CHECK: *(uint4*)(strip_regs {{.*}} = *(uint4*)(pulled_sums
# CHECK: *(uint4*)(C {{.*}} = *(uint4*)(strip_regs
# CHECK-NOT: tma_
two_chunks = replace(PERSISTENT_TILES[0], num_chunks=2)
show(
    launched(matmul_all_reduce_plan(GemmConfig(4096, 8192, 7168, 4, "bfloat16", True, two_chunks)))
)

# Threads move 16 bytes at a time through registers.
# CHECK-LABEL: TEST: all_gather
# CHECK-NOT: extern __shared__
# CHECK-NOT: tma_store
# CHECK: *(int4*)(arrived{{.*}} = *(int4*)(tile_regs
# CHECK: tw::signal<tw::Type::u32, tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(arrived_arrived[
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(arrived_arrived[
# CHECK: *(int4*)(tile_regs{{.*}} = *(int4*)(arrived
# CHECK: *(int4*)(out{{.*}} = *(int4*)(tile_regs
show(all_gather_program(TiledView.of(96 * 256, "int32"), 4))

# The warp that loads a tile of keys waits for its owner's copies, in each iteration, but not for local
# keys. Three warp groups attend.
# CHECK-LABEL: TEST: flash_attention
# CHECK: __launch_bounds__(512, 1)
# CHECK: tl::warpgroup_reg_dealloc<24>();
# CHECK-NEXT: if ((((int)threadIdx.x) & 127) < 32) {
# CHECK: for (int step = 0;
# CHECK: != rank) {
# CHECK-NEXT: if (waited != owner) {
# CHECK-NEXT: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(K_arrived[
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK-NEXT: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&(V_arrived[
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK: tl::tma_load(K_desc
# CHECK: tl::tma_load(V_desc
# CHECK-NOT: tw::wait_reached
# CHECK: } else {
# CHECK: tl::warpgroup_reg_alloc<160>();
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16
# CHECK: tl::wgmma_rs<tl::DataType::kBFloat16
# CHECK: tl::tma_store(Out_desc
attention = AttentionProblem(
    1, 4096, 4096, 32, 8, 128, 128, 4, torch.bfloat16, True, "zigzag", 128**-0.5
)
show(launched(sp_attention_plan(attention, flash_tiles_for(attention))))
