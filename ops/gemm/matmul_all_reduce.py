"""GEMM + all-reduce: ranks exchange their products, and every rank receives the sum.

This module holds the plan with copy engines and the torch operator with its gradient. The kernels
are in ``kernels``. In the plan, one stream copies while one kernel computes, here on rank 1 of 4
with two chunks::

    kernel | chunk 0 of 2, 3, 0 | own chunk 0   | chunk 1 of 2, 3, 0 | own chunk 1   | pull |
           |      \\             | ^ adds        |      \\             | ^ adds        | ^
    copies |       \\-- products 0 to the peers --|-- sums 0 to C ----\\-- products 1 -|  :
    peers  |  write products to ``partials``      |  ``sums`` of chunk 0                |  :
           |                                         ``pulled_sums`` of the last chunk ----:

A copy starts when all tiles of its chunk are computed. The sums of the last chunk are pulled by
blocks: no product is left to compute while a copy would transfer them.
"""

from dataclasses import replace
from itertools import islice
from math import ceil
from typing import Any, ClassVar

import tilelang.language as T
import torch

from ...builtins.errors import brief_errors
from ...passes.ir.sizes import LARGEST
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ..collectives.all_gather import AllGather
from ..collectives.all_reduce import AllReduce
from ..collectives.collective import Move
from ..core import nccl
from ..core.across_nodes import Mesh
from ..core.epilogue import Epilogue
from ..core.gemm_config import GemmConfig
from ..core.groups import TwoLevels
from ..core.library import call_pair
from ..core.problem import Problem
from ..core.registry import TableRow
from ..core.tiles import Choice, Tiles, persistent_tiles, store_tiles
from .cost_model import (
    estimate_gemm_rs_persistent_us,
    estimate_one_shot_us,
    estimate_two_shot_us,
)
from .gemm_operator import GemmOperator, Multiply
from .identity import identities
from .kernels.gemm_all_reduce import gemm_ar_one_shot, gemm_ar_two_shot
from .kernels.gemm_persistent import copied_sums_of, gemm_ar_persistent
from .kernels.partial_sums import identity_of
from .matmul_reduce_scatter import MatmulReduceScatter

NAME = "matmul_all_reduce"
ONE_SHOT_MAX_BYTES = 32 << 20
"""Maximum number of bytes that a rank pulls in the one-shot program."""
GROUPINGS = (4, 1), (8, 1), (8, 2), (8, 4), (16, 1)
"""Pairs (``group_m``, ``num_chunks``) that are tried with copy engines.

Sums are copied when a chunk is complete, the last one after the kernel. Smaller chunks are copied
sooner, but need more copies. Lower groups share less of the operands in L2.
"""


