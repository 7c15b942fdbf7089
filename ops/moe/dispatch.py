"""Dispatch: every rank receives the tokens of its experts, sorted by expert.

Contains the torch operator with its gradient. All ranks learn the experts of all tokens
(``all_gather``) and compute the same tables from them. Then ranks exchange the tokens, and the rank
of an expert stores them in its rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from ...builtins.errors import brief_errors
from ..collectives.all_gather import NAME as ALL_GATHER
from ..core.agreement import agree
from ..core.checks import require_bools
from ..core.groups import TwoLevels, group_of, name_of, ranks_of
from ..core.library import define, define_composite, is_traced
from ..core.registry import TableRow
from . import across_nodes
from .call_sequence import Recorder, find, record
from .kernels.dispatch import DispatchBlocks, dispatch_program
from .nccl_rows import dispatch_rows as dispatch_by_nccl
from .quant import check_quant, quantized
from .routing import (
    RESULTS,
    Tables,
    is_first_choice,
    record_routing,
    routing_memory,
    routing_of,
)
from .row_exchange import (
    TABLES,
    RowExchange,
    check_options,
    choose_transport,
    exchange,
    fake_exchange,
    gather_from_all,
    gather_transport,
)
from .row_problem import (
    RowProblem,
    check_ids,
    check_num_experts,
    check_tokens,
    checked_problem,
    checks_ids,
    padded,
    within_node,
)

NAME = "dispatch"
NO_EXPERT = -1
"""Number in ``topk_ids`` that drops a choice."""
Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""Rows, or e4m3 rows and their scales."""


class DispatchHandle(NamedTuple):
    """Routing of the tokens of a ``dispatch``, which ``combine`` needs. W ranks with T tokens of k
    choices each; C is the capacity. T is ``max_tokens`` if it is given, but for the weights.

    Attributes:
        weights: (T, k), ``topk_weights``.
        tables: ``source``, (C,) int32, the token of each row of this rank's experts, as ``(rank * T
            + token) * k + choice``, -1 for rows past the last one; ``slots``, (W * T, k) int32, the
            rows of each token at this rank's experts; ``place``, (T, k) int32, the row of each
            choice of this rank's tokens, as ``rank * C + row``, -1 for a choice that is dropped.
        dropped: (W,) int32, the rows of each rank's experts for which the capacity has no room.
        group: name of the group.
        transport: the argument of ``dispatch``.
        is_padded: whether ``max_tokens`` is given.
    """

    weights: torch.Tensor
    tables: Tables
    dropped: torch.Tensor
    group: str
    transport: str
    is_padded: bool


class Dispatch(RowExchange, op=NAME):
    """Program that exchanges tokens, and stores them in the rows of this rank's experts."""

    arguments = ("x", "topk_ids", "topk_weights")
    reads = ("x", "source", "slots")
    row = TableRow(
        inputs="the rank's tokens `x`, (T, H), of any type; the k experts of each, `topk_ids`, and "
        "their weights, `topk_weights`, (T, k)",
        result="`rows`, (C, H): the tokens of this rank's experts, sorted by expert, with `quant` "
        "`(rows, scales)`; `offsets`, int32: the end of each expert's rows; a handle for `combine`",
        gradient="`combine` with weights 1",
        memory="W x T x H, or T x H if ranks need few of the tokens, with T and H rounded up",
    )

    @staticmethod
    def program(problem):
        return dispatch_program(_blocks(problem))

    @staticmethod
    def obstacle(problem):
        return problem.size_obstacle(problem.moved, _blocks(problem).exchanged)

    @staticmethod
    def inputs(rows, weights, tables):
        return rows, tables.source, tables.slots

    @staticmethod
    def empty_rows(rows, tables):
        return rows.new_empty(len(tables.source), rows.shape[1])

    @staticmethod
    def unfused(rows, weights, tables, group):
        return dispatch_by_nccl(rows, tables.source, tables.place, group)


def _blocks(problem: RowProblem) -> DispatchBlocks:
    return DispatchBlocks(
        problem.tokens, problem.choices, problem.capacity, problem.ranks, problem.moved,
        problem.is_padded, problem.clear_rest,
    )  # fmt: skip


