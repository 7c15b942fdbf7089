"""All-gather + GEMM: copy engines gather rows while a kernel multiplies those that have arrived.

This module holds the plan with copy engines and the torch operator with its gradient. The kernels
are in ``kernels``; if there are few rows, their blocks gather them. In the plan, one stream copies
while one kernel computes, here on rank 1 of 4::

    copies | A to 2 | A to 3 | A to 0 |
    kernel | own tiles | tiles of 0 | tiles of 3 | tiles of 2 |
           |           ^            ^            ^  waits for the rows of each rank
    peers  |  0 to 1   | 3 to 1     | 2 to 1     |  write to ``gathered`` of rank 1

Each rank sends to its right neighbor first, so the rows of the left neighbor arrive first. Rows for
the right neighbor are copied in the chunks of ``Tiles.widening``.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import tilelang.language as T
import torch

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ..collectives.all_gather import AllGather
from ..collectives.collective import Move
from ..core import nccl
from ..core.across_nodes import Mesh, pieces_of_nodes, readable, writable
from ..core.autocast import lowers
from ..core.call import decided
from ..core.checks import require_bools
from ..core.compiled import op_cache_of
from ..core.epilogue import EPILOGUE_SCHEMA, NO_EPILOGUE, Epilogue
from ..core.gemm_config import GemmConfig
from ..core.groups import TwoLevels, name_of, ranks_of
from ..core.library import call_pair, define, mark_written, refuse_gradients
from ..core.noted import UNCOMPILED, note
from ..core.problem import Problem, checked_problem, require_operands
from ..core.registry import TableRow
from ..core.tiles import Choice, persistent_tiles, store_tiles
from .cost_model import (
    estimate_ag_gemm_comm_blocks_us,
    estimate_ag_gemm_copy_engine_us,
    estimate_ag_gemm_push_us,
)
from .gemm_operator import GemmOperator, Multiply, operands_of
from .kernels.all_gather_gemm import ag_gemm_comm_blocks, ag_gemm_copy_engine, ag_gemm_push

NAME = "all_gather_matmul"
NUM_CHUNKS = (1, 2, 3, 4)
"""Chunks in which the first peer's rows arrive. With more chunks, the last one arrives later."""
CHUNK_BYTES = 2 << 10
"""Least bytes of a row in each chunk: with 1 KiB, copy engines need several times as long."""


