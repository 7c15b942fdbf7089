"""Attention of a decode step to a paged cache, whose tokens are sharded over ranks.

Contains the choice of an implementation, and the torch operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tvm import tirx

from ...builtins.errors import brief_errors
from ...runtime.host.group import Group
from ..core import nccl
from ..core.agreement import agree
from ..core.autocast import lowers
from ..core.call import Call, CallableOp, Decision, compute
from ..core.checks import require_bools, require_dense
from ..core.compiled import shared_by_sizes, similar_sizes
from ..core.groups import TwoLevels, name_of, ranks_of
from ..core.library import define_pair, refuse_all_gradients
from ..core.noted import note
from ..core.registry import TableRow
from ..core.strategy import FUSED, Strategy, check_requested, first_possible, obstacle_of_ranks
from .kernels.config import INTERLEAVED
from .kernels.decode_attention import decode_attention as program
from .problem import (
    LATENT,
    NAME,
    DecodeProblem,
    Inputs,
    Results,
    check_memory,
    check_options,
    check_result,
    checked_problem,
    require_tensors,
)
from .reference import merged, part_of


class DecodeAttention(CallableOp, op=NAME):
    """Compiled program of one problem."""

    arguments, reads = ("q", "k_cache"), Inputs._fields
    row = TableRow(
        inputs="`q`, (B, heads, D), bf16 or fp16, equal on all ranks; `k_cache` and `v_cache`, "
        "(pages, page_size, kv_heads, D), in the type of `q` or fp8: the tokens of this rank; "
        "`block_table`, (B, P) int32; `seq_lens`, (B,) int32",
        result="`softmax(scale q k^T) v` over the tokens of all ranks, (B, heads, D), in the type "
        "of `q`; with `return_lse` also the logarithms of the sums of exponentials",
        gradient="refused",
        memory="4 x (splits + 4 W) x B x heads x (D + 4) bytes; one split counts as 0, and so does "
        "W of one rank. Latent caches: 528 instead of D + 4",
    )

    @classmethod
    def compiled_programs(cls, problem: DecodeProblem, choice: str) -> list[tirx.PrimFunc]:
        return [cls.program(problem)]

    @classmethod
    def similar_programs(cls, problem: DecodeProblem, choice: str) -> list[tirx.PrimFunc]:
        batch, table = problem.batch, problem.table
        batches, tables = similar_sizes(batch), similar_sizes(table)
        sizes = [
            *((n, table) for n in batches), *((batch, n) for n in tables),
            *zip(batches, reversed(tables), strict=False),
        ]  # fmt: skip
        return [
            cls.program(replace(problem, batch=m, table=n, pages=problem.pages + m * n))
            for m, n in sizes
        ]

    @staticmethod
    def program(problem: DecodeProblem) -> tirx.PrimFunc:
        """Return the tile program."""
        return shared_by_sizes(program(problem.config), problem, batch=0, pages=0, table=0)

    @classmethod
    def decide(cls, call: Call) -> Decision:
        inputs, (*returns_lse, scale, sharding, group, requested) = (
            Inputs(*call.inputs),
            call.options,
        )
        require_tensors(inputs, call.out)
        ranks = ranks_of(group)
        has_lse = returns_lse[0] if call.out is None else results_of(call).lse is not None
        problem = checked_problem(inputs, scale, sharding, has_lse, ranks.world_size)
        if call.out is not None:
            check_result(inputs, problem, call.out)
        strategy = cls.choose(problem, ranks, requested, inputs.q.device)
        check_memory(inputs, call.out)
        return Decision(problem, ranks, strategy)

    @classmethod
    def choose(
        cls, problem: DecodeProblem, ranks: Group | TwoLevels, requested: str, device: torch.device
    ) -> str:
        node = ranks.node if isinstance(ranks, TwoLevels) else ranks
        strategy = first_possible(
            requested, NAME, device, node, FUSED, FUSED,
            lambda _: obstacle_of_ranks(device, ranks) or problem.obstacle(), Strategy,
        ).name  # fmt: skip
        agree(ranks, problem, requested if isinstance(ranks, TwoLevels) else strategy)
        return strategy

    @classmethod
    def check_memory(
        cls, inputs: Sequence[Any], out: torch.Tensor, results: Sequence[torch.Tensor | None]
    ) -> None:
        check_memory(Inputs(*inputs), out)

    @classmethod
    def with_results(cls, call: Call, problem: DecodeProblem) -> Call:
        out, lse = _empty(Inputs(*call.inputs), problem.returns_lse)
        return call._replace(out=out, results=(lse,))

    @classmethod
    def compute_unfused(cls, call: Call, decision: Decision) -> torch.Tensor:
        """Compute the results by torch on each rank, and a collective."""
        problem, ranks, results = decision.problem, decision.group, results_of(call)
        partials = part_of(Inputs(*call.inputs), problem, ranks.rank)[None]
        levels = (ranks.node, ranks.nodes) if isinstance(ranks, TwoLevels) else (ranks,)
        for level in levels:
            partials = nccl.all_gather(partials, level)
        for result, value in zip(results, merged(partials, problem), strict=True):
            if result is not None:
                result.copy_(value)
        return results.out


def results_of(call: Call) -> Results:
    """Return memory for the results of a call."""
    assert call.out is not None and call.results is not None
    return Results(call.out, *call.results)


@brief_errors
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sharding: str = INTERLEAVED,
    group: Any = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    strategy: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query of each sequence to the tokens that all ranks hold.

    Ranks attend to their tokens, and merge results and logarithms in the same kernel. All ranks
    receive the same bits. A sequence without tokens yields zeros, and the logarithm minus infinity.

    Every rank calls it with the same shapes and the same ``q``. The first call with new shapes
    compiles, collectively. Lengths and pages are read on the device: CUDA graphs may be replayed
    with others. There is no gradient. docs/guides/decode.md has the rules.

    Args:
        q: (batch, heads, dim), bf16 or fp16; with ``nccl`` any floating-point type.
        k_cache, v_cache: (pages, page_size, kv_heads, dim) and (pages, page_size, kv_heads, v_dim),
            in the type of q or float8_e4m3fn, contiguous; kv_heads divides heads. Pages hold finite
            numbers, also after the last token. Without v_cache the cache is latent (MLA): dim 576,
            one head, and values are the first 512 columns of keys.
        block_table: (batch, pages of a sequence) int32, pages of each sequence on this rank.
        seq_lens: (batch,) int32, tokens of each sequence; see ``sharding``.
        scale: factor of the products of q and k; None for ``dim ** -0.5``.
        k_scale, v_scale: one positive float32 each, factors of fp8 caches; a latent cache has
            ``k_scale``.
        sharding: tokens of a rank. ``interleaved``: page p of a sequence is on rank p % W, where it
            is page p // W. ``contiguous``: rank r has the tokens from r x C on, if a block table
            has room for C tokens. ``local``: any; ``seq_lens`` counts the tokens on this rank.
        group: see ``all_gather_matmul``.
        out: contiguous tensor for the result, which overlaps no argument.
        return_lse: whether to return the logarithms, too.
        strategy: ``fused``: one kernel; ``nccl``: torch, and ``torch.distributed``; or ``auto``.

    Returns:
        ``out``, (batch, heads, v_dim) in the type of q; or ``(out, lse)``: lse, (batch, heads)
        float32, are the natural logarithms of the sums of exponentials.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    if not isinstance(return_lse, bool):
        require_bools(NAME, return_lse=return_lse)
    inputs = q, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale
    options = scale, sharding, "" if group is None else name_of(group), strategy
    if out is None:
        results = _into_new(*inputs, return_lse, *options)
        return tuple(results) if return_lse else results[0]
    lse = _empty_lse(q) if return_lse else None
    _into_out(*inputs, out, lse, *options)
    return out if lse is None else (out, lse)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    require_dense(NAME, q=q)
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _empty(inputs: Inputs, returns_lse: bool) -> Results:
    """Return memory for the results of a call, which need not be legal."""
    v_dim = LATENT[1] if inputs.v_cache is None else max(inputs.v_cache.shape[-1:], default=1)
    out = inputs.q.new_empty((*inputs.q.shape[:-1], v_dim))
    return Results(out, _empty_lse(inputs.q) if returns_lse else None)


def _computed(inputs, results, options, recorded=None):
    out, *others = (None,) if results is None else results
    return compute(NAME, inputs, out, options, others, recorded=recorded)


def _fake(inputs, results, options):
    *returns_lse, scale, sharding, group, requested = options
    has_lse = returns_lse[0] if results is None else results[1] is not None
    inputs, ranks = Inputs(*inputs), ranks_of(group).world_size
    problem = checked_problem(inputs, scale, sharding, has_lse, ranks)
    note(problem, group, requested, inputs.q.device)
    if results is None:
        return [result for result in _empty(inputs, has_lse) if result is not None]
    return check_result(inputs, problem, results[0])


def _check(inputs, results, options):
    *_, scale, sharding, _, strategy = options
    out = None if results is None else results[0]
    require_tensors(Inputs(*inputs), out)
    check_options(scale, sharding)
    check_requested(strategy, NAME, FUSED, "strategy")
    refuse_all_gradients(NAME, **Inputs(*inputs)._asdict(), out=out)


_into_new, _into_out = define_pair(
    NAME,
    "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? k_scale, Tensor? v_scale",
    "float? scale, str sharding, str group, str strategy", _computed, _fake, _check,
    written="Tensor(a!) out, Tensor(b!)? lse", returns="Tensor[]", new_only="bool return_lse, ",
    casts=lowers("q", "k_cache", "v_cache"),
)  # fmt: skip
