"""All-gather + GEMM: copy engines gather rows while a kernel multiplies those that have arrived.

If there are few rows, blocks of the kernel gather them. This module holds the tile programs, the
plan around one of them, and the torch operator with its gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

import tilelang.language as T
import torch
from tilelang import tvm

from ...builtins import language as W
from ...passes import split_options
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ..autotune.cost_model import (
    estimate_ag_gemm_comm_blocks_us,
    estimate_ag_gemm_copy_engine_us,
    estimate_ag_gemm_push_us,
)
from ..core import nccl
from ..core.call import call
from ..core.epilogue import NOTHING, SCHEMA, Epilogue, accumulate, add_bias, is_fp8, scale, scale_of
from ..core.groups import group_of, name_of
from ..core.library import define, define_product, refuse_gradients
from ..core.operator import Choice, Operator
from ..core.problem import Problem, checked, require_operands
from ..core.tiles import (
    DEVICE,
    PersistentSchedule,
    Tiles,
    blocks_that_push,
    persistent_tiles,
    stored,
)
from .comm_blocks import CommBlocks, send

NAME = "all_gather_matmul"
NUM_CHUNKS = (1, 2, 3, 4)
"""Chunks in which the first peer's rows arrive. With more chunks, the last one arrives later."""
CHUNK_BYTES = 2 << 10
"""Least bytes of a row in each chunk: with 1 KiB, copy engines need several times as long."""
_LINE = 128
"""Bytes: a block pushes a multiple of this of each row, so that it is stored without gaps."""


