"""GEMM + all-reduce in one kernel: ranks exchange partial tiles, and every rank gets their sum.

This module holds the tile programs, one for small results and two for large ones (by stores and by
copy engines), and the torch operator with its gradient.
"""

from dataclasses import replace
from itertools import islice
from math import ceil
from typing import Any, ClassVar

import tilelang.language as T
import torch

from ...builtins import language as W
from ...passes.ir.sizes import LARGEST
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ..autotune.cost_model import (
    estimate_gemm_rs_persistent_us,
    estimate_one_shot_us,
    estimate_two_shot_us,
)
from ..core import nccl
from ..core.epilogue import Epilogue, add_bias, add_tile, is_fp8, multiply, scale, scale_of
from ..core.library import define_product
from ..core.operator import Choice, Operator
from ..core.problem import Problem
from ..core.tiles import Tiles, persistent_tiles, stored, stores_last_peer
from .identity import identities, identity_of
from .matmul_reduce_scatter import gemm_rs_persistent

NAME = "matmul_all_reduce"
HOPELESS_BYTES = 32 << 20
"""Most bytes that a rank pulls in the one-shot program."""
GROUPS = (4, 1), (8, 1), (8, 2), (8, 4), (16, 1)
"""Pairs (``group_m``, ``num_chunks``) that are tried with copy engines.

Sums are copied when a chunk is complete, the last one after the kernel. Smaller chunks are copied
sooner, but need more copies. Lower groups share less of the operands in L2.
"""


def one_shot_program(
    M: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """Build the kernel: C (M, N) is the sum over ranks of A (M, K) times B; every rank reads the
    tiles of all ranks and adds them.

    Every rank adds the same numbers, rounded to ``out_dtype``, in fp32 and in the same order. That
    is the order of the ranks, but each tile starts with another rank: ranks then do not all read
    from one rank at the same time.

    Args:
        transposed: whether B has the shape (N, K); else (K, N).
        biased: whether the kernel has a parameter bias.
        out_dtype: type of bias and C; None for the type of A.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = T.ceildiv(M, tiles.M), T.ceildiv(N, tiles.N)

    @T.prim_func
    def matmul_all_reduce_one_shot(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((M, N), out_dtype),
    ):
        with T.Kernel(rows * columns, threads=tiles.threads) as block:
            parts = W.alloc_symmetric((M, N), out_dtype)  # own products
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, tiles.N), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")

            me = W.rank()
            row, column = W.swizzle_2d(block, rows, columns, tiles.group_m)
            m, n = row * tiles.M, column * tiles.N

            multiply(A, m, B, n, A_tile, B_tile, total, transposed, tiles.stages)
            if scaled:
                scale(total, scale_a, scale_b)

            T.copy(total, C_tile)
            T.copy(C_tile, parts[me, m, n])
            T.clear(total)
            for step in T.serial(ranks):
                T.copy(parts[(block + step) % ranks, m, n], C_tile)
                add_tile(total, C_tile)
            if biased:
                add_bias(total, bias, n)
            T.copy(total, C_tile)
            T.copy(C_tile, C[m, n])

    return matmul_all_reduce_one_shot


def two_shot_program(
    M: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """Build the kernel: C (M, N) is the sum over ranks of A (M, K) times B; the owner of each tile
    sums it up, and the other ranks read the sum from the owner.

    All ranks own the same number of tiles, in the order of ``W.swizzle_2d``; the last tiles may be
    outside C. An owner keeps its own product of a tile in fp32. It receives those of other ranks
    rounded to ``out_dtype`` and adds them in fp32, starting with the left neighbor's, which arrive
    first.

    Args:
        transposed: whether B has the shape (N, K); else (K, N).
        biased: whether the kernel has a parameter bias.
        out_dtype: type of bias and C; None for the type of A.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = T.ceildiv(M, tiles.M), T.ceildiv(N, tiles.N)
    tiles_per_rank = T.ceildiv(rows * columns, ranks)

    @T.prim_func
    def matmul_all_reduce(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((M, N), out_dtype),
    ):
        with T.Kernel(ranks * tiles_per_rank, threads=tiles.threads) as block:
            # Products of other ranks for the own tiles, and the sums of the own tiles.
            parts = W.alloc_symmetric((ranks, tiles_per_rank * tiles.M, tiles.N), out_dtype)
            sums = W.alloc_symmetric((tiles_per_rank * tiles.M, tiles.N), out_dtype)
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, tiles.N), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")

            me = W.rank()
            owner, tile = W.swizzle_ranks(block, tiles_per_rank, me, ranks)
            row, column = W.swizzle_2d(owner * tiles_per_rank + tile, rows, columns, tiles.group_m)
            m, n = row * tiles.M, column * tiles.N

            multiply(A, m, B, n, A_tile, B_tile, total, transposed, tiles.stages)
            if scaled:
                scale(total, scale_a, scale_b)

            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, parts[owner, me, tile * tiles.M, 0])
            else:
                for step in T.serial(ranks - 1):
                    source = (me + ranks - 1 - step) % ranks  # as they arrive
                    T.copy(parts[me, source, tile * tiles.M, 0], C_tile)
                    add_tile(total, C_tile)
                if biased:
                    add_bias(total, bias, n)
                T.copy(total, C_tile)
                T.copy(C_tile, sums[me, tile * tiles.M, 0])
                T.copy(C_tile, C[m, n])
                for step in T.serial(ranks - 1):
                    source = (me + 1 + step) % ranks
                    row_there, column_there = W.swizzle_2d(
                        source * tiles_per_rank + tile, rows, columns, tiles.group_m
                    )
                    T.copy(sums[source, tile * tiles.M, 0], C_tile)
                    T.copy(C_tile, C[row_there * tiles.M, column_there * tiles.N])

    return matmul_all_reduce


