"""All-gather + GEMM: copy engines gather while one kernel multiplies what has arrived; of few rows
the kernel gathers.

The tile programs, the plan around one of them, and the torch operator with its gradient.
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
from ..core.call import call, refuse_gradients
from ..core.epilogue import NOTHING, SCHEMA, Epilogue, accumulate, add_bias, is_fp8, scale, scale_of
from ..core.groups import group_of, name_of
from ..core.library import define
from ..core.operator import Choice, Operator
from ..core.problem import Problem, checked, require_operands
from ..core.tiles import DEVICE, PersistentSchedule, Tiles, blocks_that_push, stored, walked
from .comm_blocks import CommBlocks, send
from .product import define_product

NAME = "all_gather_matmul"
CUTS = (1, 2, 3, 4)
"""Pieces in which the rows of the first peer come. It takes longer until all are there."""
PIECE_BYTES = 2 << 10
"""Of a row in each of them at least: with 1 KiB copy engines take several times as long."""
_LINE = 128
"""Bytes, of which a multiple is stored without a gap."""


def ag_gemm_copy_engine(
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """The kernel: C (ranks, share, N) is the A (share, K) of every rank times B.

    Its own rows are read in A, those of the others in gathered (ranks, share, K). Blocks walk over
    the tiles, see ``PersistentSchedule``.

    Args:
        transposed: whether B is given as (N, K), else (K, N).
        biased: whether bias is a parameter; else there is none.
        out_dtype: of bias and C; else that of A.
    """
    out_dtype = out_dtype or dtype
    # No block needs another one; where none of the SMs stays free, one begins behind the meeting.
    walk = PersistentSchedule.for_tiles(
        ranks * ceil(share / tiles.M) * ceil(N / tiles.N), DEVICE.sm_count
    )

    @T.prim_func
    def ag_gemm_copy_engine(
        A: T.Tensor((share, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        gathered: W.Symmetric((ranks, share, K), dtype),
        C: T.Tensor((ranks, share, N), out_dtype),
    ):
        with T.Kernel(walk.blocks, threads=tiles.threads) as block:
            ag_gemm_tiles(
                A, gathered, B, bias, scale_a, scale_b, C, walk, block, tiles, transposed, biased
            )

    return ag_gemm_copy_engine


@T.macro
def ag_gemm_tiles(
    A, gathered, B, bias, scale_a, scale_b, C, walk, place, tiles, transposed, biased
):
    """Blocks, each with its ``place`` from 0 on, walk over the tiles of C (ranks, share, N): own
    rows, in A, and as they arrive those of others, in ``gathered`` (ranks, share, K or more)."""
    ranks, share, N = C.shape
    K = A.shape[1]
    rows, columns = T.ceildiv(share, tiles.M), T.ceildiv(N, tiles.N)
    A_tile = T.alloc_shared((tiles.M, tiles.K), A.dtype)
    B_tile = T.alloc_shared((tiles.N, tiles.K) if transposed else (tiles.K, tiles.N), A.dtype)
    C_tile = T.alloc_shared((tiles.M, tiles.width), C.dtype)
    total = T.alloc_fragment((tiles.M, tiles.N), "float32")

    me = W.rank()
    for turn in T.serial(walk.waves):
        earlier = turn * walk.blocks
        number = earlier + place
        if number >= earlier and number < walk.tiles:
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
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """The same of few rows by one kernel, whose blocks store own rows at all ranks before they
    multiply: they are there before a copy engine would begin."""
    out_dtype, scaled = out_dtype or dtype, is_fp8(dtype)
    M = ranks * share
    rows, columns = ceil(M / tiles.M), ceil(N / tiles.N)
    # The first blocks push, each a part of own rows, and to one rank if they are enough for all.
    pushing = min(rows * columns, blocks_that_push())
    apart = min(pushing, ranks)
    line = _LINE // tvm.DataType(dtype).itemsize
    width = ceil(K / (pushing // apart) / line) * line
    parts = ceil(K / width)
    at_once = tiles.rows_at_once(_LINE)
    height = ceil(share / at_once) * at_once

    @T.prim_func
    def ag_gemm_push(
        A: T.Tensor((share, K), dtype),
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
                        if i < share:
                            gathered[peer, me * share + i, k] = T.if_then_else(k < K, A[i, k], 0)

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

    # Blocks look once whether all rows are there: to look for each tile takes as long as it does.
    granule = {"tileweave.granule": {"gathered": (M, parts * width)}}
    return split_options(ag_gemm_push, granule)[0]


def communicated_matmul(
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
):  # fmt: skip
    """The same as ``ag_gemm_copy_engine`` by one kernel, some of whose blocks do nothing but store own
    rows at the other ranks, a piece for each of them before the next piece: of few rows, for which
    copies to many ranks take longer to begin than to be made."""
    out_dtype = out_dtype or dtype
    sent = CommBlocks.apart(share, N, K, ranks, tiles, tvm.DataType(dtype).itemsize)
    shared = ranks > 1

    @T.prim_func
    def communicated_matmul(
        A: T.Tensor((share, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        C: T.Tensor((ranks, share, N), out_dtype),
    ):
        with T.Kernel(sent.blocks + sent.walk.blocks, threads=tiles.threads) as block:
            gathered = None
            if shared:
                gathered = W.alloc_symmetric((ranks, share, sent.pieces * sent.width), dtype)
                send(A, gathered, sent, block, ranks)
            ag_gemm_tiles(
                A, gathered, B, bias, scale_a, scale_b, C, sent.walk, sent.behind(block),
                tiles, transposed, biased,
            )  # fmt: skip

    granules = {"gathered": (1, share, sent.width)} if shared else {}
    return split_options(communicated_matmul, {"tileweave.granule": granules})[0]


def all_gather_matmul_plan(
    share: int, N: int, K: int, ranks: int, dtype: str, transposed: bool, tiles: Tiles,
    biased: bool = False, out_dtype: str | None = None,
) -> Plan:  # fmt: skip
    """The plan: every rank's A (share, K) goes to its peers, and each multiplies all by its own B.

    The first peer's rows go in ``tiles.widening`` pieces. Of gathered (ranks, share, K), the own
    rows' place stays as it is."""
    sizes = share, N, K, ranks, dtype, transposed
    out_dtype = out_dtype or dtype
    kernel = ag_gemm_copy_engine(*sizes, tiles, biased, out_dtype)

    @plan
    def all_gather_matmul(
        p: PlanBuilder,
        A: T.Tensor((share, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N,), out_dtype) if biased else None,
        scale_a: scale_of(dtype),
        scale_b: scale_of(dtype),
        gathered: W.Symmetric((ranks, share, K), dtype),
        C: T.Tensor((ranks, share, N), out_dtype),
    ):
        for number, peer in enumerate(p.peers()):
            for k in [slice(0, K)] if number else tiles.widening(K):
                p.copy(gathered[peer, p.rank, :, k], A[:, k], stream="copies")
        p.launch(kernel, A, B, bias, scale_a, scale_b, gathered, C)

    return all_gather_matmul


