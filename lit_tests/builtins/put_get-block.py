# RUN: %python %s | %filecheck %s
"""Block copies use all threads of the program; the peer replaces the rank index."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def put(A: T.Tensor((64, 4096), "bfloat16"), S: W.Symmetric((64, 4096), "bfloat16"), n: T.int32):
    with T.Kernel(4, threads=128) as bx:
        W.put_block(A[bx, 1], S[0, bx, 1], n, peer=(W.rank() + 1) % W.world_size())


# CHECK-LABEL: TEST: put
# CHECK: put_kernel(const bfloat16_t* __restrict__ [[A:[A-Za-z]+]], bfloat16_t* __restrict__ [[S:[A-Z]+]]
# CHECK: tw::put_block((&([[A]][{{.*}} + 1)])),
# CHECK-SAME: (&([[S]][{{.*}}rank) + (int64_t)1) & (int64_t)3) * (int64_t)536870912)
# CHECK-SAME: , n, ((int)threadIdx.x), 128);
show(put)


@T.prim_func
def get(S: W.Symmetric((64, 4096), "uint8"), B: T.Tensor((64, 4096), "uint8"), n: T.int64):
    with T.Kernel(4, threads=(32, 4)) as bx:
        W.get_block(S[W.rank(), bx, 0], B[bx, 0], n, peer=3)


# In a uint8 heap of 1 GiB for each rank, the third peer's copy is after 2^31 elements.
# CHECK-LABEL: TEST: get
# CHECK: tw::get_block((&(S[{{.*}}(int64_t)3221225472{{.*}}])), (&(B[{{.*}}])), n,
# CHECK-SAME: ((((int)threadIdx.y) * 32) + ((int)threadIdx.x)), 128);
show(get)


@T.prim_func
def as_it_stands(S: W.Symmetric((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        W.get_block(S[2, 5], B, 7)


# Without a peer the references do not change; a whole tensor means its first element.
# CHECK-LABEL: TEST: as_it_stands
# CHECK: tw::get_block((&(S[536870917])), (&(B[0])), 7, ((int)threadIdx.x), 32);
show(as_it_stands)


@T.prim_func
def specialized(
    A: T.Tensor((512, 512), "bfloat16"),
    S: W.Symmetric((512, 512), "bfloat16"),
    C: T.Tensor((512, 512), "bfloat16"),
):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        As = T.alloc_shared((128, 64), "bfloat16")
        Bs = T.alloc_shared((64, 128), "bfloat16")
        Cl = T.alloc_fragment((128, 128), "float32")
        T.clear(Cl)
        for k in T.Pipelined(8, num_stages=3):
            W.put_block(A[by * 128, k * 64], S[0, by * 128, k * 64], 64, peer=1)
            T.copy(A[by * 128, k * 64], As)
            T.copy(A[k * 64, bx * 128], Bs)
            T.gemm(As, Bs, Cl)
        T.copy(Cl, C[by * 128, bx * 128])


# The 256 consumers, from thread 128 on, copy; the producer does not.
# CHECK-LABEL: TEST: specialized
# CHECK: __launch_bounds__(384, 1)
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK-NOT: put_block
# CHECK: } else {
# CHECK: tw::put_block({{.*}}, 64, (((int)threadIdx.x) - 128), 256);
show(specialized)