def _dispatch(
    x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, capacity: int | None,
    quant: str | None, clear_rest: bool, is_padded: bool, group: str, transport: str,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the rows, with their scales if they have any, and the routing; all arguments are
    checked before the first exchange."""
    ranks = ranks_of(group)
    problem = checked_problem(NAME, x, topk_ids, num_experts, capacity, ranks.world_size)
    problem = replace(problem, is_padded=is_padded)
    part, node = within_node(problem, ranks)
    if transport != "auto":  # which supports every problem; a tracer asks no other rank
        choose_transport(transport, part, x.device, node, Dispatch.obstacle(part))
    is_call = not is_traced(topk_ids)
    checks = is_call and checks_ids()
    if is_call:
        agree(ranks, problem, ", ".join(filter(None, (quant, transport, "ids checked" * checks))))
    all_ids = gather_from_all(topk_ids.contiguous(), group, transport)
    all_ids = all_ids.view(ranks.world_size, *topk_ids.shape)
    if checks:
        check_ids(NAME, all_ids, num_experts)
    routing = routing_of(all_ids, ranks.rank, num_experts, problem.capacity)
    rows = []
    for part in (x,) if quant is None else quantized(x):
        if isinstance(ranks, TwoLevels):
            rows.append(
                across_nodes.dispatch_rows(
                    part, routing.tables, clear_rest, is_padded, ranks, transport
                )
            )
        else:
            rows.append(
                _dispatch_rows(part, *routing.tables, clear_rest, is_padded, group, transport)
            )
    return rows, *routing.tables, routing.offsets, routing.dropped


@brief_errors
def dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    max_tokens: int | None = None,
    quant: str | None = None,
    clear_rest: bool = True,
    group: Any = None,
    transport: str = "auto",
) -> tuple[Rows, torch.Tensor, DispatchHandle]:
    """Send each token to the ranks of its experts.

    Rank ``r`` has the experts ``r * num_experts / W`` and following; W is the number of ranks.
    Every rank calls it with the same shapes, but for T if ``max_tokens`` is given. The first call
    with new shapes compiles, collectively. The host does not read the routing, so a CUDA graph may
    capture the call and replay it with another one.

    Args:
        x: (T, H), of any type.
        topk_ids: (T, k) int32 or int64, the experts of each token. A number that is no expert, such
            as -1, drops the choice; with ``TILEWEAVE_CHECK_IDS=1`` others than -1 are refused. A
            token that names an expert several times has one row there.
        topk_weights: (T, k), weights of their results, for ``combine``.
        num_experts: experts of all ranks, a multiple of W.
        capacity: C, the rows of a rank's experts. If its experts receive more tokens, the last rows
            are dropped: they are not in the result and add nothing in ``combine``, and
            ``handle.dropped`` counts them. None for T * W * min(k, num_experts / W), enough for
            every routing.
        max_tokens: the largest T. Kernels are compiled for it, so T may be different in each call
            and on each rank, also 0. A call with fewer tokens pads its arguments, and so copies x.
            In ``capacity``, ``max_tokens`` replaces T. None: T is the same on all ranks.
        quant: ``fp8_1x128``: tokens are sent as e4m3, with a float32 scale for each 128 columns,
            as ``grouped_matmul`` accepts them; a quarter to a half of the bytes. x is then of 16
            bits or more and has no gradient.
        clear_rest: set the rows past the last token to zero. Otherwise they are undefined, which
            saves the time to write them.
        group: see ``all_to_all``. On several nodes, a token crosses to each other node once.
        transport: ``ldst`` (loads and stores of threads), ``nccl`` (``torch.distributed``; the host
            reads the number of rows), or ``auto``: ``ldst`` if possible.

    Returns:
        rows: (C, H), the tokens of this rank's experts, sorted by expert, then by rank and token.
            They have a gradient. With ``quant``, a pair: these rows, and their scales,
            (C, H / 128), rounded up.
        offsets: (num_experts / W,) int32, the end of each expert's rows, as
            ``torch.nn.functional.grouped_mm`` expects them.
        handle: for ``combine``.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    group, tensors = name_of(group), (x, topk_ids, topk_weights)
    options = num_experts, capacity, max_tokens, quant, clear_rest, group, transport
    key, addresses, sequence = find(NAME, tensors, options)
    if sequence is None or checks_ids() or (results := sequence(addresses)) is None:
        return _checked(tensors, options, key)
    rows, source, slots, place, offsets, dropped = results
    tables, is_padded = Tables(source, slots, place), max_tokens is not None
    return rows, offsets, DispatchHandle(topk_weights, tables, dropped, group, transport, is_padded)


def _checked(
    tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...], key: Hashable
) -> tuple[Rows, torch.Tensor, DispatchHandle]:
    """Return the result of a call that is not recorded, and record it with ``key``."""
    x, topk_ids, topk_weights = tensors
    num_experts, capacity, max_tokens, quant, clear_rest, group, transport = options
    require_bools(NAME, clear_rest=clear_rest)
    check_tokens(NAME, x, topk_ids, topk_weights, max_tokens)
    check_quant(NAME, quant, x)
    check_num_experts(NAME, num_experts)
    check_options(NAME, capacity, transport)
    is_padded = max_tokens is not None
    if is_padded and len(x) < max_tokens:
        rows, offsets, handle = dispatch(
            padded(x, max_tokens), padded(topk_ids, max_tokens, NO_EXPERT),
            padded(topk_weights, max_tokens), num_experts=num_experts, capacity=capacity,
            max_tokens=max_tokens, quant=quant, clear_rest=clear_rest, group=group,
            transport=transport,
        )  # fmt: skip
        return rows, offsets, handle._replace(weights=topk_weights)
    rows, *tables, offsets, dropped = _sorted_rows(
        x, topk_ids, num_experts, capacity, quant, clear_rest, is_padded, group, transport
    )
    handle = DispatchHandle(topk_weights, Tables(*tables), dropped, group, transport, is_padded)
    if quant is not None:
        return tuple(rows), offsets, handle
    if key is not None and not checks_ids():
        record(key, group, x.device, partial(_recorder, tensors, options))
    return rows[0], offsets, handle


