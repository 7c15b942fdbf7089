"""Kernels of operators without communication: a GEMM, and attention."""

import tilelang.language as T

from ..builtins import language as W
from ..ops.attention.flash import FAST_MATH, FlashTiles, flash_attention
from ..ops.attention.problem import AttentionProblem
from ..ops.core.epilogue import multiply
from ..ops.core.tiles import Tiles
from ..runtime import Plan, PlanBuilder, plan


def matmul_program(M: int, N: int, K: int, dtype: str, transposed: bool, tiles: Tiles):
    """Return a program that computes C (M, N) = A (M, K) @ B in stock TileLang, with the tiles and
    the tile order of the operators.

    Args:
        transposed: whether B is (N, K), else (K, N).
    """
    rows, columns = T.ceildiv(M, tiles.M), T.ceildiv(N, tiles.N)

    @T.prim_func
    def matmul(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        C: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(rows * columns, threads=tiles.threads) as block:
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, tiles.N), dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")

            row, column = W.swizzle_2d(block, rows, columns, tiles.group_m)
            m, n = row * tiles.M, column * tiles.N

            multiply(A, m, B, n, A_tile, B_tile, total, transposed, tiles.stages)
            T.copy(total, C_tile)
            T.copy(C_tile, C[m, n])

    return matmul


def local_attention_plan(problem: AttentionProblem, tiles: FlashTiles) -> Plan:
    """Return the kernel of ``sp_attention`` without communication: the keys and values of all ranks
    are present."""
    batch, k_rows, dtype = problem.batch, problem.k_rows, problem.tile_dtype
    parts, ranks, heads = problem.sharding.parts, problem.ranks, problem.heads
    rows = problem.q_rows // parts
    kernel = flash_attention(problem, tiles)

    @plan(pass_configs=FAST_MATH)
    def local_attention(
        p: PlanBuilder,
        Q: T.Tensor((batch, parts, rows, heads, problem.dim), dtype),
        K: W.Symmetric((ranks, batch, k_rows, problem.kv_heads * problem.dim), dtype),
        V: W.Symmetric((ranks, batch, k_rows, problem.kv_heads * problem.v_dim), dtype),
        OUT: T.Tensor((batch, parts, rows, heads, problem.v_dim), dtype),
        LSE: T.Tensor((batch, heads, parts, rows), "float32"),
    ):
        p.launch(kernel, Q, K, V, OUT, LSE)

    return local_attention
