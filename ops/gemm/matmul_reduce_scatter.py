"""GEMM + reduce-scatter: each rank receives its rows of the sum over ranks and adds them.

This module holds the plan with copy engines and the torch operator with its gradient. The kernels
are in ``kernels``. In the plan, one stream copies while one kernel computes, here on rank 1 of 4::

    kernel    | tiles of 2 | tiles of 3 | tiles of 0 | own tiles: add products of 0, 3, 2 | C
              |        \\   |        \\   |        \\   |  ^ waits for copies of ranks 0, 3, 2
    copies    |         \\--- to 2 ------\\--- to 3 ----\\-- to 0 ---|
    peers     |  each peer copies its products for rank 1 to ``partials`` of rank 1

A copy starts when all tiles of its chunk are computed. With few tiles, the kernel stores the
products for the last peer (here 0) in that peer's ``last_peer_buf``: a copy would start too late.
"""

from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import tilelang.language as T
import torch

from ...builtins.errors import brief_errors
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ..collectives.collective import Move
from ..collectives.reduce_scatter import ReduceScatter
from ..core import nccl
from ..core.across_nodes import Mesh, sum_over_nodes
from ..core.epilogue import NO_EPILOGUE, Epilogue
from ..core.gemm_config import GemmConfig
from ..core.groups import TwoLevels
from ..core.library import call_pair
from ..core.problem import Problem
from ..core.registry import TableRow
from ..core.tiles import Choice, persistent_tiles, store_tiles
from .cost_model import (
    estimate_gemm_rs_persistent_us,
    estimate_gemm_rs_store_us,
    estimate_one_shot_us,
)
from .gemm_operator import GemmOperator, Multiply
from .identity import identities
from .kernels.gemm_persistent import gemm_rs_persistent
from .kernels.gemm_reduce_scatter import gemm_rs_one_shot, gemm_rs_store
from .kernels.partial_sums import identity_of

NAME = "matmul_reduce_scatter"
ONE_SHOT_MAX_ROWS = 2048
"""Maximum number of rows of the one-shot program, whose tiles of a column must run at the same
time."""


def matmul_reduce_scatter_plan(config: GemmConfig) -> Plan:
    """Build the plan: copy engines transfer products for other ranks while the kernel continues.

    If ``config.stores_last_peer``, the kernel stores those for the last peer. Remote stores from
    SMs slow down their own loads: stores of all products cost 9 % of the time of the GEMM
    (benchmarks/LOG.md).
    """
    kernel, rows_per_rank = gemm_rs_persistent(config), config.rows_per_rank
    chunks = config.tiles.chunks(rows_per_rank, config.N)

    @plan
    def matmul_reduce_scatter(
        p: PlanBuilder,
        A: T.Tensor((config.M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        products: config.partials,
        partials: config.partials,
        last_peer_buf: config.last_peer_buf,
        identity: identity_of(config),
        C: T.Tensor((rows_per_rank, config.N), config.out_dtype),
    ):
        p.launch(
            kernel, A, B, bias, scale_a, scale_b, products, partials, last_peer_buf, identity, C
        )
        for peer in islice(p.peers(), config.ranks - 1 - config.stores_last_peer):
            for chunk in chunks:
                src, dst = products[p.rank, peer], partials[peer, p.rank]
                p.copy(dst[chunk], src[chunk], stream="copies")

    return matmul_reduce_scatter


class MatmulReduceScatter(GemmOperator, op=NAME):
    """GEMM + reduce-scatter by copy engines, by stores, or, for few rows, in one exchange."""

    row = TableRow(
        inputs="`a` (M, K), `b` (K, N), each rank its part of the inner dimension",
        result="its rows of the sum over ranks of `a @ b`, (M / W, N)",
        gradient="of `a`: `all_gather_matmul`",
        memory="4 x M x N, half of it for graphs; 2 x M x N for few rows",
    )
    collective = ReduceScatter
    scatters = True

    programs: ClassVar = {
        "copy_engines": matmul_reduce_scatter_plan,
        "stores": gemm_rs_store,
        "one_shot": gemm_rs_one_shot,
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
    def within(problem: Problem, ranks: TwoLevels) -> Problem:
        rows = problem.rows // ranks.nodes.world_size
        return replace(problem, rows=rows, ranks=ranks.node.world_size, biased=False)

    @staticmethod
    def across(
        multiply: Multiply, move: Move, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
        epilogue: Epilogue, mesh: Mesh,
    ) -> None:  # fmt: skip
        """Send the sums for another node while those for the next one are computed; see
        ``sum_over_nodes``."""
        parts = a.unflatten(0, (mesh.nodes, -1))

        def produce(node: int, out: torch.Tensor) -> None:
            multiply(MatmulReduceScatter, parts[node], b, out, epilogue.without_bias)

        sum_over_nodes(produce, c, mesh, epilogue.bias)

    @staticmethod
    def gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
        a, b = ctx.saved_tensors
        arguments = grad_c.contiguous(), b.t(), ctx.group, ctx.strategy, *NO_EPILOGUE
        grad_b = None
        if ctx.needs_input_grad[1]:
            grad_a, rows = torch.ops.tileweave.all_gather_matmul_rows(*arguments)
            grad_b = a.t() @ rows
        else:
            grad_a = torch.ops.tileweave.all_gather_matmul(*arguments)
        grad_bias = grad_c.sum(0) if ctx.needs_input_grad[4] else None
        return grad_a, grad_b, None, None, grad_bias, None, None, None

    @staticmethod
    def symmetric_elements(M: int, N: int, K: int) -> int:
        return 4 * M * N

    @staticmethod
    def estimates(problem: Problem) -> dict[Choice, float]:
        rows_per_rank, N, ranks = problem.shards
        sizes = rows_per_rank, N, problem.K, ranks
        itemsizes = problem.itemsize, problem.out_dtype.itemsize
        return {
            Choice("copy_engines", tiles): estimate_gemm_rs_persistent_us(*sizes, tiles, *itemsizes)
            for tiles in persistent_tiles(problem.itemsize)
        } | {
            Choice("stores", tiles): estimate_gemm_rs_store_us(*sizes, tiles, problem.itemsize)
            for tiles in store_tiles(problem.itemsize)
        } | {
            Choice("one_shot", tiles): estimate_one_shot_us(
                problem.M, N, problem.K, tiles, problem.moved_bytes, problem.itemsize
            )
            for tiles in store_tiles(problem.itemsize)
        }  # fmt: skip

    @classmethod
    def suits(cls, problem: Problem, program: str) -> bool:
        has_many_rows = problem.M > ONE_SHOT_MAX_ROWS and program == "one_shot"
        return not has_many_rows and super().suits(problem, program)


@brief_errors
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
    docs/guides/ops.md. ``nccl`` rounds and sums as NCCL does. On several nodes the sum of each
    node is rounded, and these sums are added in fp32.

    Every rank calls it with the same shapes. The first call with new shapes compiles, collectively.

    Args:
        a: (M, K); M is a multiple of the number of ranks, K this rank's part of the inner
            dimension.
        b: (K, N); row-major, or the transpose of a row-major (N, K).
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
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
    epilogue = bias, scale_a, scale_b, out_dtype
    return call_pair(NAME, (a, b), group, out, strategy, *epilogue)