class AllGatherMatmul(Operator, op=NAME):
    """By copy engines, whose memory is that in which they gather, or by stores of the kernel's
    blocks, of some or of all of them."""

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
        """Those that the last call has gathered; behind a kernel that keeps some to itself,
        gathered again, or ``a``."""
        if self.choice.program != "copy_engines":
            return nccl.all_gather(a, group)
        gathered = self.memory[0].local.clone()
        gathered[group.rank] = a
        return gathered.view(self.problem.M, self.problem.K)

    @staticmethod
    def unfused(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, group: Group, epilogue: Epilogue
    ) -> torch.Tensor:
        """Returns the gathered rows."""
        gathered = nccl.all_gather(a, group)
        epilogue.multiply(gathered, b, out=c)
        return gathered

    @staticmethod
    def estimates(problem: Problem) -> dict[Choice, float]:
        share, N, ranks = problem.shards
        row = problem.K * problem.itemsize
        return {
            Choice("copy_engines", tiles): estimate_ag_gemm_copy_engine_us(
                share, N, problem.K, ranks, tiles, problem.itemsize
            )
            for each in walked(problem.itemsize)
            for tiles in (replace(each, num_chunks=cut) for cut in CUTS)
            if tiles.num_chunks == 1 or row >> tiles.num_chunks - 1 >= PIECE_BYTES
        } | {
            Choice("communicating_blocks", tiles): estimate_ag_gemm_comm_blocks_us(
                share, N, problem.K, ranks, tiles, problem.itemsize
            )
            for tiles in walked(problem.itemsize)
        } | {
            Choice("stores", tiles): estimate_ag_gemm_push_us(
                share, N, problem.K, ranks, tiles, problem.itemsize
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
    """The rows of all ranks times ``b``: what arrives is multiplied while the rest is on its way.

    Every rank calls it with the same shapes; the first call with new ones compiles, collectively.

    Args:
        a_shard: (M / ranks, K), this rank's rows.
        b: (K, N), each rank its own; row-major, or the transpose of a row-major (N, K).
        group: None for the group of ``tw.init``, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis.
        bias: (N,), added to every row in fp32; each rank its own, as ``b``.
        scale_a, scale_b: one float32 on the device, for fp8 operands, as for
            ``torch._scaled_mm``. ``scale_a`` is that of all rows, the same on every rank.
        out_dtype: of the result, bfloat16 or float16 for fp8 operands; None is bfloat16 for these,
            else the type of the operands.
        out: (M, N), contiguous; gets the result. Not differentiable.
        return_gathered: whether the rows of all ranks, (M, K), are returned, too.
        strategy: ``fused``, ``nccl`` (``torch.distributed`` and ``torch.mm``), or ``auto``: the
            faster one, measured by ``tw.tune`` or foretold, if it can be fused; ``strategy_of``.

    Returns:
        (M, N), in the type of ``a_shard``; with ``return_gathered`` that and the rows.

    Raises:
        TileWeaveError: arguments that do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    epilogue = Epilogue(bias, scale_a, scale_b, out_dtype)
    if not return_gathered:
        return _product(a_shard, b, group, out, strategy, epilogue)
    require_operands(NAME, a_shard, b, out, epilogue)
    refuse_gradients(NAME, out, a_shard, b, *epilogue.tensors)
    given = name_of(group), strategy, *epilogue
    if out is None:
        return _product_and_rows(a_shard, b, *given)
    return out, _rows_and_product(a_shard, b, out, *given)


def _computed(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result, in ``out`` if given, and the gathered rows in memory of their own."""
    made = call(NAME, a, b, out, group, asked, epilogue)
    choice = made.choice
    if asked == "auto" and choice and choice.program != "copy_engines":
        choice = _keeping_rows(made.problem)
    if choice:
        operator = made.operator(choice)
        a, b, *rest = made.operands
        operator(a, b, made.c, *rest)
        rows = operator.rows(a, made.group)
    else:
        a = made.a
        rows = AllGatherMatmul.unfused(a, made.b, made.c, made.group, made.epilogue)
    return made.c, rows.clone() if rows is a else rows


def _keeping_rows(problem: Problem) -> Choice | None:
    """The fastest that gathers rows where they can be seen, where the fastest of all does not; None
    if NCCL, which would gather them, too, is foretold to be faster."""
    options = AllGatherMatmul.options(problem).items()
    found = {choice: us for choice, us in options if choice.program == "copy_engines"}
    _, unfused = AllGatherMatmul.predicted(problem)
    best = min(found, key=lambda choice: found[choice])
    return best if found[best] <= unfused else None


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
    """The rows are gathered again, which is cheaper than to keep them."""
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
    """Through the product alone."""
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
