"""Attention of a decode step to a paged cache, whose tokens are sharded over ranks.

Contains the choice of an implementation, and the torch operator.
"""

from __future__ import annotations

from typing import Any

import torch
from tvm import tirx

from ...runtime.executor.recorded_calls import recorded_calls
from ...runtime.host.session import Session
from ...runtime.plans.parameters import parameters_of
from ..collectives.transport import check_requested, first_possible
from ..collectives.vectors import as_declared
from ..core import nccl
from ..core.autocast import lowers
from ..core.call import Decision, run_and_record, signature
from ..core.compiled import CompiledOp
from ..core.groups import TwoLevels, name_of, ranks_of
from ..core.library import define, refuse_all_gradients
from ..core.problem import agree, require_bools
from ..core.registry import RegisteredOp, TableRow
from ..core.strategy import obstacle_of_ranks
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

FUSED = "fused"


class DecodeAttention(CompiledOp, RegisteredOp, op=NAME):
    """Compiled program of one problem."""

    arguments = ("q", "k_cache")
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

    def __init__(self, problem: DecodeProblem, strategy: str, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective."""
        steps = self.program(problem)
        super().__init__(steps, session)
        *self._inputs, self._out = parameters_of(steps)

    @staticmethod
    def program(problem: DecodeProblem) -> tirx.PrimFunc:
        """Return the tile program."""
        return program(problem.config)

    def declared(self, inputs: Inputs, results: Results) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the arguments of ``enqueue``."""
        given = [t for t in (*inputs, results.lse) if t is not None]
        tensors = [as_declared(t, p) for t, p in zip(given, self._inputs, strict=True)]
        return tensors, as_declared(results.out, self._out)


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
    require_bools(NAME, return_lse=return_lse)
    inputs = Inputs(q, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale)
    require_tensors(inputs, out)
    if scale is None:
        scale = max((1, *q.shape[-1:])) ** -0.5
    options = scale, sharding, "" if group is None else name_of(group), strategy
    if out is None:
        results = Results(*_into_new(*inputs, return_lse, *options))
    else:
        results = Results(out, _empty_lse(q) if return_lse else None)
        _into_out(*inputs, *results, *options)
    return results.out if results.lse is None else (results.out, results.lse)


def _compute(
    inputs: Inputs, results: Results, is_new: bool, scale: float, sharding: str, group: str,
    requested: str,
) -> None:  # fmt: skip
    """Compute the results. Collective for each new problem.

    Args:
        is_new: whether the results have memory of their own.
    """
    tensors = *inputs, results.lse
    key, addresses = signature((NAME, scale, sharding, group, requested), tensors, results.out)
    decision = recorded_calls().get(key)
    if decision is None:
        decision = _decide(inputs, results, scale, sharding, group, requested)
        check_memory(inputs, None if is_new else results.out)
    elif not is_new:
        check_memory(inputs, results.out)
    if decision.fast_path is not None and decision.fast_path(addresses, results.out) is not None:
        return
    if decision.choice == "nccl":
        _by_torch(decision, inputs, results)
        return
    run_and_record(key, decision, DecodeAttention, inputs, results, tensors)


def _decide(
    inputs: Inputs, results: Results, scale: float, sharding: str, group: str, requested: str
) -> Decision:
    """Check a call and choose its strategy. Collective for each new problem."""
    ranks = ranks_of(group)
    problem = checked_problem(inputs, scale, sharding, results.lse is not None, ranks.world_size)
    check_result(inputs, problem, results.out)
    node = ranks.node if isinstance(ranks, TwoLevels) else ranks
    strategy = first_possible(
        requested, NAME, inputs.q.device, node, (FUSED,), (FUSED,),
        lambda _: obstacle_of_ranks(inputs.q.device, ranks) or problem.obstacle(), "strategy",
    ).name  # fmt: skip
    agree(ranks, problem, requested if isinstance(ranks, TwoLevels) else strategy)
    return Decision(problem, ranks, strategy)


def _by_torch(decision: Decision, inputs: Inputs, results: Results) -> None:
    """Compute the results by torch on each rank, and a collective."""
    problem, ranks = decision.problem, decision.group
    parts = part_of(inputs, problem, ranks.rank)[None]
    levels = (ranks.node, ranks.nodes) if isinstance(ranks, TwoLevels) else (ranks,)
    for level in levels:
        parts = nccl.all_gather(parts, level)
    for result, value in zip(results, merged(parts, problem), strict=True):
        if result is not None:
            result.copy_(value)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _empty(inputs: Inputs, returns_lse: bool) -> Results:
    """Return memory for the results of a call, which need not be legal."""
    v_dim = LATENT[1] if inputs.v_cache is None else max(inputs.v_cache.shape[-1:], default=1)
    out = inputs.q.new_empty((*inputs.q.shape[:-1], v_dim))
    return Results(out, _empty_lse(inputs.q) if returns_lse else None)


def _eager(q, k, v, table, lens, k_scale, v_scale, returns_lse, *options):
    inputs = Inputs(q, k, v, table, lens, k_scale, v_scale)
    results = _empty(inputs, returns_lse)
    _compute(inputs, results, True, *options)
    return [result for result in results if result is not None]


def _eager_out(q, k, v, table, lens, k_scale, v_scale, out, lse, *options):
    inputs = Inputs(q, k, v, table, lens, k_scale, v_scale)
    _compute(inputs, Results(out, lse), False, *options)


def _fake(q, k, v, table, lens, k_scale, v_scale, returns_lse, scale, sharding, group, _):
    inputs = Inputs(q, k, v, table, lens, k_scale, v_scale)
    checked_problem(inputs, scale, sharding, returns_lse, ranks_of(group).world_size)
    results = _empty(inputs, returns_lse)
    return [result for result in results if result is not None]


def _fake_out(q, k, v, table, lens, k_scale, v_scale, out, lse, scale, sharding, group, _):
    inputs, ranks = Inputs(q, k, v, table, lens, k_scale, v_scale), ranks_of(group).world_size
    check_result(inputs, checked_problem(inputs, scale, sharding, lse is not None, ranks), out)


def _check_options(scale, sharding, _, strategy):
    check_options(scale, sharding)
    check_requested(strategy, NAME, (FUSED,), "strategy")


def _check(*args):
    _check_options(*args[-4:])
    refuse_all_gradients(NAME, **Inputs(*args[: len(Inputs._fields)])._asdict())


def _check_out(*args):
    _check_options(*args[-4:])
    count = len(Inputs._fields)
    refuse_all_gradients(NAME, **Inputs(*args[:count])._asdict(), out=args[count])


_TENSORS = (
    "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? k_scale, Tensor? v_scale"
)
_OPTIONS = "float scale, str sharding, str group, str strategy"
_into_new = define(
    f"{NAME}({_TENSORS}, bool return_lse, {_OPTIONS}) -> Tensor[]", _eager, _fake, check=_check,
    casts=lowers("q", "k_cache", "v_cache"),
)  # fmt: skip
_into_out = define(
    f"{NAME}_out({_TENSORS}, Tensor(a!) out, Tensor(b!)? lse, {_OPTIONS}) -> ()",
    _eager_out, _fake_out, check=_check_out,
)  # fmt: skip