def _recorder(tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...]) -> Recorder:
    """Return the kernels of a call."""
    x, topk_ids, topk_weights = tensors
    num_experts, capacity, max_tokens, _, clear_rest, group, transport = options
    ranks = group_of(group)
    problem = checked_problem(NAME, x, topk_ids, num_experts, capacity, ranks.world_size)
    problem = replace(problem, clear_rest=clear_rest, is_padded=max_tokens is not None)
    inputs = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    results = {"rows": ((problem.capacity, problem.columns), x.dtype)}
    shared = routing_memory(topk_ids, problem.ranks, num_experts, problem.capacity)
    recorder = Recorder(inputs, results, shared, RESULTS)
    record_dispatch(recorder, problem, group, transport)
    return recorder


def record_dispatch(recorder: Recorder, problem: RowProblem, group: str, transport: str) -> None:
    """Append the kernels that write ``rows`` and ``RESULTS`` for ``x`` and ``topk_ids``."""
    ids_options = group, gather_transport(transport)
    recorder.operator(ALL_GATHER, ["topk_ids"], "all_ids", ids_options)
    record_routing(recorder, group_of(group).rank, problem.num_experts, problem.capacity)
    options = (
        problem.tokens, problem.choices, problem.capacity, problem.clear_rest, problem.is_padded,
        group, transport,
    )  # fmt: skip
    recorder.operator(NAME, ["x", "source", "slots"], "rows", options)


def _eager(x, source, slots, place, clear_rest, is_padded, group, transport):
    tables = Tables(source, slots, place)
    return exchange(NAME, x, None, tables, is_padded, group, transport, clear_rest=clear_rest)


def _fake(x, source, slots, place, clear_rest, is_padded, group, transport):
    tables = Tables(source, slots, place)
    return fake_exchange(NAME, x, tables, is_padded, group, transport, clear_rest)


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, *tables, _, ctx.is_padded, ctx.group, ctx.transport = inputs
    ctx.save_for_backward(*tables)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple:
    tables = Tables(*ctx.saved_tensors)
    wide = torch.promote_types(grad.dtype, torch.float32)
    once = is_first_choice(tables.place).to(wide)  # a token has one row at an expert
    grad_x = torch.ops.tileweave.combine(
        grad.contiguous(), once, *tables, ctx.is_padded, ctx.group, ctx.transport
    )
    return grad_x, *(None for _ in range(7))


_dispatch_rows = define(
    f"{NAME}_rows(Tensor x, {TABLES}, bool clear_rest, bool is_padded, str group, "
    "str transport) -> Tensor",
    _eager, _fake, (_save, _gradients),
)  # fmt: skip
_sorted_rows = define_composite(
    f"{NAME}(Tensor x, Tensor topk_ids, int num_experts, int? capacity, str? quant, "
    "bool clear_rest, bool is_padded, str group, str transport) -> "
    "(Tensor[], Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
)
