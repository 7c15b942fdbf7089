# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Kernels of the grouped GEMM: blocks count the row tiles of all experts. Then one producer warp
group loads by TMA, the others multiply and store vectors. Rows after the end of an expert are zeros.
No barrier of all warps is in the loop over tiles."""

from tests import verdicts
from tileweave.ops.moe.kernels.grouped_gemm import GROUPED_FP8, GroupedConfig, grouped_gemm
from tileweave.ops.moe.kernels.grouped_wgrad import grouped_wgrad


def show(name, program):
    verdicts.show(program, name, world_size=1)


# CHECK-LABEL: TEST: grouped_gemm (E, N, K)
# CHECK: __launch_bounds__(384, 1)
# CHECK: __shared__ __align__(16) int before[64];
# CHECK: float total[128];
# CHECK: before[((int)threadIdx.x)] =
# CHECK: __syncthreads();
# CHECK: for (int wave = 0; wave < {{.*}}rows
# CHECK-NOT: __syncthreads();
# CHECK: bool is_later = (before[
# CHECK: {{column.*}} = {{.*}}rdiv
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: row{{.*}} < end
# CHECK: tl::tma_load(X_desc, {{.*}}, ({{step.*}} * 64),
# CHECK: row{{.*}} + 96) < end
# CHECK: rows
# CHECK: tl::tma_load(X_desc, {{.*}}, ({{step.*}} * 64),
# CHECK: tl::tma_load(W_desc, {{.*}}, ({{step.*}} * 64), ({{column.*}} * 256), expert{{.*}});
# CHECK: } else {
# CHECK: tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, 256, 16, false, false
# CHECK-NOT: __syncthreads();
# CHECK: < (end{{.*}}
# CHECK: *(uint4*)(Y + {{.*}} = *(uint4*)(Y_tile
# CHECK: < (end{{.*}}
# CHECK: *(uint4*)(Y + {{.*}} = *(uint4*)(Y_tile
# CHECK-NOT: __syncthreads();
show(
    "grouped_gemm (E, N, K)", grouped_gemm(GroupedConfig(32, 4096, 7168, "bfloat16", True))
)  # fmt: skip

# CHECK-LABEL: TEST: grouped_gemm (E, K, N)
# CHECK: tl::tma_load(X_desc, {{.*}}, ({{step.*}} * 64),
# SINCE_0_1_14: CHECK: tl::tma_load(W_desc, {{.*}}(({{column.*}} * 256) + (i * 64)), ({{step.*}} * 64), expert{{.*}});
# CHECK: tl::wgmma_ss<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 64, 256, 16, false, true
# CHECK: *(uint4*)(Y + {{.*}} = *(uint4*)(Y_tile
show("grouped_gemm (E, K, N)", grouped_gemm(GroupedConfig(8, 4096, 7168, "float16", False)))

# Scales are loaded a step before they are used. CUDA cores add the products of each half of the
# columns, times the scales.
# CHECK-LABEL: TEST: grouped_gemm fp8
# CHECK: for (int wave = 0;
# CHECK-NOT: __syncthreads();
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::warpgroup_reg_dealloc<24>();
# CHECK: tl::tma_load(X_desc, {{.*}}, ({{step.*}} * 128),
# CHECK: tl::tma_load(W_desc, {{.*}}, ({{step.*}} * 128), ({{column.*}} * 256), expert{{.*}});
# CHECK: } else {
# CHECK: tl::warpgroup_reg_alloc<240>();
# CHECK: = scale_x[
# CHECK: = scale_w[
# CHECK: for (int step
# CHECK: of_rows{{.*}} = {{.*}}rows_ahead
# CHECK: of_halves[half{{.*}}] = halves_ahead[
# CHECK: = scale_x[
# CHECK: = scale_w[
# CHECK: mbarrier[{{.*}}].wait(
# CHECK: tl::wgmma_ss<tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32, 64, 128, 32
# CHECK: {{\(total|total\[}}
# CHECK: tl::wgmma_ss<tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32, 64, 128, 32
# CHECK: .arrive();
# CHECK: {{\(total|total\[}}
# CHECK: *(uint4*)(Y + {{.*}} = *(uint4*)(Y_tile
# CHECK-NOT: __syncthreads();
show(
    "grouped_gemm fp8",
    grouped_gemm(
        GroupedConfig(
            32, 4096, 7168, "float8_e4m3fn", True, GROUPED_FP8, scales="block", out_dtype="bfloat16"
        )
    ),
)

# The last step of an expert also has rows of the next one, which become zero before they are
# multiplied.
# CHECK-LABEL: TEST: grouped_wgrad
# CHECK: __syncthreads();
# CHECK: for (int wave = 0;
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_load(dY_desc, {{.*}} row{{.*}});
# CHECK: tl::tma_load(X_desc, {{.*}} row{{.*}});
# CHECK: } else {
# CHECK: mbarrier[{{.*}}].wait(
# CHECK: + 64) <= end) {
# CHECK-NOT: sync_thread
# CHECK: tl::wgmma_ss<{{.*}}, 64, 256, 16, true, true
# CHECK: } else {
# CHECK: *(uint4*)(((bfloat16_t*)dY_tile)
# CHECK: *(uint4*)(((bfloat16_t*)X_tile)
# CHECK: tl::fence_proxy_async();
# CHECK: tl::wgmma_ss<{{.*}}, 64, 256, 16, true, true
# CHECK: .arrive();
# CHECK-NOT: __syncthreads();
# CHECK: tl::tma_store(dW_desc
# CHECK-NOT: __syncthreads();
show("grouped_wgrad", grouped_wgrad(GroupedConfig(32, 4096, 7168, "bfloat16", True)))
