# RUN: %python %s | %filecheck %s
"""A proxy fence comes between loads by threads and wgmma, which reads by the async proxy."""

import warnings

import tilelang.language as T

from tests import verdicts
from tileweave import language as W

CONFIGS = {"tileweave.verify": "off", "tl.disable_warp_specialized": True}
warnings.simplefilter("ignore")


@T.prim_func
def products(
    A: T.Tensor((2, 64, 128), "float16"),
    B: T.Tensor((64, 128), "float16"),
    C: T.Tensor((64, 64), "float16"),
    F: W.Symmetric((1,), "uint32"),
):
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((64, 64), "float16")
        B_tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        T.clear(total)
        for row in T.serial(2):
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[row, 0, k * 64], A_tile)
                T.copy(B[0, k * 64], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
        T.copy(total, C)
        W.signal(F[1 - W.rank(), 0])


def show(name, arch):
    verdicts.show(products, name, arch=arch, world_size=2, pass_configs=CONFIGS)


# CHECK-LABEL: TEST: wgmma
# CHECK: tl::cp_async_wait<1>();
# CHECK: tl::fence_proxy_async();
# CHECK: tl::wgmma_ss<
# CHECK: tl::cp_async_wait<0>();
# CHECK: tl::fence_proxy_async();
# CHECK-NEXT: tl::warpgroup_arrive();
# CHECK: tl::wgmma_ss<
show("wgmma", "sm_90a")

# mma reads by the generic proxy.
# CHECK-LABEL: TEST: mma
# CHECK: tl::cp_async_wait<
# CHECK-NOT: fence_proxy_async();
# CHECK: tl::mma_sync<
show("mma", "sm_80")


@T.prim_func
def stored(
    A: T.Tensor((128, 61), "float16"),
    B: T.Tensor((128, 64), "float16"),
    C: T.Tensor((64, 64), "float16"),
    F: W.Symmetric((1,), "uint32"),
):
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((64, 64), "float16")
        B_tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        T.clear(total)
        for k in T.Pipelined(2, num_stages=1):
            T.copy(A[k * 64, 0], A_tile)
            T.copy(B[k * 64, 0], B_tile)
            T.gemm(A_tile, B_tile, total, transpose_A=True)
        T.copy(total, C)
        W.signal(F[1 - W.rank(), 0])


# Producer warps store the tile whose rows the TMA cannot load. Their fence follows the arrival.
# CHECK-LABEL: TEST: stores
# CHECK: mbarrier[0].arrive_and_expect_tx(8192);
# CHECK-NEXT: tl::fence_proxy_async();
# CHECK-NEXT: tl::tma_load(B_desc
# CHECK: mbarrier[0].wait(
# CHECK: tl::fence_proxy_async();
# CHECK-NEXT: tl::warpgroup_arrive();
verdicts.show_unordered(stored, "stores", arch="sm_90a", world_size=2)
