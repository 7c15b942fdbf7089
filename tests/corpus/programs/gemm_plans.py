"""GEMM beside copy engines: plans of a kernel and copies."""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

from .case import F32, case, given, integers


@case()
class all_gather_gemm:
    """Copy engines gather the rows of all ranks while one kernel multiplies them."""

    m, n, K, b = 16, 16, 32, 16

    def make(ranks, m=m, n=n, K=K, b=b):
        @T.prim_func
        def gemm(
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks * m, K), F32),
            C: T.Tensor((ranks * m, n), F32),
        ):
            with T.Kernel(ranks, threads=32) as block:
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                source = (me + ranks - block) % ranks
                T.clear(total)
                for k in T.Pipelined(K // b, num_stages=2):
                    T.copy(gathered[me, source * m, k * b], A_tile)
                    T.copy(B[0, k * b], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C[source * m, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            A: T.Tensor((m, K), F32),
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks * m, K), F32),
            C: T.Tensor((ranks * m, n), F32),
        ):
            rows = slice(p.rank * m, (p.rank + 1) * m)
            for peer in p.peers():
                p.copy(gathered[peer, rows], A, stream="copies")
            p.copy(gathered[p.rank, rows], A)
            p.launch(gemm, B, gathered, C)

        return plan

    inputs = given(A=(16, 32), B=(16, 32))

    def expected(inputs):
        A = np.concatenate([i["A"] for i in inputs])
        return [{"C": A @ i["B"].T} for i in inputs]


@case(resident=3, unread=("products", "parts"), mutated=3)
class copied_reduce_scatter:
    """Copy engines send partial sums to their owners while one kernel computes and adds them.

    Persistent blocks share the tiles; some tiles are half out of bounds.
    """

    m, n, K, b = 24, 16, 32, 16

    def make(ranks, m=m, n=n, K=K, b=b):
        rows, half = -(-m // b), b // 2

        @T.prim_func
        def gemm(
            A: T.Tensor((ranks, m, K), F32),
            B: T.Tensor((n, K), F32),
            products: W.Symmetric((ranks, m, n), F32),
            parts: W.Symmetric((ranks, m, n), F32),
            C: T.Tensor((m, n), F32),
        ):
            with T.Kernel(2, threads=32) as block:
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((n, b), F32)
                C_tile = T.alloc_shared((half, n), F32)
                total = T.alloc_fragment((b, n), F32)
                me = W.rank()
                for wave in T.serial(T.ceildiv(ranks * rows, 2)):
                    number = wave * 2 + block
                    if number < ranks * rows:
                        owner, row = W.swizzle_ranks(number, rows, me, ranks)
                        T.clear(total)
                        for k in T.Pipelined(K // b, num_stages=2):
                            T.copy(A[owner, row * b, k * b], A_tile)
                            T.copy(B[0, k * b], B_tile)
                            T.gemm(A_tile, B_tile, total, transpose_B=True)
                        if owner != me:
                            for first in T.unroll(0, b, half):
                                T.copy(total[first : first + half, :], C_tile)
                                T.copy(C_tile, products[me, owner, row * b + first, 0])
                        else:
                            for step in T.serial(ranks - 1):
                                for first in T.unroll(0, b, half):
                                    source = (me + 1 + step) % ranks
                                    T.copy(parts[me, source, row * b + first, 0], C_tile)
                                    for i, j in T.Parallel(half, n):
                                        total[first + i, j] += C_tile[i, j]
                            T.copy(total, C[row * b, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            A: T.Tensor((ranks, m, K), F32),
            B: T.Tensor((n, K), F32),
            products: W.Symmetric((ranks, m, n), F32),
            parts: W.Symmetric((ranks, m, n), F32),
            C: T.Tensor((m, n), F32),
        ):
            p.launch(gemm, A, B, products, parts, C)
            for peer in p.peers():
                p.copy(parts[peer, p.rank], products[p.rank, peer], stream="copies")

        return plan

    def inputs(rng, ranks):
        m, n, K, _ = (getattr(copied_reduce_scatter, name) for name in "mnKb")
        return [{"A": integers(rng, ranks, m, K), "B": integers(rng, n, K)} for _ in range(ranks)]

    def expected(inputs):
        total = sum(i["A"] @ i["B"].T for i in inputs)
        return [{"C": total[rank]} for rank in range(len(inputs))]


@case(resident=3, unread=("products", "parts"), mutated=3, recorded=True)
class recorded_reduce_scatter(copied_reduce_scatter):
    """``copied_reduce_scatter`` as CUDA graphs record it: kernels wait instead of streams."""


@case(unread=("gathered",))
class persistent_in_place:
    """Copy engines gather the rows of other ranks; the GEMM reads its own rows from the input.

    A persistent block chooses inside its loop which of the two it loads.
    """

    m, n, K, b = 16, 16, 32, 16

    def make(ranks, m=m, n=n, K=K, b=b):
        @T.prim_func
        def gemm(
            A: T.Tensor((m, K), F32),
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks, m, K), F32),
            C: T.Tensor((ranks, m, n), F32),
        ):
            with T.Kernel(1, threads=32) as _:
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                for wave in T.serial(ranks):
                    source = (me + ranks - wave) % ranks
                    T.clear(total)
                    for k in T.Pipelined(K // b, num_stages=2):
                        if source == me:
                            T.copy(A[0, k * b], A_tile)
                        else:
                            T.copy(gathered[me, source, 0, k * b], A_tile)
                        T.copy(B[0, k * b], B_tile)
                        T.gemm(A_tile, B_tile, total, transpose_B=True)
                    T.copy(total, C[source, 0, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            A: T.Tensor((m, K), F32),
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks, m, K), F32),
            C: T.Tensor((ranks, m, n), F32),
        ):
            for peer in p.peers():
                p.copy(gathered[peer, p.rank], A, stream="copies")
            p.launch(gemm, A, B, gathered, C)

        return plan

    inputs = given(A=(16, 32), B=(16, 32))

    def expected(inputs):
        return [{"C": np.stack([o["A"] @ i["B"].T for o in inputs])} for i in inputs]