def all_gather_matmul_plan(config: GemmConfig) -> Plan:
    """Build the plan: each rank copies its A (rows_per_rank, K) to its peers and multiplies the
    rows of all ranks by its own B.

    No rank writes its own rows to gathered (ranks, rows_per_rank, K).
    """
    kernel, ranks, K = ag_gemm_copy_engine(config), config.ranks, config.K
    rows_per_rank, chunks = config.rows_per_rank, config.tiles.widening(K)

    @plan
    def all_gather_matmul(
        p: PlanBuilder,
        A: T.Tensor((rows_per_rank, K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        gathered: W.Symmetric((ranks, rows_per_rank, K), config.dtype),
        C: T.Tensor((ranks, rows_per_rank, config.N), config.out_dtype),
    ):
        for number, peer in enumerate(p.peers()):
            for k in [slice(0, K)] if number else chunks:
                p.copy(gathered[peer, p.rank, :, k], A[:, k], stream="copies")
        p.launch(kernel, A, B, bias, scale_a, scale_b, gathered, C)

    return all_gather_matmul


class AllGatherMatmul(GemmOperator, op=NAME):
    """All-gather + GEMM: rows are gathered by copy engines, by some blocks of the kernel or by all.

    The symmetric memory of ``copy_engines`` holds the gathered rows.
    """

    arguments = ("a_shard", "b")
    row = TableRow(
        inputs="`a_shard` (M / W, K), `b` (K, N), each rank its own",
        result="the rows of all ranks times `b`, (M, N); with `return_gathered` also the rows, "
        "(M, K)",
        gradient="of `a_shard`: `matmul_reduce_scatter`. The gradient of `b` gathers the rows "
        "again, unless `return_gathered` kept them",
        memory="M x K; 2 x M x K for few rows",
    )
    collective = AllGather
    gathers = True

    programs: ClassVar = {
        "copy_engines": all_gather_matmul_plan,
        "communicating_blocks": ag_gemm_comm_blocks,
        "stores": ag_gemm_push,
    }

    def declared(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        *inputs, c = tensors
        if self.choice.program != "stores":  # no tile crosses the rows of a rank
            c = c.view(self.problem.ranks, self.problem.rows_per_rank, self.problem.N)
        return super().declared(*inputs, c)

    def rows(self, a: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the rows of all ranks, (M, K), after a call with ``a``.

        They come from the memory of ``copy_engines``. The other programs do not keep them: NCCL
        gathers them again, which returns ``a`` itself if there is one rank.
        """
        if self.choice.program != "copy_engines":
            return nccl.all_gather(a, group)
        gathered = self.memory[0].local.clone()
        gathered[group.rank] = a
        return gathered.view(self.problem.M, self.problem.K)

    @staticmethod
    def unfused(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, group: Group, epilogue: Epilogue
    ) -> torch.Tensor:
        """Compute ``c`` with NCCL and ``torch.mm``, and return the gathered rows."""
        gathered = nccl.all_gather(a, group)
        epilogue.multiply(gathered, b, out=c)
        return gathered

    @staticmethod
    def within(problem: Problem, ranks: TwoLevels) -> Problem:
        return replace(problem, ranks=ranks.node.world_size)

    @staticmethod
    def across(
        multiply: Multiply, move: Move, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
        epilogue: Epilogue, mesh: Mesh,
    ) -> None:  # fmt: skip
        """Send the rows to the other nodes, and multiply the rows of one node after the other."""
        parts = c.unflatten(0, (mesh.nodes, -1))
        for node, rows in pieces_of_nodes([a] * mesh.nodes, mesh):
            multiply(AllGatherMatmul, rows, b, parts[node], epilogue)

    @staticmethod
    def gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
        """Gather the rows again, which is cheaper than keeping them, and return the gradients."""
        a, b = ctx.saved_tensors

        def gather() -> torch.Tensor:
            return torch.ops.tileweave.all_gather(a.contiguous(), ctx.group, "nccl")

        return _gradients_of(ctx, gather, b, grad_c)

    @staticmethod
    def symmetric_elements(M: int, N: int, K: int) -> int:
        return M * K

    @staticmethod
    def estimates(problem: Problem) -> dict[Choice, float]:
        rows_per_rank, N, ranks = problem.shards
        row = problem.K * problem.itemsize
        return {
            Choice("copy_engines", tiles): estimate_ag_gemm_copy_engine_us(
                rows_per_rank, N, problem.K, ranks, tiles, problem.itemsize
            )
            for shape in persistent_tiles(problem.itemsize)
            for tiles in (replace(shape, num_chunks=n) for n in NUM_CHUNKS)
            if tiles.num_chunks == 1 or row >> tiles.num_chunks - 1 >= CHUNK_BYTES
        } | {
            Choice("communicating_blocks", tiles): estimate_ag_gemm_comm_blocks_us(
                rows_per_rank, N, problem.K, ranks, tiles, problem.itemsize
            )
            for tiles in persistent_tiles(problem.itemsize)
        } | {
            Choice("stores", tiles): estimate_ag_gemm_push_us(
                rows_per_rank, N, problem.K, ranks, tiles, problem.itemsize
            )
            for tiles in store_tiles(problem.itemsize)
        }  # fmt: skip


@brief_errors
def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    group: Any = None,
    *,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    strategy: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multiply the rows of all ranks by ``b``; rows are multiplied while others are transferred.

    Every rank calls it with the same shapes. The first call with new shapes compiles, collectively.

    Args:
        a_shard: (M / ranks, K), this rank's rows.
        b: (K, N), different on each rank; row-major, or the transpose of a row-major (N, K).
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
        bias: (N,), added to every row in fp32; different on each rank, as ``b``.
        scale_a, scale_b: one float32 on the device each, for fp8 operands, as in
            ``torch._scaled_mm``. ``scale_a`` applies to all rows and is the same on every rank.
        out_dtype: type of the result: bfloat16 or float16 for fp8 operands (None: bfloat16), else
            the type of the operands.
        out: (M, N), contiguous; receives the result. Not differentiable.
        return_gathered: whether the rows of all ranks, (M, K), are returned too.
        strategy: ``fused``, ``nccl`` (``torch.distributed`` and ``torch.mm``), or ``auto``: the
            faster one by the measurement of ``tw.tune`` or the cost model, if the call can be
            fused; see ``strategy_of``.

    Returns:
        (M, N), in the type of ``a_shard``; with ``return_gathered`` a pair of it and the rows.

    Raises:
        TileWeaveError: arguments are invalid or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    if not isinstance(return_gathered, bool):
        require_bools(NAME, return_gathered=return_gathered)
    if not return_gathered:
        epilogue = bias, scale_a, scale_b, out_dtype
        return call_pair(NAME, (a_shard, b), group, out, strategy, *epilogue)
    epilogue = Epilogue(bias, scale_a, scale_b, out_dtype)
    require_operands(NAME, a_shard, b, out, epilogue)
    refuse_gradients(NAME, out, a_shard, b, *epilogue.tensors)
    options = name_of(group), strategy, *epilogue
    if out is None:
        return _product_and_rows(a_shard, b, *options)
    return out, _rows_and_product(a_shard, b, out, *options)


def _compute_with_rows(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, requested: str,
    epilogue: Epilogue,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the result, which is ``out`` if given, and a copy of the gathered rows."""
    *tensors, out_dtype = epilogue
    call, decision = decided(NAME, (a, b, *tensors), out, (group, requested, out_dtype))
    a, b, epilogue, c = operands_of(call, decision)
    ranks = decision.group
    if isinstance(ranks, TwoLevels):
        return c, _rows_of_nodes(a, b, c, epilogue, ranks, requested)
    choice = _choice_for_rows(decision.problem, requested, decision.choice)
    if choice not in UNCOMPILED:
        operator = op_cache_of(ranks).operator(decision.problem, choice, AllGatherMatmul)
        operator(a, b, *epilogue.tensors, c)
        rows = operator.rows(a, ranks)
    else:
        rows = AllGatherMatmul.unfused(a, b, c, ranks, epilogue)
    return c, rows.clone() if rows is a else rows


def _rows_of_nodes(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, epilogue: Epilogue, ranks: TwoLevels,
    requested: str,
) -> torch.Tensor:  # fmt: skip
    """Compute the result on several nodes as ``across`` does, and return the rows of all ranks."""
    count = ranks.nodes.world_size
    rows = a.new_empty(len(a) * ranks.world_size, a.shape[1]).unflatten(0, (count, -1))
    parts = c.unflatten(0, (count, -1))
    options = ranks.node_name, requested, epilogue
    with Mesh.of(NAME, ranks, a.device) as mesh:
        for node, shard in pieces_of_nodes([a] * count, mesh):
            with writable(parts[node]) as out:
                rows[node] = _compute_with_rows(readable(shard), b, out, *options)[1]
    return rows.flatten(0, 1)


def _choose_for_rows(
    problem: Problem, ranks: Group, requested: str, device: torch.device
) -> Choice | str | None:
    """Return how calls that return the gathered rows compute a problem, see
    ``ProblemOp.choose``."""
    choice = AllGatherMatmul.choose(problem, ranks, requested, device)
    return _choice_for_rows(problem, requested, choice)


def _choice_for_rows(
    problem: Problem, requested: str, choice: Choice | str | None
) -> Choice | str | None:
    """Return the choice of a call that returns the gathered rows, given that without them."""
    if requested != "auto" or choice in UNCOMPILED or choice.program == "copy_engines":
        return choice
    return _choice_keeping_rows(problem)


def _choice_keeping_rows(problem: Problem) -> Choice | None:
    """Return the fastest choice that keeps the gathered rows in memory.

    None means that NCCL, which keeps them too, is predicted to be faster.
    """
    options = AllGatherMatmul.options(problem).items()
    copied = {choice: us for choice, us in options if choice.program == "copy_engines"}
    _, unfused = AllGatherMatmul.predicted(problem)
    best = min(copied, key=lambda choice: copied[choice])
    return best if copied[best] <= unfused else None


def _eager(a_shard, b, group, strategy, *epilogue):
    return _compute_with_rows(a_shard, b, None, group, strategy, Epilogue(*epilogue))


def _eager_out(a_shard, b, out, group, strategy, *epilogue):
    _, rows = _compute_with_rows(a_shard, b, out, group, strategy, Epilogue(*epilogue))
    mark_written(out)
    return rows


def _fake(a_shard, b, group, strategy, *epilogue):
    problem, rows = _fake_rows(a_shard, b, None, group, strategy, Epilogue(*epilogue))
    return a_shard.new_empty(problem.shape, dtype=problem.out_dtype), rows


def _fake_out(a_shard, b, out, group, strategy, *epilogue):
    return _fake_rows(a_shard, b, out, group, strategy, Epilogue(*epilogue))[1]


def _fake_rows(a, b, out, group, strategy, epilogue: Epilogue) -> tuple[Problem, torch.Tensor]:
    problem = checked_problem(NAME, a, b, ranks_of(group).world_size, out, epilogue)
    note(problem, group, strategy, a.device, _choose_for_rows)
    return problem, a.new_empty(problem.M, problem.K)


def _save_rows(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, b, ctx.group, ctx.strategy, *_ = inputs
    ctx.save_for_backward(output[1], b)


def _gradients_rows(ctx: Any, grad_c: torch.Tensor, grad_rows: torch.Tensor) -> tuple:
    rows, b = ctx.saved_tensors
    grad_a, *others = _gradients_of(ctx, lambda: rows, b, grad_c)
    if grad_a is not None:
        gathered = torch.ops.tileweave.reduce_scatter(grad_rows.contiguous(), ctx.group, "nccl")
        grad_a = grad_a + gathered
    return grad_a, *others


def _gradients_of(
    ctx: Any, gather: Callable[[], torch.Tensor], b: torch.Tensor, grad_c: torch.Tensor
) -> tuple:
    """Return the gradients of the product; ``gather`` returns the rows of all ranks."""
    grad_c = grad_c.contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.tileweave.matmul_reduce_scatter(
            grad_c, b.t(), ctx.group, ctx.strategy, *NO_EPILOGUE
        )
    if ctx.needs_input_grad[1]:
        grad_b = gather().t() @ grad_c
    grad_bias = grad_c.sum(0) if ctx.needs_input_grad[4] else None
    return grad_a, grad_b, None, None, grad_bias, None, None, None


_OPTIONS = f"str group, str strategy, {EPILOGUE_SCHEMA}"
_product_and_rows = define(
    f"{NAME}_rows(Tensor a_shard, Tensor b, {_OPTIONS}) -> (Tensor, Tensor)",
    _eager, _fake, (_save_rows, _gradients_rows), casts=lowers("a_shard", "b", "bias"),
)  # fmt: skip
_rows_and_product = define(
    f"{NAME}_rows_out(Tensor a_shard, Tensor b, Tensor(a!) out, {_OPTIONS}) -> Tensor",
    _eager_out, _fake_out,
)  # fmt: skip
