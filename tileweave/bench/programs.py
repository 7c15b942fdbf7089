"""Kernels of operators without communication: a GEMM, and attention."""

import tilelang.language as T

from ..builtins import language as W
from ..ops.attention.flash import FlashTiles
from ..ops.attention.kernels.flash_attention import FAST_MATH, flash_attention
from ..ops.attention.problem import AttentionProblem
from ..ops.core.gemm_config import GemmConfig
from ..ops.core.tiles import Tiles
from ..ops.gemm.kernels.tile_macros import TileBuffers, multiply, store
from ..runtime import Plan, PlanBuilder, plan


def matmul_program(M: int, N: int, K: int, dtype: str, transposed: bool, tiles: Tiles):
    """Return a program that computes C (M, N) = A (M, K) @ B in stock TileLang, with the tiles and
    the tile order of the operators.

    Args:
        transposed: whether B is (N, K), else (K, N).
    """
    config = GemmConfig(M, N, K, 1, dtype, transposed, tiles)

    @T.prim_func
    def matmul(A: T.Tensor((M, K), dtype), B: config.B, C: T.Tensor((M, N), dtype)):
        with T.Kernel(config.tiles_per_rank, threads=tiles.threads) as block:
            buffers = TileBuffers.alloc(config, tiles.N)
            m, n = config.origin(block, M)
            multiply(config, A, (m,), B, n, buffers)
            store(buffers, (C, (m,), n))

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
