"""GEMM with communication in the same kernel."""

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import F32, case, integers


def gemm_inputs(m, n, k):
    def inputs(rng, ranks):
        return [{"A": integers(rng, m * ranks, k), "B": integers(rng, n, k)} for _ in range(ranks)]

    return inputs


def total_of(inputs):
    return sum(i["A"] @ i["B"].T for i in inputs)


@case()
class gemm_reduce_scatter:
    """Partial tiles go to staging memory of their owners; each owner adds its tiles up."""

    m, N, K, b = 16, 32, 16, 16

    def make(ranks, m=m, N=N, K=K, b=b):
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32), B: T.Tensor((N, K), F32), C: T.Tensor((m, N), F32)
        ):
            with T.Kernel(tiles * ranks, threads=32) as block:
                parts = W.alloc_symmetric((m * ranks, N), F32)
                A_tile = T.alloc_shared((b, K), F32)
                B_tile = T.alloc_shared((b, K), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
                row, column = tile // (N // b), tile % (N // b)
                T.clear(total)
                for k in T.Pipelined(1, num_stages=1):
                    T.copy(A[owner * m + row * b, k * K], A_tile)
                    T.copy(B[column * b, k * K], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                if owner != me:
                    T.copy(total, C_tile)
                    T.copy(C_tile, parts[owner, me * m + row * b, column * b])
                else:
                    for step in T.serial(ranks - 1):
                        source = (me + 1 + step) % ranks
                        T.copy(parts[me, source * m + row * b, column * b], C_tile)
                        for i, j in T.Parallel(b, b):
                            total[i, j] += C_tile[i, j]
                    T.copy(total, C[row * b, column * b])

        return program

    inputs = gemm_inputs(16, 32, 16)

    def expected(inputs):
        return [{"C": part} for part in np.split(total_of(inputs), len(inputs))]


@case()
class gemm_reduce_add:
    """GEMM + reduce-scatter by additions into the owner's memory, which the owner clears first."""

    m, N, K, b = 16, 32, 16, 16

    def make(ranks, m=m, N=N, K=K, b=b):
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32), B: T.Tensor((N, K), F32), C: W.Symmetric((m, N), F32)
        ):
            with T.Kernel(tiles * ranks, threads=32) as block:
                A_tile = T.alloc_shared((b, K), F32)
                B_tile = T.alloc_shared((b, K), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
                row, column = tile // (N // b), tile % (N // b)
                if block < tiles:
                    T.clear(C_tile)
                    T.copy(C_tile, C[me, block // (N // b) * b, block % (N // b) * b])
                T.clear(total)
                for k in T.Pipelined(1, num_stages=1):
                    T.copy(A[owner * m + row * b, k * K], A_tile)
                    T.copy(B[column * b, k * K], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C_tile)
                T.atomic_add(C[owner, row * b, column * b], C_tile, use_tma=True)

        return program

    inputs = gemm_inputs(16, 32, 16)

    expected = gemm_reduce_scatter.expected


@case()
class gemm_all_reduce:
    """Two phases in one kernel: partial tiles to their owners, then sums to all ranks."""

    m, N, K, b = 16, 32, 16, 16

    def make(ranks, m=m, N=N, K=K, b=b):
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32),
            B: T.Tensor((N, K), F32),
            C: W.Symmetric((m * ranks, N), F32),
        ):
            with T.Kernel(tiles * ranks, threads=32) as block:
                parts = W.alloc_symmetric((m * ranks, N), F32)
                A_tile = T.alloc_shared((b, K), F32)
                B_tile = T.alloc_shared((b, K), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
                row, column = tile // (N // b), tile % (N // b)
                T.clear(total)
                for k in T.Pipelined(1, num_stages=1):
                    T.copy(A[owner * m + row * b, k * K], A_tile)
                    T.copy(B[column * b, k * K], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                if owner != me:
                    T.copy(total, C_tile)
                    T.copy(C_tile, parts[owner, me * m + row * b, column * b])
                else:
                    for step in T.serial(ranks - 1):
                        source = (me + 1 + step) % ranks
                        T.copy(parts[me, source * m + row * b, column * b], C_tile)
                        for i, j in T.Parallel(b, b):
                            total[i, j] += C_tile[i, j]
                    T.copy(total, C_tile)
                    for step in T.serial(ranks):
                        T.copy(C_tile, C[(me + 1 + step) % ranks, me * m + row * b, column * b])

        return program

    inputs = gemm_inputs(16, 32, 16)

    def expected(inputs):
        return [{"C": total_of(inputs)} for _ in inputs]


@case(resident=4)
class persistent_reduce_scatter:
    """Four persistent blocks share all tiles of a GEMM + reduce-scatter."""

    m, N, K, b = 16, 48, 32, 16

    def make(ranks, m=m, N=N, K=K, b=b):
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32), B: T.Tensor((N, K), F32), C: T.Tensor((m, N), F32)
        ):
            with T.Kernel(4, threads=32) as block:
                parts = W.alloc_symmetric((m * ranks, N), F32)
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((b, b), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                for wave in T.serial(T.ceildiv(tiles * ranks, 4)):
                    number = wave * 4 + block
                    if number < tiles * ranks:
                        owner, tile = W.swizzle_ranks(number, tiles, me, ranks)
                        row, column = tile // (N // b), tile % (N // b)
                        T.clear(total)
                        for k in T.Pipelined(K // b, num_stages=2):
                            T.copy(A[owner * m + row * b, k * b], A_tile)
                            T.copy(B[column * b, k * b], B_tile)
                            T.gemm(A_tile, B_tile, total, transpose_B=True)
                        if owner != me:
                            T.copy(total, C_tile)
                            T.copy(C_tile, parts[owner, me * m + row * b, column * b])
                        else:
                            for step in T.serial(ranks - 1):
                                source = (me + 1 + step) % ranks
                                T.copy(parts[me, source * m + row * b, column * b], C_tile)
                                for i, j in T.Parallel(b, b):
                                    total[i, j] += C_tile[i, j]
                            T.copy(total, C[row * b, column * b])

        return program

    inputs = gemm_inputs(16, 48, 32)

    expected = gemm_reduce_scatter.expected


@case()
class ring_gemm_reduce_scatter:
    """Each rank adds its product to the sum from the left and sends the result to the right."""

    m, n, k, b = 16, 32, 16, 16

    def make(ranks, m=m, n=n, k=k, b=b):
        @T.prim_func
        def program(
            A: T.Tensor((ranks * m, k), F32), B: T.Tensor((n, k), F32), C: T.Tensor((m, n), F32)
        ):
            with T.Kernel(n // b, threads=32) as block:
                S = W.alloc_symmetric((m, n), F32)
                A_tile = T.alloc_shared((m, k), F32)
                B_tile = T.alloc_shared((b, k), F32)
                tile = T.alloc_shared((m, b), F32)
                total = T.alloc_fragment((m, b), F32)
                me = W.rank()
                T.copy(B[block * b, 0], B_tile)
                for step in T.serial(ranks):
                    owner = (me + 2 * ranks - 1 - step) % ranks
                    T.copy(A[owner * m, 0], A_tile)
                    T.clear(total)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                    if step > 0:
                        T.copy(S[me, 0, block * b], tile)
                        for i, j in T.Parallel(m, b):
                            total[i, j] += tile[i, j]
                    if step < ranks - 1:
                        T.copy(total, tile)
                        T.copy(tile, S[(me + 1) % ranks, 0, block * b])
                T.copy(total, C[0, block * b])

        return program

    inputs = gemm_inputs(16, 32, 16)

    expected = gemm_reduce_scatter.expected


@case()
class gather_k:
    """Other ranks own columns of A, so each iteration of the pipelined loop waits."""

    M, N, k, b = 16, 16, 32, 16

    def make(ranks, M=M, N=N, k=k, b=b):
        @T.prim_func
        def program(
            A: T.Tensor((M, k), F32), B: T.Tensor((N, k * ranks), F32), C: T.Tensor((M, N), F32)
        ):
            with T.Kernel(1, threads=32) as _:
                parts = W.alloc_symmetric((M, k), F32)
                own_tile = T.alloc_shared((M, b), F32)
                A_tile = T.alloc_shared((M, b), F32)
                B_tile = T.alloc_shared((N, b), F32)
                total = T.alloc_fragment((M, N), F32)
                me = W.rank()
                for step in T.serial(k // b):
                    T.copy(A[0, step * b], own_tile)
                    T.copy(own_tile, parts[me, 0, step * b])
                T.clear(total)
                for step in T.Pipelined(k // b * ranks, num_stages=2):
                    source = (me + step // (k // b)) % ranks
                    T.copy(parts[source, 0, step % (k // b) * b], A_tile)
                    T.copy(B[0, source * k + step % (k // b) * b], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C)

        return program

    def inputs(rng, ranks):
        M, N, k = gather_k.M, gather_k.N, gather_k.k
        return [{"A": integers(rng, M, k), "B": integers(rng, N, k * ranks)} for _ in range(ranks)]

    def expected(inputs):
        A = np.concatenate([i["A"] for i in inputs], axis=1)
        return [{"C": A @ i["B"].T} for i in inputs]