def matmul_all_reduce_plan(config: GemmConfig) -> Plan:
    """Build the plan: ``matmul_reduce_scatter_plan`` and the exchange of the sums.

    Copy engines transfer the sums of other ranks as they become ready; the kernel pulls those of
    the last chunk.
    """
    kernel, owned, M = gemm_ar_persistent(config), config.whole_tiles, config.M
    rows_per_rank = owned.rows_per_rank
    chunks = config.tiles.chunks(rows_per_rank, config.N)

    @plan
    def matmul_all_reduce(
        p: PlanBuilder,
        A: T.Tensor((M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        products: owned.partials,
        partials: owned.partials,
        last_peer_buf: owned.last_peer_buf,
        sums: copied_sums_of(config),
        identity: identity_of(config),
        C: T.Tensor((M, config.N), config.out_dtype),
    ):
        p.launch(
            kernel, A, B, bias, scale_a, scale_b, products, partials, last_peer_buf, sums,
            identity, C,
        )  # fmt: skip
        # In the order in which the kernel computes and needs them, see W.swizzle_ranks.
        for chunk, previous in zip(chunks, [None, *chunks[:-1]], strict=True):
            for peer in islice(p.peers(), config.ranks - 1 - owned.stores_last_peer):
                src, dst = products[p.rank, peer], partials[peer, p.rank]
                p.copy(dst[chunk], src[chunk], stream="copies")
            if not previous:
                continue
            rows, columns = previous
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


class MatmulAllReduce(GemmOperator, op=NAME):
    """GEMM + all-reduce in one exchange or in two, by stores and loads or by copy
    engines."""

    row = TableRow(
        inputs="`a` (M, K), `b` (K, N), each rank its part of the inner dimension",
        result="the sum over ranks of `a @ b`, (M, N)",
        gradient="`grad_a = grad @ b.t()`, `grad_b = a.t() @ grad`, without communication",
        memory="one-shot 2 x M x N; otherwise at most (2 + 3 / W) x M x N, "
        "and 2 x (1 + 1 / W) x M x N for graphs",
    )
    collective = AllReduce

    programs: ClassVar = {
        "one_shot": gemm_ar_one_shot,
        "two_shot": gemm_ar_two_shot,
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
    def within(problem: Problem, ranks: TwoLevels) -> Problem:
        rows = ceil(problem.rows / ranks.world_size) * ranks.world_size
        summed = replace(problem, op=MatmulReduceScatter.op, rows=rows)
        return MatmulReduceScatter.within(summed, ranks)

    @staticmethod
    def across(
        multiply: Multiply, move: Move, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
        epilogue: Epilogue, mesh: Mesh,
    ) -> None:  # fmt: skip
        """Add as ``matmul_reduce_scatter`` does, then gather the sums; rows of zeros fill up the
        parts."""
        missing = -len(a) % mesh.world_size
        total = c
        if missing:
            a = torch.cat([a, torch.zeros_like(a[:1]).expand(missing, -1)])
            total = c.new_empty(len(a), c.shape[1])
        rows = c.new_empty(len(a) // mesh.world_size, c.shape[1])
        MatmulReduceScatter.across(multiply, move, a, b, rows, epilogue, mesh)
        AllGather.across(move, rows, total, mesh)
        if missing:
            c.copy_(total[: len(c)])

    @staticmethod
    def gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
        a, b = ctx.saved_tensors
        grad_a = grad_c @ b.t() if ctx.needs_input_grad[0] else None
        grad_b = a.t() @ grad_c if ctx.needs_input_grad[1] else None
        grad_bias = grad_c.sum(0) if ctx.needs_input_grad[4] else None
        return grad_a, grad_b, None, None, grad_bias, None, None, None

    @staticmethod
    def symmetric_elements(M: int, N: int, K: int) -> int:
        return 7 * M * N

    @staticmethod
    def estimates(problem: Problem) -> dict[Choice, float]:
        sizes = problem.N, problem.K, problem.ranks
        itemsizes = problem.itemsize, problem.out_dtype.itemsize
        pulled = pulled_bytes(problem)
        return {
            Choice("copy_engines", tiles): estimate_gemm_rs_persistent_us(
                rows_of_owner(problem.M, problem.ranks, tiles), *sizes, tiles, *itemsizes,
                shared=True,
            )
            for shape in persistent_tiles(problem.itemsize)
            for tiles in (replace(shape, group_m=m, num_chunks=n) for m, n in GROUPINGS)
            if tiles.has_whole_chunks(rows_of_owner(problem.M, problem.ranks, tiles), problem.N)
        } | {
            Choice("two_shot", tiles): estimate_two_shot_us(problem.M, *sizes, tiles, *itemsizes)
            for tiles in store_tiles(problem.itemsize)
        } | {
            Choice("one_shot", tiles): estimate_one_shot_us(
                problem.M, problem.N, problem.K, tiles, pulled, problem.itemsize
            )
            for tiles in store_tiles(problem.itemsize)
        }  # fmt: skip

    @classmethod
    def suits(cls, problem: Problem, program: str) -> bool:
        if program == "one_shot" and pulled_bytes(problem) > ONE_SHOT_MAX_BYTES:
            return False
        if program == "copy_engines":
            tried = cls.tuning_tiles(problem)
            rows = max(rows_of_owner(problem.M, problem.ranks, tiles) for tiles in tried)
            # The program indexes all elements that a rank sums up.
            if rows * problem.N > LARGEST:
                return False
        return super().suits(problem, program)


@brief_errors
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
    and sums as NCCL does. On several nodes the sum of each node is rounded, and these sums are
    added in fp32.

    The gradient is that of a tensor-parallel layer: all ranks compute the same from the result, so
    its gradient is assumed to be equal on all ranks, and nothing is communicated.

    Every rank calls it with the same shapes. The first call with new shapes compiles, collectively.

    Args:
        a: (M, K), K this rank's part of the inner dimension.
        b: (K, N); row-major, or the transpose of a row-major (N, K).
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
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
    epilogue = bias, scale_a, scale_b, out_dtype
    return call_pair(NAME, (a, b), group, out, strategy, *epilogue)