def ag_gemm_copy_engine(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """Build the kernel: C (ranks, rows_per_rank, N) is the A (rows_per_rank, K) of every rank
    times B.

    The kernel reads the own rows in A and the rows of other ranks in gathered (ranks,
    rows_per_rank, K). Blocks are persistent, see ``PersistentSchedule``.

    Args:
        transposed: whether B has the shape (N, K); else (K, N).
        biased: whether the kernel has a parameter bias.
        out_dtype: type of bias and C; None for the type of A.
    """
    out_dtype = out_dtype or dtype
    # No block needs another one, so all SMs may run blocks, although one of these may start later.
    schedule = PersistentSchedule.for_tiles(
        ranks * ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N), DEVICE.sm_count
    )

    @T.prim_func
    def ag_gemm_copy_engine(
        A: T.Tensor((rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        gathered: W.Symmetric((ranks, rows_per_rank, K), dtype),
        C: T.Tensor((ranks, rows_per_rank, N), out_dtype),
    ):
        with T.Kernel(schedule.blocks, threads=tiles.threads) as block:
            ag_gemm_tiles(
                A,
                gathered,
                B,
                bias,
                scale_a,
                scale_b,
                C,
                schedule,
                block,
                tiles,
                transposed,
                biased,
            )

    return ag_gemm_copy_engine


@T.macro
def ag_gemm_tiles(
    A, gathered, B, bias, scale_a, scale_b, C, schedule, place, tiles, transposed, biased
):
    """Compute the tiles of C (ranks, rows_per_rank, N) with persistent blocks.

    The own rows are in A. The rows of other ranks arrive in ``gathered`` (ranks, rows_per_rank, K
    or more); tiles are computed in the order of arrival.

    Args:
        place: index of this block in ``schedule``; a block with a negative one computes nothing.
    """
    ranks, rows_per_rank, N = C.shape
    K = A.shape[1]
    rows, columns = T.ceildiv(rows_per_rank, tiles.M), T.ceildiv(N, tiles.N)
    A_tile = T.alloc_shared((tiles.M, tiles.K), A.dtype)
    B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), A.dtype)
    C_tile = T.alloc_shared((tiles.M, tiles.width), C.dtype)
    total = T.alloc_fragment((tiles.M, tiles.N), "float32")

    me = W.rank()
    for turn in T.serial(schedule.waves):
        earlier = turn * schedule.blocks
        number = earlier + place
        if number >= earlier and number < schedule.tiles:
            source = (me + ranks - number // (rows * columns)) % ranks
            row, column = W.swizzle_2d(number % (rows * columns), rows, columns, tiles.group_m)
            m, n = row * tiles.M, column * tiles.N

            T.clear(total)
            for step in T.Pipelined(T.ceildiv(K, tiles.K), num_stages=tiles.stages):
                k = step * tiles.K
                if ranks == 1 or source == me:
                    T.copy(A[m, k], A_tile)
                else:
                    T.copy(gathered[me, source, m, k], A_tile)
                T.copy(B[n, k] if transposed else B[k, n], B_tile)
                accumulate(A_tile, B_tile, total, transposed)
            if is_fp8(str(A.dtype)):
                scale(total, scale_a, scale_b)
            if biased:
                add_bias(total, bias, n)
            for first in T.unroll(0, tiles.N, tiles.width):
                T.copy(total[:, first : first + tiles.width], C_tile)
                T.copy(C_tile, C[source, m, n + first])


def ag_gemm_push(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """Build the kernel for few rows: blocks store the own rows at all ranks, then multiply.

    The stores arrive before a copy engine would start. The arguments are those of
    ``ag_gemm_copy_engine``.
    """
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    M = ranks * rows_per_rank
    rows, columns = ceil(M / tiles.M), ceil(N / tiles.N)
    # The first blocks push. Each pushes some columns of the own rows, to one rank if there are at
    # least as many blocks as ranks.
    pushing = min(rows * columns, blocks_that_push())
    apart = min(pushing, ranks)
    line = _LINE // tvm.DataType(dtype).itemsize
    width = ceil(K / (pushing // apart) / line) * line
    parts = ceil(K / width)
    at_once = tiles.rows_at_once(_LINE)
    height = ceil(rows_per_rank / at_once) * at_once

    @T.prim_func
    def ag_gemm_push(
        A: T.Tensor((rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((M, N), out_dtype),
    ):
        with T.Kernel(rows, columns, threads=tiles.threads) as (row, column):
            gathered = W.alloc_symmetric((M, parts * width), dtype)
            A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), dtype)
            C_tile = T.alloc_shared((tiles.M, tiles.N), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")

            me = W.rank()
            block = column * rows + row
            first, part = block % apart, block // apart
            if part < parts:
                for turn in T.serial(T.ceildiv(ranks - first, apart)):
                    peer = (me + 1 + first + turn * apart) % ranks
                    for i, j in T.Parallel(height, width):
                        k = part * width + j
                        if i < rows_per_rank:
                            gathered[peer, me * rows_per_rank + i, k] = T.if_then_else(
                                k < K, A[i, k], 0
                            )

            m, n = row * tiles.M, column * tiles.N
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(K, tiles.K), num_stages=tiles.stages):
                k = step * tiles.K
                T.copy(gathered[me, m, k], A_tile)
                T.copy(B[n, k] if transposed else B[k, n], B_tile)
                accumulate(A_tile, B_tile, total, transposed)
            if scaled:
                scale(total, scale_a, scale_b)
            if biased:
                add_bias(total, bias, n)
            T.copy(total, C_tile)
            T.copy(C_tile, C[m, n])

    # One granule for all rows: a check for each tile would cost as much time as the tile itself.
    granule = {"tileweave.granule": {"gathered": (M, parts * width)}}
    return split_options(ag_gemm_push, granule)[0]


def communicated_matmul(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """Build a kernel of which some blocks only store the own rows at other ranks.

    They store one piece of the rows at all ranks before they store the next piece. The other blocks
    multiply as in ``ag_gemm_copy_engine``, whose arguments are the same. This program is for few
    rows and many ranks, where copies need more time to start than to transfer.
    """
    out_dtype = out_dtype or dtype
    sent = CommBlocks.dedicated(rows_per_rank, N, K, ranks, tiles, tvm.DataType(dtype).itemsize)
    shared = ranks > 1

    @T.prim_func
    def communicated_matmul(
        A: T.Tensor((rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((ranks, rows_per_rank, N), out_dtype),
    ):
        with T.Kernel(sent.blocks + sent.schedule.blocks, threads=tiles.threads) as block:
            gathered = None
            if shared:
                gathered = W.alloc_symmetric(
                    (ranks, rows_per_rank, sent.pieces * sent.width), dtype
                )
                send(A, gathered, sent, block, ranks)
            ag_gemm_tiles(
                A, gathered, B, bias, scale_a, scale_b, C, sent.schedule,
                sent.schedule_index(block), tiles, transposed, biased,
            )  # fmt: skip

    granules = {"gathered": (1, rows_per_rank, sent.width)} if shared else {}
    return split_options(communicated_matmul, {"tileweave.granule": granules})[0]


def all_gather_matmul_plan(
    rows_per_rank: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
) -> Plan:  # fmt: skip
    """Build the plan: each rank copies its A (rows_per_rank, K) to its peers and multiplies the
    rows of all ranks by its own B.

    Rows for the first peer are copied in the chunks of ``tiles.widening``. No rank writes its own
    rows to gathered (ranks, rows_per_rank, K).
    """
    sizes = rows_per_rank, N, K, ranks, dtype, transposed
    out_dtype = out_dtype or dtype
    kernel = ag_gemm_copy_engine(*sizes, tiles, biased, out_dtype)

    @plan
    def all_gather_matmul(
        p: PlanBuilder,
        A: T.Tensor((rows_per_rank, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        gathered: W.Symmetric((ranks, rows_per_rank, K), dtype),
        C: T.Tensor((ranks, rows_per_rank, N), out_dtype),
    ):
        for number, peer in enumerate(p.peers()):
            for k in [slice(0, K)] if number else tiles.widening(K):
                p.copy(gathered[peer, p.rank, :, k], A[:, k], stream="copies")
        p.launch(kernel, A, B, bias, scale_a, scale_b, gathered, C)

    return all_gather_matmul


class AllGatherMatmul(Operator, op=NAME):
    """All-gather + GEMM: rows are gathered by copy engines, by some blocks of the kernel or by all.

    The symmetric memory of ``copy_engines`` holds the gathered rows.
    """

    programs: ClassVar = {
        "copy_engines": all_gather_matmul_plan,
        "communicating_blocks": communicated_matmul,
        "stores": ag_gemm_push,
    }

    def declared(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *epilogue: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        if self.choice.program != "stores":  # no tile crosses the rows of a rank
            c = c.view(self.problem.ranks, self.problem.rows_per_rank, self.problem.N)
        return super().declared(a, b, c, *epilogue)

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
            for tiles in stored(problem.itemsize)
        }  # fmt: skip


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
        group: None for the group of ``tw.init``, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis.
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
    epilogue = Epilogue(bias, scale_a, scale_b, out_dtype)
    if not return_gathered:
        return _product(a_shard, b, group, out, strategy, epilogue)
    require_operands(NAME, a_shard, b, out, epilogue)
    refuse_gradients(NAME, out, a_shard, b, *epilogue.tensors)
    options = name_of(group), strategy, *epilogue
    if out is None:
        return _product_and_rows(a_shard, b, *options)
    return out, _rows_and_product(a_shard, b, out, *options)


def _computed(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the result, which is ``out`` if given, and a copy of the gathered rows."""
    request = call(NAME, a, b, out, group, asked, epilogue)
    choice = request.choice
    if asked == "auto" and choice and choice.program != "copy_engines":
        choice = _choice_keeping_rows(request.problem)
    if choice:
        operator = request.operator(choice)
        a, b, *rest = request.operands
        operator(a, b, request.c, *rest)
        rows = operator.rows(a, request.group)
    else:
        a = request.a
        rows = AllGatherMatmul.unfused(a, request.b, request.c, request.group, request.epilogue)
    return request.c, rows.clone() if rows is a else rows


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
    return _computed(a_shard, b, None, group, strategy, Epilogue(*epilogue))


def _eager_out(a_shard, b, out, group, strategy, *epilogue):
    return _computed(a_shard, b, out, group, strategy, Epilogue(*epilogue))[1]


def _fake(a_shard, b, group, strategy, *epilogue):
    ranks = group_of(group).world_size
    problem = checked(NAME, a_shard, b, ranks, None, Epilogue(*epilogue))
    return a_shard.new_empty(problem.shape, dtype=problem.out_dtype), _fake_rows(a_shard, problem)


def _fake_out(a_shard, b, out, group, strategy, *epilogue):
    ranks = group_of(group).world_size
    return _fake_rows(a_shard, checked(NAME, a_shard, b, ranks, out, Epilogue(*epilogue)))


def _fake_rows(a: torch.Tensor, problem: Problem) -> torch.Tensor:
    return a.new_empty(problem.M, problem.K)


def _gradients(ctx: Any, grad_c: torch.Tensor) -> tuple:
    """Gather the rows again, which is cheaper than keeping them, and return the gradients."""
    a, b = ctx.saved_tensors

    def gather() -> torch.Tensor:
        return torch.ops.tileweave.all_gather(a.contiguous(), ctx.group, "nccl")

    return _gradients_of(ctx, gather, b, grad_c)


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
            grad_c, b.t(), ctx.group, ctx.strategy, *NOTHING
        )
    if ctx.needs_input_grad[1]:
        grad_b = gather().t() @ grad_c
    grad_bias = grad_c.sum(0) if ctx.needs_input_grad[4] else None
    return grad_a, grad_b, None, None, grad_bias, None, None, None


_product = define_product(NAME, _gradients)
_OPTIONS = f"str group, str strategy, {SCHEMA}"
_product_and_rows = define(
    f"{NAME}_rows(Tensor a_shard, Tensor b, {_OPTIONS}) -> (Tensor, Tensor)",
    _eager, _fake, (_save_rows, _gradients_rows),
)  # fmt: skip
_rows_and_product = define(
    f"{NAME}_rows_out(Tensor a_shard, Tensor b, Tensor(a!) out, {_OPTIONS}) -> Tensor",
    _eager_out, _fake_out,
)  # fmt: skip
