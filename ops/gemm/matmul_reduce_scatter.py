"""GEMM + reduce-scatter: one kernel computes products, and their owners receive and sum them.

This module holds the tile programs, by copy engines, by stores and in one exchange, and the torch
operator with its gradient.
"""

from itertools import islice
from math import ceil
from typing import Any, ClassVar

import tilelang.language as T
import torch

from ...builtins import language as W
from ...passes import split_options
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ..autotune.cost_model import (
    estimate_gemm_rs_persistent_us,
    estimate_gemm_rs_store_us,
    estimate_one_shot_us,
)
from ..core import nccl
from ..core.epilogue import (
    NOTHING,
    Epilogue,
    accumulate,
    add_bias,
    add_tile,
    is_fp8,
    multiply,
    scale,
    scale_of,
)
from ..core.library import define_product
from ..core.operator import Choice, Operator
from ..core.problem import Problem
from ..core.tiles import PersistentSchedule, Tiles, persistent_tiles, stored, stores_last_peer
from .identity import identities, identity_of, steps_of
from .pull_tail import PullTail, pull

NAME = "matmul_reduce_scatter"
FEW = 2048
"""Most rows of the one-shot program: the tiles of a column must run at the same time."""


def matmul_reduce_scatter_program(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """Build the kernel: C (rows_per_rank, N) is this rank's rows of the sum over ranks of
    A (ranks * rows_per_rank, K) times B.

    A rank keeps the tiles of its own rows in fp32. It receives the tiles of other ranks rounded to
    ``out_dtype`` and adds them in fp32, starting with the left neighbor's, which arrive first.

    Args:
        transposed: whether B has the shape (N, K); else (K, N).
        biased: whether the kernel has a parameter bias.
        out_dtype: type of bias and C; None for the type of A.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = T.ceildiv(rows_per_rank, tiles.M), T.ceildiv(N, tiles.N)

    @T.prim_func
    def matmul_reduce_scatter(
        A: T.Tensor((ranks * rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((rows_per_rank, N), out_dtype),
    ):
        with T.Kernel(ranks * rows * columns, threads=tiles.threads) as block:
            # Partial sums of other ranks for the own rows.
            parts = W.alloc_symmetric((ranks, rows_per_rank, N), out_dtype)
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, tiles.N), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")

            me = W.rank()
            owner, tile = W.swizzle_ranks(block, rows * columns, me, ranks)
            row, column = W.swizzle_2d(tile, rows, columns, tiles.group_m)
            m, n = row * tiles.M, column * tiles.N

            multiply(
                A, owner * rows_per_rank + m, B, n, A_tile, B_tile, total, transposed, tiles.stages
            )
            if scaled:
                scale(total, scale_a, scale_b)

            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, parts[owner, me, m, n])
            else:
                for step in T.serial(ranks - 1):
                    source = (me + ranks - 1 - step) % ranks  # as they arrive
                    T.copy(parts[me, source, m, n], C_tile)
                    add_tile(total, C_tile)
                if biased:
                    add_bias(total, bias, n)
                T.copy(total, C_tile)
                T.copy(C_tile, C[m, n])

    return matmul_reduce_scatter


def scattered_one_shot(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """Build the kernel for few rows: each owner reads its rows from the tiles of all ranks.

    A tile may have rows of several owners. All products are rounded to ``out_dtype``, the own one
    too, which is added last. The arguments are those of ``matmul_reduce_scatter_program``.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = ceil(ranks * rows_per_rank / tiles.M), ceil(N / tiles.N)
    height = ceil(rows_per_rank / rows / 8) * 8  # own rows that a block sums up

    @T.prim_func
    def matmul_reduce_scatter_one_shot(
        A: T.Tensor((ranks * rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((rows_per_rank, N), out_dtype),
    ):
        with T.Kernel(rows, columns, threads=tiles.threads) as (row, column):
            parts = W.alloc_symmetric((ranks * rows_per_rank, N), out_dtype)  # own products
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, tiles.N), out_dtype)
            own_tile = T.alloc_shared((height, tiles.N), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")
            own = T.alloc_fragment((height, tiles.N), "float32")

            me = W.rank()
            m, n = row * tiles.M, column * tiles.N
            multiply(A, m, B, n, A_tile, B_tile, total, transposed, tiles.stages)
            if scaled:
                scale(total, scale_a, scale_b)

            T.copy(total, C_tile)
            T.copy(C_tile, parts[me, m, n])
            first = row * height
            T.clear(own)
            for step in T.serial(ranks):
                source = (me + 1 + step) % ranks
                T.copy(parts[source, me * rows_per_rank + first, n], own_tile)
                add_tile(own, own_tile)
            if biased:
                add_bias(own, bias, n)
            T.copy(own, own_tile)
            T.copy(own_tile, C[first, n])

    return matmul_reduce_scatter_one_shot


def gemm_rs_persistent(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None, shared: int = 0,
):  # fmt: skip
    """Build the kernel of a plan whose copy engines transfer the products.

    The kernel computes what ``matmul_reduce_scatter_program`` does. It writes its products for
    other ranks to ``products`` (ranks, rows_per_rank, N). Copies write the products of other ranks
    to ``parts``; the tensor cores add them, see ``identity``. If ``stores_last_peer``, the kernel
    stores the products for the peer that it serves last in the peer's ``latest``
    (rows_per_rank, N). Blocks are persistent, see ``PersistentSchedule``.

    Args:
        shared: rows of A and C of an all-reduce, ``ranks * rows_per_rank`` at most; 0 for a
            reduce-scatter. The kernel of an all-reduce writes own sums to its own rows of C and to
            ``sums`` (rows_per_rank, N), the source of copies. It writes the last chunk of them to
            ``rest`` instead, from which blocks pull.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = ceil(rows_per_rank / tiles.M), ceil(N / tiles.N)
    schedule, width = PersistentSchedule.for_tiles(ranks * rows * columns), tiles.width
    steps, part_steps = ceil(K / tiles.K), steps_of(tiles, dtype)
    adding = (ranks - 1) * part_steps
    stores = stores_last_peer(rows_per_rank, N, ranks, tiles)
    chunk = tiles.tiles_per_chunk(N) if shared else None  # copies transfer sums chunk by chunk
    tail, pulls = PullTail.last_chunk(rows_per_rank, N, tiles), bool(shared and ranks > 1)
    copied = pulls and tail.first > 0

    @T.prim_func
    def gemm_rs_persistent(
        A: T.Tensor((shared or ranks * rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        products: W.Symmetric((ranks, rows_per_rank, N), out_dtype),
        parts: W.Symmetric((ranks, rows_per_rank, N), out_dtype),
        latest: W.Symmetric((rows_per_rank, N), out_dtype) if stores else None,
        sums: W.Symmetric((rows_per_rank, N), out_dtype) if copied else None,
        identity: identity_of(tiles, ranks, dtype),
        C: T.Tensor((shared or rows_per_rank, N), out_dtype),
    ):
        with T.Kernel(schedule.blocks, threads=tiles.threads) as block:
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, width), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")
            if pulls:
                rest = W.alloc_symmetric((tail.rows, tail.columns), out_dtype)

            me = W.rank()
            served_last, serves_last = (me + ranks - 1) % ranks, (me + 1) % ranks
            for turn in T.serial(schedule.waves):
                number = turn * schedule.blocks + block
                if number < schedule.tiles:
                    owner, tile = W.swizzle_ranks(number, rows * columns, me, ranks, chunk)
                    row, column = W.swizzle_2d(tile, rows, columns, tiles.group_m)
                    m, n = row * tiles.M, column * tiles.N

                    T.clear(total)
                    for step in T.Pipelined(
                        T.if_then_else(owner == me, steps + adding, steps) if adding else steps,
                        num_stages=tiles.stages,
                    ):
                        k = step * tiles.K
                        if adding:
                            source = (me + ranks - 1 - (step - steps) // part_steps) % ranks
                            there = (step - steps) % part_steps * tiles.K
                        if not adding or step < steps:
                            T.copy(A[owner * rows_per_rank + m, k], A_tile)
                        elif stores and source == serves_last:
                            T.copy(latest[me, m, n + there], A_tile)
                        else:
                            T.copy(parts[me, source, m, n + there], A_tile)
                        if not adding or step < steps:
                            T.copy(B[n, k] if transposed else B[k, n], B_tile)
                        else:
                            T.copy(identity[0, there] if transposed else identity[there, 0], B_tile)
                        accumulate(A_tile, B_tile, total, transposed)
                    if scaled:
                        scale(total, scale_a, scale_b)

                    if stores and owner == served_last:
                        for first in T.unroll(0, tiles.N, width):
                            T.copy(total[:, first : first + width], C_tile)
                            T.copy(C_tile, latest[owner, m, n + first])
                    elif owner != me:
                        for first in T.unroll(0, tiles.N, width):
                            T.copy(total[:, first : first + width], C_tile)
                            T.copy(C_tile, products[me, owner, m, n + first])
                    else:
                        if not adding:
                            for step in T.serial(ranks - 1):
                                source = (me + ranks - 1 - step) % ranks
                                for first in T.unroll(0, tiles.N, width):
                                    if stores and source == serves_last:
                                        T.copy(latest[me, m, n + first], C_tile)
                                    else:
                                        T.copy(parts[me, source, m, n + first], C_tile)
                                    for i, j in T.Parallel(tiles.M, width):
                                        total[i, first + j] += C_tile[i, j]
                        if biased:
                            add_bias(total, bias, n)
                        if pulls and tile >= tail.first:
                            for first in T.unroll(0, tiles.N, width):
                                T.copy(total[:, first : first + width], C_tile)
                                T.copy(C_tile, C[me * rows_per_rank + m, n + first])
                                T.copy(C_tile, rest[me, m - tail.m, n - tail.n + first])
                        else:
                            for first in T.unroll(0, tiles.N, width):
                                T.copy(total[:, first : first + width], C_tile)
                                T.copy(
                                    C_tile, C[(me * rows_per_rank if shared else 0) + m, n + first]
                                )
                                if copied:
                                    T.copy(C_tile, sums[me, m, n + first])

            if pulls:
                pull(rest, C, rows_per_rank, tail, block, schedule.blocks, ranks)

    granules = {"rest": tail.granule} if pulls else {}
    if stores and tiles.N % tiles.K == 0:  # no step that adds crosses tiles
        granules["latest"] = min(tiles.M, rows_per_rank), min(tiles.N, N)
    return split_options(gemm_rs_persistent, {"tileweave.granule": granules})[0]


def matmul_reduce_scatter_plan(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
) -> Plan:  # fmt: skip
    """Build the plan: copy engines transfer products for other ranks while the kernel continues.

    If ``stores_last_peer``, the kernel stores those for the last peer. Remote stores from SMs slow
    down their own loads: stores of all products cost 9 % of the time of the GEMM
    (benchmarks/LOG.md).
    """
    out_dtype = out_dtype or dtype
    kernel = gemm_rs_persistent(
        rows_per_rank, N, K, ranks, dtype, transposed, tiles, biased, out_dtype
    )
    stores = stores_last_peer(rows_per_rank, N, ranks, tiles)

    @plan
    def matmul_reduce_scatter(
        p: PlanBuilder,
        A: T.Tensor((ranks * rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        products: W.Symmetric((ranks, rows_per_rank, N), out_dtype),
        parts: W.Symmetric((ranks, rows_per_rank, N), out_dtype),
        latest: W.Symmetric((rows_per_rank, N), out_dtype) if stores else None,
        identity: identity_of(tiles, ranks, dtype),
        C: T.Tensor((rows_per_rank, N), out_dtype),
    ):
        p.launch(kernel, A, B, bias, scale_a, scale_b, products, parts, latest, None, identity, C)
        for peer in islice(p.peers(), ranks - 1 - stores):
            for chunk in tiles.chunks(rows_per_rank, N):
                own, theirs = products[p.rank, peer], parts[peer, p.rank]
                p.copy(theirs[chunk], own[chunk], stream="copies")

    return matmul_reduce_scatter


class MatmulReduceScatter(Operator, op=NAME):
    """GEMM + reduce-scatter by copy engines, by stores, or, for few rows, in one exchange."""

    programs: ClassVar = {
        "copy_engines": matmul_reduce_scatter_plan,
        "stores": matmul_reduce_scatter_program,
        "one_shot": scattered_one_shot,
    }

    graph_fallback: ClassVar = {"copy_engines": "stores"}
    extra_inputs: ClassVar = {"copy_engines": identities}

    @staticmethod
    def unfused(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, group: Group, epilogue: Epilogue
    ) -> None:
        nccl.reduce_scatter(epilogue.without_bias.multiply(a, b), c, group)
        epilogue.add_to(c)

    @staticmethod
    def estimates(problem: Problem) -> dict[Choice, float]:
        rows_per_rank, N, ranks = problem.shards
        sizes = rows_per_rank, N, problem.K, ranks
        bytes_of = problem.itemsize, problem.out_dtype.itemsize
        return {
            Choice("copy_engines", tiles): estimate_gemm_rs_persistent_us(*sizes, tiles, *bytes_of)
            for tiles in persistent_tiles(problem.itemsize)
        } | {
            Choice("stores", tiles): estimate_gemm_rs_store_us(*sizes, tiles, problem.itemsize)
            for tiles in stored(problem.itemsize)
        } | {
            Choice("one_shot", tiles): estimate_one_shot_us(
                problem.M, N, problem.K, tiles, problem.moved_bytes, problem.itemsize
            )
            for tiles in stored(problem.itemsize)
        }  # fmt: skip

    @classmethod
    def suits(cls, problem: Problem, program: str) -> bool:
        many = problem.M > FEW and program == "one_shot"
        return not many and super().suits(problem, program)


def matmul_reduce_scatter(
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
    """Return this rank's rows of the sum over ranks of ``a @ b``; tiles are sent once computed.

    The fused program rounds each product to the type of ``a`` once, except a rank's own products
    for itself, and sums in fp32: first the own product, then the left neighbor's, and so on. Equal
    inputs give equal bits. A product that is not finite may make others of its row NaN, see
    docs/guides/ops.md. ``nccl`` rounds and sums as NCCL does.

    Every rank calls it with the same shapes. The first call with new shapes compiles, collectively.

    Args:
        a: (M, K); M is a multiple of the number of ranks, K this rank's part of the inner
            dimension.
        b: (K, N); row-major, or the transpose of a row-major (N, K).
        group: None for the group of ``tw.init``, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis.
        bias: (N,), the same on every rank: each adds it in fp32 to the sums that it owns.
        scale_a, scale_b: one float32 on the device each, for fp8 operands, as in
            ``torch._scaled_mm``; different on each rank.
        out_dtype: type of the result: bfloat16 or float16 for fp8 operands (None: bfloat16), else
            the type of the operands.
        out: (M / ranks, N), contiguous; receives the result. Not differentiable.
        strategy: ``fused``, ``nccl`` (``torch.mm`` and ``torch.distributed``), or ``auto``: the
            faster one by the measurement of ``tw.tune`` or the cost model, if the call can be
            fused; see ``strategy_of``.

    Returns:
        (M / ranks, N), in the type of ``a``.

    Raises:
        TileWeaveError: arguments are invalid or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return _product(a, b, group, out, strategy, Epilogue(bias, scale_a, scale_b, out_dtype))


def _gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
    a, b = ctx.saved_tensors
    arguments = grad_c.contiguous(), b.t(), ctx.group, ctx.strategy, *NOTHING
    grad_b = None
    if ctx.needs_input_grad[1]:
        grad_a, rows = torch.ops.tileweave.all_gather_matmul_rows(*arguments)
        grad_b = a.t() @ rows
    else:
        grad_a = torch.ops.tileweave.all_gather_matmul(*arguments)
    grad_bias = grad_c.sum(0) if ctx.needs_input_grad[4] else None
    return grad_a, grad_b, None, None, grad_bias, None, None, None


_product = define_product(NAME, _gradients)
