"""Attention over a sharded sequence: copy engines transfer the keys of all ranks while one kernel
attends to those that have arrived.

This module holds the plan around the kernel, and the torch operator with its gradient. In the plan,
one stream copies while one kernel computes, here on rank 1 of 4::

    copies | K, V to 2 | K, V to 3 | K, V to 0 |
    kernel | own keys  | keys of 0 | keys of 3 | keys of 2 |
           |           ^           ^           ^  each tile of queries waits for an owner's keys
    peers  |  0 to 1   | 3 to 1    | 2 to 1    |  write to ``all_K`` and ``all_V`` of rank 1

Causal attention skips the copies that no query of the peer sees.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from typing import Any

import tilelang.language as T
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ...runtime.host.session import Session
from ...runtime.kernel.kernel import capturing
from ..core.across_nodes import Mesh
from ..core.agreement import agree
from ..core.autocast import lowers
from ..core.checks import as_kernel_operand, require_bools, require_dense, require_dense_or_none
from ..core.compiled import ProblemOp, op_cache_of, shared_by_sizes, similar_sizes
from ..core.groups import TwoLevels, name_of, ranks_of
from ..core.library import define
from ..core.noted import note
from ..core.registry import TableRow
from ..core.strategy import FUSED, Strategy, first_possible, obstacle_of_ranks
from .across_nodes import attend_across, require_supported
from .backward import NAME as BACKWARD
from .flash import (
    FlashTiles,
    PackedTile,
    key_chunk,
    keys_shape,
    max_tiles,
    packed_tiles,
    queries_shape,
    tiles_for,
)
from .kernels.flash_attention import FAST_MATH, flash_attention
from .problem import OP, AttentionProblem, checked_attention, checked_maxima, obstacle
from .reference import attend_gathered


def rows_for(problem: AttentionProblem, tiles: FlashTiles, peer: int, owner: int) -> int:
    """Return how many of the owner's keys a peer loads: all tiles that its last query sees."""
    if not problem.causal or problem.packed:
        return problem.k_rows
    sharding = problem.sharding
    last = sharding.position(problem.q_rows - 1, peer, problem.q_total)
    limit = last + 1 + problem.k_total - problem.q_total
    chunk = key_chunk(problem)
    num_chunks, remainder = divmod(sharding.visible(limit, owner, problem.k_total), chunk)
    parts = [chunk] * num_chunks + [remainder]
    ends = (part * chunk + ceil(rows / tiles.N) * tiles.N for part, rows in enumerate(parts))
    return min(max(ends), problem.k_rows)


def sp_attention_plan(problem: AttentionProblem, tiles: FlashTiles) -> Plan:
    """Build the plan: each rank copies its K and V (batch, rows, heads * dim) to all ranks that see
    some of them, and attends with its own Q."""
    dtype, heads, ranks, packed = problem.tile_dtype, problem.heads, problem.ranks, problem.packed
    queries, keys = queries_shape(problem), keys_shape(problem)
    batch, *q_rows = queries
    k_width, v_width = problem.kv_heads * problem.dim, problem.kv_heads * problem.v_dim
    work_shape = max_tiles(problem, tiles), len(PackedTile._fields)
    kernel = flash_attention(problem, tiles)

    @plan(pass_configs=FAST_MATH)
    def sp_attention(
        p: PlanBuilder,
        Q: T.Tensor((*queries, heads, problem.dim), dtype),
        work: T.Tensor(work_shape, "int32") if packed else None,
        K: T.Tensor((*keys, k_width), dtype),
        V: T.Tensor((*keys, v_width), dtype),
        all_K: W.Symmetric((ranks, *keys, k_width), dtype),
        all_V: W.Symmetric((ranks, *keys, v_width), dtype),
        Out: T.Tensor((*queries, heads, problem.v_dim), dtype),
        LSE: T.Tensor((batch, heads, *q_rows), "float32"),
    ):
        for peer in p.peers():
            num_keys = rows_for(problem, tiles, peer, p.rank)
            for b in range(batch if num_keys else 0):
                p.copy(all_K[peer, p.rank, b, 0:num_keys], K[b, 0:num_keys], stream="copies")
                p.copy(all_V[peer, p.rank, b, 0:num_keys], V[b, 0:num_keys], stream="copies")
        num_keys = rows_for(problem, tiles, p.rank, p.rank)
        for b in range(batch):
            p.copy(all_K[p.rank, p.rank, b, 0:num_keys], K[b, 0:num_keys])
            p.copy(all_V[p.rank, p.rank, b, 0:num_keys], V[b, 0:num_keys])
        p.launch(kernel, Q, work, all_K, all_V, Out, LSE)

    return sp_attention


