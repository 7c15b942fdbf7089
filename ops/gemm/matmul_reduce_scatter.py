"""GEMM + reduce-scatter: what one kernel computes goes to its owners over NVLink, who sum it up.

The tile programs, by copy engines, by stores and in one exchange, and the torch operator with its
gradient.
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
from ..core.operator import Choice, Operator
from ..core.problem import Problem
from ..core.tiles import PersistentSchedule, Tiles, stored, stores_last_peer, walked
from .identity import identities, identity_of, steps_of
from .product import define_product
from .pull_tail import PullTail, fetch

NAME = "matmul_reduce_scatter"
FEW = 2048
"""Rows that are scattered in one exchange at most: their tiles of a column must run at a time."""


def matmul_reduce_scatter_program(
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """C (share, N): this rank's rows of the sum over ranks of A (ranks * share, K) times B.

    A rank's own tile stays in fp32; those of the others come rounded to ``out_dtype`` and are added
    in fp32, the left neighbour's first, which come first.

    Args:
        transposed: whether B is given as (N, K), else (K, N).
        biased: whether bias is a parameter; else there is none.
        out_dtype: of bias and C; else that of A.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = T.ceildiv(share, tiles.M), T.ceildiv(N, tiles.N)

    @T.prim_func
    def matmul_reduce_scatter(
        A: T.Tensor((ranks * share, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((share, N), out_dtype),
    ):
        with T.Kernel(ranks * rows * columns, threads=tiles.threads) as block:
            parts = W.alloc_symmetric(
                (ranks, share, N), out_dtype
            )  # what the others computed for us
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, tiles.N), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")

            me = W.rank()
            owner, tile = W.swizzle_ranks(block, rows * columns, me, ranks)
            row, column = W.swizzle_2d(tile, rows, columns, tiles.group_m)
            m, n = row * tiles.M, column * tiles.N

            multiply(A, owner * share + m, B, n, A_tile, B_tile, total, transposed, tiles.stages)
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
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """The same of few rows: one tile may have those of all owners, who fetch theirs from all ranks.

    All products are rounded to ``out_dtype``, the own one, too, which is added last.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = ceil(ranks * share / tiles.M), ceil(N / tiles.N)
    height = ceil(share / rows / 8) * 8  # of the own rows that a block adds up

    @T.prim_func
    def matmul_reduce_scatter_one_shot(
        A: T.Tensor((ranks * share, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((share, N), out_dtype),
    ):
        with T.Kernel(rows, columns, threads=tiles.threads) as (row, column):
            parts = W.alloc_symmetric((ranks * share, N), out_dtype)  # what this rank computed
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
                T.copy(parts[source, me * share + first, n], own_tile)
                add_tile(own, own_tile)
            if biased:
                add_bias(own, bias, n)
            T.copy(own, own_tile)
            T.copy(own_tile, C[first, n])

    return matmul_reduce_scatter_one_shot


def gemm_rs_persistent(
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None, shared: int = 0,
):  # fmt: skip
    """The kernel between copy engines: as ``matmul_reduce_scatter_program``, but that products for
    other ranks stay here, in ``products`` (ranks, share, N), and theirs are found in ``parts``,
    which the tensor cores add, see ``identity``. If ``stores_last_peer``, it stores the
    products for the last peer itself, in ``latest`` (share, N) of the owner.

    Blocks walk over the tiles, see ``PersistentSchedule``.

    Args:
        shared: rows of A and C of an all-reduce, ``ranks * share`` at most; 0 for none. C then has
            all of them, and own sums are put into its own rows and into ``sums`` (share, N), whence
            copies bring them; those of the last piece into ``rest``, which blocks fetch.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    rows, columns = ceil(share / tiles.M), ceil(N / tiles.N)
    walk, width = PersistentSchedule.for_tiles(ranks * rows * columns), tiles.width
    steps, each = ceil(K / tiles.K), steps_of(tiles, dtype)
    adding = (ranks - 1) * each
    stores = stores_last_peer(share, N, ranks, tiles)
    chunk = tiles.tiles_per_chunk(N) if shared else None  # copies fetch sums piece by piece
    fetched, fetches = PullTail.of(share, N, tiles), bool(shared and ranks > 1)
    copied = fetches and fetched.first > 0

    @T.prim_func
    def gemm_rs_persistent(
        A: T.Tensor((shared or ranks * share, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        products: W.Symmetric((ranks, share, N), out_dtype),
        parts: W.Symmetric((ranks, share, N), out_dtype),
        latest: W.Symmetric((share, N), out_dtype) if stores else None,
        sums: W.Symmetric((share, N), out_dtype) if copied else None,
        identity: identity_of(tiles, ranks, dtype),
        C: T.Tensor((shared or share, N), out_dtype),
    ):
        with T.Kernel(walk.blocks, threads=tiles.threads) as block:
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, width), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")
            if fetches:
                rest = W.alloc_symmetric((fetched.rows, fetched.columns), out_dtype)

            me = W.rank()
            served_last, serves_last = (me + ranks - 1) % ranks, (me + 1) % ranks
            for turn in T.serial(walk.waves):
                number = turn * walk.blocks + block
                if number < walk.tiles:
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
                            source = (me + ranks - 1 - (step - steps) // each) % ranks
                            there = (step - steps) % each * tiles.K
                        if not adding or step < steps:
                            T.copy(A[owner * share + m, k], A_tile)
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
                        if fetches and tile >= fetched.first:
                            for first in T.unroll(0, tiles.N, width):
                                T.copy(total[:, first : first + width], C_tile)
                                T.copy(C_tile, C[me * share + m, n + first])
                                T.copy(C_tile, rest[me, m - fetched.m, n - fetched.n + first])
                        else:
                            for first in T.unroll(0, tiles.N, width):
                                T.copy(total[:, first : first + width], C_tile)
                                T.copy(C_tile, C[(me * share if shared else 0) + m, n + first])
                                if copied:
                                    T.copy(C_tile, sums[me, m, n + first])

            if fetches:
                fetch(rest, C, share, fetched, block, walk.blocks, ranks)

    granules = {"rest": fetched.granule} if fetches else {}
    if stores and tiles.N % tiles.K == 0:  # steps that add do not cross tiles
        granules["latest"] = min(tiles.M, share), min(tiles.N, N)
    return split_options(gemm_rs_persistent, {"tileweave.granule": granules})[0]


def matmul_reduce_scatter_plan(
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
) -> Plan:  # fmt: skip
    """The plan: copy engines carry the products for other ranks while the kernel goes on, if they
    are not ``stores_last_peer``.

    Stores of SMs over NVLink hold up their loads: pushed by the kernel, the same bytes took 9 % of
    the time of the GEMM (benchmarks/LOG.md).
    """
    out_dtype = out_dtype or dtype
    kernel = gemm_rs_persistent(share, N, K, ranks, dtype, transposed, tiles, biased, out_dtype)
    stores = stores_last_peer(share, N, ranks, tiles)

    @plan
    def matmul_reduce_scatter(
        p: PlanBuilder,
        A: T.Tensor((ranks * share, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        products: W.Symmetric((ranks, share, N), out_dtype),
        parts: W.Symmetric((ranks, share, N), out_dtype),
        latest: W.Symmetric((share, N), out_dtype) if stores else None,
        identity: identity_of(tiles, ranks, dtype),
        C: T.Tensor((share, N), out_dtype),
    ):
        p.launch(kernel, A, B, bias, scale_a, scale_b, products, parts, latest, None, identity, C)
        for peer in islice(p.peers(), ranks - 1 - stores):
            for piece in tiles.pieces(share, N):
                made, theirs = products[p.rank, peer], parts[peer, p.rank]
                p.copy(theirs[piece], made[piece], stream="copies")

    return matmul_reduce_scatter


class MatmulReduceScatter(Operator, op=NAME):
    """By copy engines, by stores, or, of few rows, in one exchange."""

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
        share, N, ranks = problem.shards
        sizes = share, N, problem.K, ranks
        bytes_of = problem.itemsize, problem.out_dtype.itemsize
        return {
            Choice("copy_engines", tiles): estimate_gemm_rs_persistent_us(*sizes, tiles, *bytes_of)
            for tiles in walked(problem.itemsize)
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
    """This rank's rows of the sum over ranks of ``a @ b``: tiles leave as soon as they are ready.

    Fused, each rank's products are rounded to the type of ``a`` once, but for its own, and summed
    in fp32: on each rank its own first, then the left neighbour's, and so on: equal inputs give
    equal bits. A product that is not finite may make others of its row NaN, see docs/ops.md.
    ``nccl`` rounds and sums as NCCL does.

    Every rank calls it with the same shapes; the first call with new ones compiles, collectively.

    Args:
        a: (M, K), M a multiple of the ranks, K this rank's part of the inner dimension.
        b: (K, N); row-major, or the transpose of a row-major (N, K).
        group: None for the group of ``tw.init``, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis.
        bias: (N,), the same on every rank: each adds it in fp32 to the sums that it owns.
        scale_a, scale_b: one float32 on the device, for fp8 operands, as for
            ``torch._scaled_mm``; each rank its own.
        out_dtype: of the result, bfloat16 or float16 for fp8 operands; None is bfloat16 for these,
            else the type of the operands.
        out: (M / ranks, N), contiguous; gets the result. Not differentiable.
        strategy: ``fused``, ``nccl`` (``torch.mm`` and ``torch.distributed``), or ``auto``: the
            faster one, measured by ``tw.tune`` or foretold, if it can be fused; ``strategy_of``.

    Returns:
        (M / ranks, N), in the type of ``a``.

    Raises:
        TileWeaveError: arguments that do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return _product(a, b, group, out, strategy, Epilogue(bias, scale_a, scale_b, out_dtype))


def _gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
    a, b = ctx.saved_tensors
    given = grad_c.contiguous(), b.t(), ctx.group, ctx.strategy, *NOTHING
    grad_b = None
    if ctx.needs_input_grad[1]:
        grad_a, rows = torch.ops.tileweave.all_gather_matmul_rows(*given)
        grad_b = a.t() @ rows
    else:
        grad_a = torch.ops.tileweave.all_gather_matmul(*given)
    grad_bias = grad_c.sum(0) if ctx.needs_input_grad[4] else None
    return grad_a, grad_b, None, None, grad_bias, None, None, None


_product = define_product(NAME, _gradients)