def matmul_all_reduce_plan(
    M: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
) -> Plan:  # fmt: skip
    """Build the plan: ``matmul_reduce_scatter_plan`` and the exchange of the sums.

    Copy engines transfer the sums of other ranks as they become ready; the kernel pulls those of
    the last chunk.
    """
    out_dtype = out_dtype or dtype
    rows_per_rank = rows_of_owner(M, ranks, tiles)
    kernel = gemm_rs_persistent(
        rows_per_rank, N, K, ranks, dtype, transposed, tiles, biased, out_dtype, M
    )
    stores = stores_last_peer(rows_per_rank, N, ranks, tiles)
    chunks = tiles.chunks(rows_per_rank, N)
    copied = ranks > 1 and len(chunks) > 1

    @plan
    def matmul_all_reduce(
        p: PlanBuilder,
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        products: W.Symmetric((ranks, rows_per_rank, N), out_dtype),
        parts: W.Symmetric((ranks, rows_per_rank, N), out_dtype),
        latest: W.Symmetric((rows_per_rank, N), out_dtype) if stores else None,
        sums: W.Symmetric((rows_per_rank, N), out_dtype) if copied else None,
        identity: identity_of(tiles, ranks, dtype),
        C: T.Tensor((M, N), out_dtype),
    ):
        p.launch(kernel, A, B, bias, scale_a, scale_b, products, parts, latest, sums, identity, C)
        # In the order in which the kernel computes and needs them, see W.swizzle_ranks.
        for sent, summed in zip(chunks, [None, *chunks[:-1]], strict=True):
            for peer in islice(p.peers(), ranks - 1 - stores):
                own, theirs = products[p.rank, peer], parts[peer, p.rank]
                p.copy(theirs[sent], own[sent], stream="copies")
            if not summed:
                continue
            rows, columns = summed
            for peer in p.peers():
                first, end = (min(peer * rows_per_rank + m, M) for m in (rows.start, rows.stop))
                if first < end:
                    ready = slice(rows.start, rows.start + end - first)
                    p.copy(C[first:end, columns], sums[peer, ready, columns], stream="copies")

    return matmul_all_reduce


def rows_of_owner(M: int, ranks: int, tiles: Tiles) -> int:
    """Return the rows of the result that each rank sums up in ``matmul_all_reduce_plan``."""
    return ceil(ceil(M / tiles.M) / ranks) * tiles.M


def pulled_bytes(problem: Problem) -> int:
    """Return the bytes that each rank pulls in the one-shot program."""
    return (problem.ranks - 1) * problem.M * problem.N * problem.out_dtype.itemsize