class SpAttention(ProblemOp, op=OP):
    """Compiled plan of one problem; its symmetric memory holds the gathered keys and values."""

    arguments = ("q", "k", "v")
    row = TableRow(
        inputs="the rank's rows of `q`, `k`, `v`, [batched or packed](#layouts-and-shapes)",
        result="the rank's rows of attention to the keys of all ranks; with `return_lse` also the "
        "log-sum-exps",
    )

    def __init__(self, problem: AttentionProblem, tiles: FlashTiles, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective."""
        super().__init__(problem, tiles, session)
        self.problem, self.tiles = problem, tiles
        self._work: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each cu_seqlens_q and cu_seqlens_k: their versions, copies of both, and the tiles of
        queries."""

    @classmethod
    def choose(
        cls, problem: AttentionProblem, ranks: Group | TwoLevels, requested: str,
        device: torch.device,
    ) -> FlashTiles | str:  # fmt: skip
        strategy = cls.strategy(problem, ranks, requested, device).name
        agree(ranks, problem, strategy)
        return strategy if strategy == "nccl" else tiles_for(problem)

    @staticmethod
    def strategy(
        problem: AttentionProblem, ranks: Group | TwoLevels, requested: str, device: torch.device
    ) -> Strategy:
        """Return the strategy of a call, with the reason; the arguments are those of ``choose``."""
        node = ranks.node if isinstance(ranks, TwoLevels) else ranks
        return first_possible(
            requested, problem.op, device, node, FUSED, FUSED,
            lambda _: obstacle_of_ranks(device, node, uses_wgmma=True) or obstacle(problem),
            Strategy,
        )  # fmt: skip

    @classmethod
    def compiled_programs(cls, problem: AttentionProblem, choice: FlashTiles) -> list[Plan]:
        steps = sp_attention_plan(problem, choice)
        return [shared_by_sizes(steps, problem, batch=0, q_rows=0, k_rows=0)]

    @classmethod
    def similar_programs(cls, problem: AttentionProblem, choice: FlashTiles) -> list[Plan]:
        parts = problem.sharding.parts
        rows = zip(
            similar_sizes(problem.q_rows, parts), similar_sizes(problem.k_rows, parts), strict=False
        )
        return [
            program
            for (q_rows, k_rows), batch in product(rows, (problem.batch, problem.batch + 1))
            for program in cls.compiled_programs(
                replace(problem, batch=batch, q_rows=q_rows, k_rows=k_rows), choice
            )
        ]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, rank: int, *cu_seqlens: torch.Tensor,
    ) -> None:  # fmt: skip
        """Compute ``out`` and ``lse``. Every rank calls it.

        Args:
            cu_seqlens: offsets of q and k, if sequences are packed.
        """
        queries, keys = queries_shape(self.problem), keys_shape(self.problem)
        batch, *q_rows = queries
        q, out = (x.view(*queries, *x.shape[-2:]) for x in (q, out))
        k, v = (x.view(*keys, -1) for x in (k, v))
        work = [self._cached_tiles(rank, *cu_seqlens)] if self.problem.packed else []
        self.run(q, *work, k, v, *self.memory, out, lse.view(batch, -1, *q_rows))

    def _cached_tiles(self, rank: int, cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
        """Return ``packed_tiles``, computed again if offsets have changed; in a graph, in each
        replay.

        Torch counts changes of a tensor. The GPU asserts that there are no others.
        """
        arguments = self.problem, self.tiles, rank, cu_q, cu_k
        if capturing() or cu_q.is_inference() or cu_k.is_inference():
            return packed_tiles(*arguments)
        versions = cu_q._version, cu_k._version
        by_k: Any = self._work.setdefault(cu_q, WeakTensorKeyDictionary())
        if cu_k not in by_k or by_k[cu_k][0] != versions:
            by_k[cu_k] = versions, torch.cat([cu_q, cu_k]), packed_tiles(*arguments)
            return by_k[cu_k][2]
        _, offsets, tiles = by_k[cu_k]
        torch._assert_async(
            (offsets == torch.cat([cu_q, cu_k])).all(),
            f"{OP}: cu_seqlens were changed by what torch does not count, such as "
            "torch.distributed; expected new tensors, or torch.autograd.graph.increment_version",
        )
        return tiles


@brief_errors
def sp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    layout: str = "contiguous",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    group: Any = None,
    return_lse: bool = False,
    strategy: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend over a sharded sequence: a rank attends with its own queries to the keys of all ranks
    while these arrive.

    Every rank calls it with the same shapes. The first call with new shapes compiles, collectively.
    W is the number of ranks.

    Args:
        q: (B, Sq / W, Hq, D); packed, (Sq / W, Hq, D).
        k: (B, Sk / W, Hkv, D) or (Sk / W, Hkv, D); Hkv divides Hq.
        v: (B, Sk / W, Hkv, Dv) or (Sk / W, Hkv, Dv).
        causal: whether a query sees only the keys up to its own position, counted from the ends of
            both sequences: the query at p of Sq sees Sk - Sq + p + 1 keys.
        layout: ``contiguous``: a rank holds one chunk of each sequence; ``zigzag``: one from the
            front and its mirror from the back, so that causal attention is the same work for all
            ranks. ``shard_sequence`` returns such rows.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, the offsets of packed whole sequences.
        max_seqlen_q, max_seqlen_k: rows of the longest whole sequence; with them the host need not
            read ``cu_seqlens_*``.
        softmax_scale: factor of the products; None for 1 / sqrt(D).
        group: see ``all_gather_matmul``. On several nodes sequences must not be packed, and a
            causal mask needs as many keys as queries.
        return_lse: whether the logarithms of the sums of exponentials are returned too.
        strategy: ``fused``, ``nccl`` (``torch.distributed``, and plain torch in fp32), or ``auto``:
            fused if possible.

    Returns:
        (B, Sq / W, Hq, Dv) or (Sq / W, Hq, Dv), in the type of q. With ``return_lse`` a pair of it
        and (B, Hq, Sq / W) or (Hq, Sq / W) in fp32, which has no gradient.

    Raises:
        TileWeaveError: arguments are invalid or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    require_bools(OP, causal=causal, return_lse=return_lse)
    require_dense(OP, q=q, k=k, v=v)
    require_dense_or_none(OP, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    out, lse = _attend(
        q, k, v, causal, layout, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, name_of(group), strategy,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _problem(q, k, v, causal, layout, cu_q, cu_k, max_q, max_k, scale, group) -> AttentionProblem:
    return checked_attention(
        q, k, v, ranks_of(group).world_size, causal=causal, layout=layout, cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, softmax_scale=scale,
    )  # fmt: skip


def _eager(q, k, v, causal, layout, cu_q, cu_k, max_q, max_k, scale, group, strategy):
    options = causal, layout, cu_q, cu_k, max_q, max_k, scale, group
    problem, ranks = _problem(q, k, v, *options), ranks_of(group)
    if isinstance(ranks, TwoLevels):
        require_supported(problem)
    choice = SpAttention.choose(problem, ranks, strategy, q.device)
    if isinstance(ranks, TwoLevels):
        name = "nccl" if choice == "nccl" else "fused"
        attend = partial(_attend_in_node, problem, ranks.node_name, name)
        with Mesh.of(OP, ranks, q.device) as mesh:
            out, lse = attend_across(attend, problem, q, k, v, mesh)
        return out.to(q.dtype), lse
    if choice == "nccl":
        return attend_gathered(problem, q, k, v, cu_q, cu_k, max_q, max_k, group)
    checked_maxima(problem, cu_q, cu_k, max_q, max_k)
    q, k, v = (as_kernel_operand(OP, operand, x) for operand, x in (("q", q), ("k", k), ("v", v)))
    out, lse = _empty(problem, q)
    packing = (cu_q, cu_k) if problem.packed else ()
    operator = op_cache_of(ranks).operator(problem, choice, SpAttention)
    operator(q, k, v, out, lse, ranks.rank, *packing)
    return out, lse


def _attend_in_node(
    problem: AttentionProblem, node: str, strategy: str, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend to the keys of the ranks of a node.

    Args:
        node: name of the node's group.
    """
    layout = problem.layout if causal else "contiguous"
    packing = None, None, None, None
    return _eager(q, k, v, causal, layout, *packing, problem.scale, node, strategy)


def _fake(q, k, v, *options):
    *others, group, requested = options
    problem = _problem(q, k, v, *others, group)
    note(problem, group, requested, q.device)
    return _empty(problem, q)


def _empty(problem: AttentionProblem, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the results of a call."""
    return q.new_empty(problem.shape), q.new_empty(problem.lse_shape, dtype=problem.wide_dtype)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.causal, ctx.layout, cu_q, cu_k, _, _, ctx.scale, ctx.group, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: torch.Tensor, _: torch.Tensor) -> tuple:
    gradients = getattr(torch.ops.tileweave, BACKWARD)(
        grad_out.contiguous(), *ctx.saved_tensors, ctx.causal, ctx.layout, ctx.scale, ctx.group,
        "auto",
    )  # fmt: skip
    return *gradients, *(None for _ in range(9))


_attend = define(
    f"{OP}(Tensor q, Tensor k, Tensor v, bool causal, str layout, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, int? max_seqlen_q, int? max_seqlen_k, float? softmax_scale, str group, "
    "str strategy) -> (Tensor, Tensor)",
    _eager, _fake, (_save, _gradients), casts=lowers("q", "k", "v"),
)  # fmt: skip
