# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Axes of a symmetric tensor are folded until the TMA supports their number."""

import tilelang.language as T

import tileweave as tw
from tests import verdicts
from tileweave import language as W

RANKS, N = 4, 32
UNORDERED = {"tileweave.verify": "off"}


def show(name, store, own=(RANKS, 2), arch="sm_90a", **options):
    """Print the lowered stores to a symmetric parameter with two axes after ``own``."""

    @T.prim_func
    def program(
        X: T.Tensor((N, N), "float32"),
        S: W.Symmetric((*own, N, N), "float32"),
        order: T.Tensor((8,), "int32"),
    ):
        with T.Kernel(8, threads=128) as bx:
            tile = T.alloc_shared((N, N), "float32")
            T.copy(X, tile)
            store(S, tile, W.rank(), bx, order)

    print("TEST:", name, arch)
    try:
        print(tw.emit(program, arch=arch, pass_configs=UNORDERED))
    except tw.LanguageError as error:
        print(error)


@T.macro
def inside(S, tile, me, bx, order):
    for i in T.serial(2):
        for j in T.serial(3):
            T.copy(tile, S[me, i, j, bx // 2, 0, 0])


# Axes 2 and 3 become one; axis 4 stays.
# CHECK-LABEL: TEST: inside sm_90a
# CHECK: tl::tma_store(S_desc, (&(tile[0])), 0, 0, (((int)blockIdx.x) >> 1), (([[I:i[_0-9]*]] * 3) + j), rank)
show("inside", inside, own=(2, 3, 4))

# Without a TMA nothing is folded.
# CHECK-LABEL: TEST: inside sm_80
# CHECK-NOT: tma_store
# CHECK: *(float4*)(S + {{.*}}rank
# CHECK-NOT: tma_store
show("inside", inside, own=(2, 3, 4), arch="sm_80")


@T.macro
def behind(S, tile, me, bx, order):
    for i in T.serial(2):
        T.copy(tile, S[me, i, bx, 0, 0, 0])


# Blocks 4 to 7 are after the end of the third axis; folded with the second, they would be inside.
# So the third and the fourth axis are folded.
# CHECK-LABEL: TEST: behind sm_90a
# CHECK: tl::tma_store(S_desc, (&(tile[0])), 0, 0, (((int)blockIdx.x) * 3), {{i[_0-9]*}}, rank)
show("behind", behind, own=(2, 4, 3))


@T.macro
def unknown(S, tile, me, bx, order):
    T.copy(tile, S[me, 0, order[bx], order[7 - bx], 0, 0])


# The indices are unknown, so whole rows are folded with the axis before them.
# CHECK-LABEL: TEST: unknown sm_90a
# CHECK: tl::tma_store(S_desc, (&(tile[0])), 0, (order[(7 - ((int)blockIdx.x))] * 32), order[((int)blockIdx.x)], 0, rank)
show("unknown", unknown, own=(2, 3, 4))


@T.macro
def unknown_row(S, tile, me, bx, order):
    T.copy(tile[0:8, 0:N], S[me, 0, order[bx], order[7 - bx], order[0], 0])


# The TMA would have to clip rows after the last one, so the copy does not use it.
# CHECK-LABEL: TEST: unknown_row sm_90a
# CHECK: __global__ void __launch_bounds__
# CHECK-NOT: tma_store
# CHECK: if (order[(7 - ((int)blockIdx.x))] < 4) {
# CHECK: *(float2*)(S + {{.*}}order[
# CHECK-NOT: tma_store
show("unknown_row", unknown_row, own=(2, 3, 4))


@T.macro
def unknown_sum(S, tile, me, bx, order):
    T.atomic_add(S[me, 0, order[bx], order[7 - bx], order[0], 0], tile[0:8, 0:N], use_tma=True)


# CHECK-LABEL: TEST: unknown_sum sm_90a
# CHECK-NEXT: atomic_add with use_tma=True: S has 6 axes, with those for the rank, buffers and versions: shape (4, 2, 3, 4, 32, 32); expected at most 5, or indices that are provably inside of the inner axes
# LINE: CHECK-NEXT: --> {{.*}}fold_axes-tma.py:[[# @LINE - 5]]
show("unknown_sum", unknown_sum, own=(2, 3, 4))


@T.macro
def few(S, tile, me, bx, order):
    T.copy(tile, S[me, 1, bx // 2, 0, 0])


# CHECK-LABEL: TEST: few sm_90a
# CHECK: tl::tma_store(S_desc, (&(tile[0])), 0, 0, (((int)blockIdx.x) >> 1), 1, rank)
show("few", few, own=(2, 4))


@T.prim_func
def pipelined(X: T.Tensor((N, N), "float32"), Y: T.Tensor((N, N), "float32")):
    with T.Kernel(1, threads=128):
        S = W.alloc_symmetric((RANKS, 2, N, N), "float32")
        tile = T.alloc_shared((N, N), "float32")
        part = T.alloc_shared((N, N), "float32")
        total = T.alloc_fragment((N, N), "float32")
        me = W.rank()
        T.copy(X, tile)
        for r in T.serial(RANKS):
            T.copy(tile, S[(me + r) % RANKS, me, 0, 0, 0])
        T.clear(total)
        for r in T.Pipelined(RANKS, num_stages=2):
            T.copy(S[me, r, 0, 0, 0], part)
            for i, j in T.Parallel(N, N):
                total[i, j] += part[i, j]
        T.copy(total, Y)


# The producer waits for the data that it loads.
# CHECK-LABEL: TEST: pipelined
# CHECK: tl::tma_store(S_desc, {{.*}}, 0, 0, 0, ((((int)(epoch & (uint)1)) * 4) + rank), ((rank + r) & 3))
# CHECK: tw::wait_reached
# CHECK: tl::tma_load({{.*}}(&(S[(((((int64_t)rank) * (int64_t)268435456) + (((int64_t)((int)(epoch & (uint)1))) * (int64_t)8192)) + (((int64_t){{r[_0-9]*}}) * (int64_t)2048))]))
verdicts.show(pipelined)