class MatmulAllReduce(Operator, op=NAME):
    """GEMM + all-reduce in one exchange or in two, by stores and loads or by copy engines."""

    programs: ClassVar = {
        "one_shot": one_shot_program,
        "two_shot": two_shot_program,
        "copy_engines": matmul_all_reduce_plan,
    }

    graph_fallback: ClassVar = {"copy_engines": "two_shot"}
    extra_inputs: ClassVar = {"copy_engines": identities}

    @staticmethod
    def unfused(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, group: Group, epilogue: Epilogue
    ) -> None:
        epilogue.without_bias.multiply(a, b, out=c)
        nccl.all_reduce(c, group)
        epilogue.add_to(c)

    @staticmethod
    def estimates(problem: Problem) -> dict[Choice, float]:
        sizes = problem.N, problem.K, problem.ranks
        bytes_of = problem.itemsize, problem.out_dtype.itemsize
        pulled = pulled_bytes(problem)
        return {
            Choice("copy_engines", tiles): estimate_gemm_rs_persistent_us(
                rows_of_owner(problem.M, problem.ranks, tiles), *sizes, tiles, *bytes_of,
                shared=True,
            )
            for shape in persistent_tiles(problem.itemsize)
            for tiles in (replace(shape, group_m=m, num_chunks=n) for m, n in GROUPS)
            if tiles.has_whole_chunks(rows_of_owner(problem.M, problem.ranks, tiles), problem.N)
        } | {
            Choice("two_shot", tiles): estimate_two_shot_us(problem.M, *sizes, tiles, *bytes_of)
            for tiles in stored(problem.itemsize)
        } | {
            Choice("one_shot", tiles): estimate_one_shot_us(
                problem.M, problem.N, problem.K, tiles, pulled, problem.itemsize
            )
            for tiles in stored(problem.itemsize)
        }  # fmt: skip

    @classmethod
    def suits(cls, problem: Problem, program: str) -> bool:
        if program == "one_shot" and pulled_bytes(problem) > HOPELESS_BYTES:
            return False
        if program == "copy_engines":
            tried = cls.tiles_tried(problem)
            rows = max(rows_of_owner(problem.M, problem.ranks, tiles) for tiles in tried)
            # The program indexes all elements that a rank sums up.
            if rows * problem.N > LARGEST:
                return False
        return super().suits(problem, program)


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group: Any = None,
    *,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    strategy: str = "auto",
) -> torch.Tensor:
    """Return the sum over ranks of ``a @ b`` on every rank; tiles are sent once they are computed.

    With the fused program every rank gets the same bits, and equal inputs give equal bits. Products
    are rounded to the type of ``a`` for the transfer and summed in fp32. docs/guides/ops.md
    describes the order, and the result of a row with a product that is not finite. ``nccl`` rounds
    and sums as NCCL does.

    The gradient is that of a tensor-parallel layer: all ranks compute the same from the result, so
    its gradient is assumed to be equal on all ranks, and nothing is communicated.

    Every rank calls it with the same shapes. The first call with new shapes compiles, collectively.

    Args:
        a: (M, K), K this rank's part of the inner dimension.
        b: (K, N); row-major, or the transpose of a row-major (N, K).
        group: None for the group of ``tw.init``, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis.
        bias: (N,), the same on every rank; added to the sum once, in fp32.
        scale_a, scale_b: one float32 on the device each, for fp8 operands, as in
            ``torch._scaled_mm``; different on each rank.
        out_dtype: type of the result: bfloat16 or float16 for fp8 operands (None: bfloat16), else
            the type of the operands.
        out: (M, N), contiguous; receives the result. Not differentiable.
        strategy: ``fused``, ``nccl`` (``torch.mm`` and ``torch.distributed``), or ``auto``: the
            faster one by the measurement of ``tw.tune`` or the cost model, if the call can be
            fused; see ``strategy_of``.

    Returns:
        (M, N), in the type of ``a``.

    Raises:
        TileWeaveError: arguments are invalid or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return _product(a, b, group, out, strategy, Epilogue(bias, scale_a, scale_b, out_dtype))


def _gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
    a, b = ctx.saved_tensors
    grad_a = grad_c @ b.t() if ctx.needs_input_grad[0] else None
    grad_b = a.t() @ grad_c if ctx.needs_input_grad[1] else None
    grad_bias = grad_c.sum(0) if ctx.needs_input_grad[4] else None
    return grad_a, grad_b, None, None, grad_bias, None, None, None


_product = define_product(NAME, _gradients)
