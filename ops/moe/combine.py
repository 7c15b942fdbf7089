"""Combine: every rank receives the results of its tokens and adds them up.

Contains the torch operator with its gradient. Each rank adds the results of its experts, then the
owner of a token adds the sums of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from ...builtins.errors import brief_errors
from ...runtime.host.group_argument import BY
from ..collectives.transport import SUMMED
from ..core.call import Call, Decision
from ..core.checks import refused, require_dense, require_dense_or_none, require_like
from ..core.groups import TwoLevels, ranks_of
from ..core.library import define_composite, define_pair, refuse_gradients
from ..core.registry import TableRow
from . import across_nodes
from .dispatch import DispatchHandle
from .kernels.combine import CombineBlocks, combine_program
from .nccl_rows import combine_rows as combine_by_nccl
from .routing import Tables
from .row_exchange import TABLES, RowExchange, exchange, fake_exchange, gather_from_all
from .row_problem import RowProblem, padded

NAME = "combine"


class Combine(RowExchange, op=NAME):
    """Program that adds the results of a rank's experts and the sums of a rank's tokens."""

    arguments = ("y",)
    reads = ("y", "topk_weights", *Tables._fields)
    row = TableRow(
        inputs="`y`, (C, N), the results for the rows of `dispatch`; its handle",
        result="(T, N): the sums of the results of each token, with its weights",
        gradient="`dispatch` of the gradient, times the weights; its products with `y`",
        memory="2 x W x T x N",
    )

    @classmethod
    def decide(cls, call: Call) -> Decision:
        y, _, *tables = call.inputs
        require_rows(y, Tables(*tables), call.out)
        return super().decide(call)

    @staticmethod
    def program(problem):
        return combine_program(_blocks(problem))

    @staticmethod
    def obstacle(problem):
        if problem.dtype not in SUMMED:
            return f"y is of {problem.dtype}; expected {', '.join(map(str, SUMMED))}"
        return problem.size_obstacle(problem.added, _blocks(problem).exchanged)

    @staticmethod
    def inputs(rows, weights, tables):
        return rows, weights, *tables

    @staticmethod
    def empty_rows(rows, tables):
        return rows.new_empty(len(tables.place), rows.shape[1])

    @staticmethod
    def unfused(rows, weights, tables, group):
        return combine_by_nccl(rows, weights, tables.source, tables.place, group)


@brief_errors
def combine(
    y: torch.Tensor, handle: DispatchHandle, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts.

    Each rank adds the results of its experts in fp32, from the last row to the first, and rounds.
    Then the sums of the ranks are added in fp32, in rank order. ``nccl`` instead adds all results
    in fp32, in the order of the token's choices. So results of a transport are equal, bit by bit,
    in all calls. On several nodes, each node adds and rounds, then the sums of the nodes are added
    in fp32. Every rank calls it.

    Args:
        y: (C, N) floating-point, the results for the rows of ``dispatch``. Rows past the last
            token are not read.
        handle: what ``dispatch`` returned. It has the group and the transport.
        out: contiguous, does not overlap ``y``; receives the result. Not differentiable.

    Returns:
        (T, N), in the type of ``y``. A token without experts is zero. y and ``topk_weights`` have
        gradients.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    if not isinstance(handle, DispatchHandle):
        raise refused(NAME, f"handle={handle!r}", "the handle that dispatch returned")
    if not isinstance(y, torch.Tensor):
        require_dense(NAME, y=y)
    weights, tables, group = handle.weights, handle.tables, handle.group
    tokens, slots = weights.shape[0], tables.place.shape[0]
    if tokens != slots:
        weights = padded(weights, slots)
    arguments = y, as_read(weights, y), *tables, handle.is_padded
    if BY not in group and tokens == slots:
        if out is None:
            return _combine(*arguments, group, handle.transport)
        _combine_out(*arguments, out, group, handle.transport)
        return out
    require_rows(y, tables, out, tokens)
    refuse_gradients(NAME, out, y, weights)
    combined = (_across if BY in group else _combine)(*arguments, group, handle.transport)
    return combined[:tokens] if out is None else out.copy_(combined[:tokens])


def as_read(weights: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the weights of ``y`` in the type that the program reads."""
    dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    return weights if weights.dtype == dtype else weights.to(dtype)


def require_rows(
    y: torch.Tensor, tables: Tables, out: torch.Tensor | None, tokens: int | None = None
) -> None:
    """Refuse results of experts, and memory for the result, that do not fit the tables.

    Args:
        tokens: rows of ``out``; None for one row for each row of ``tables.place``.
    """
    require_dense(NAME, y=y)
    require_dense_or_none(NAME, out=out)
    capacity = tables.source.shape[0]
    if y.ndim != 2 or y.shape[0] != capacity or y.shape[1] == 0:
        raise refused(
            NAME, f"y has shape {tuple(y.shape)}", f"({capacity}, columns) for this handle"
        )
    if not y.is_floating_point() or y.dtype.itemsize < 2:
        raise refused(NAME, f"y is of {y.dtype}", "a floating-point type of 16 bits or more")
    require_like(NAME, "y", y, "the handle", tables.source, y.dtype)
    if out is None:
        return
    shape = tables.place.shape[0] if tokens is None else tokens, y.shape[1]
    if tuple(out.shape) != shape:
        raise refused(NAME, f"out has shape {tuple(out.shape)}", f"{shape}")
    require_like(NAME, "out", out, "y", y)


def _blocks(problem: RowProblem) -> CombineBlocks:
    return CombineBlocks(
        problem.tokens, problem.choices, problem.capacity, problem.ranks, problem.added,
        problem.is_padded,
    )  # fmt: skip


def _combine_across(y, weights, source, slots, place, is_padded, group, transport):
    levels = ranks_of(group)
    assert isinstance(levels, TwoLevels)
    tables = Tables(source, slots, place)
    return across_nodes.combine_rows(y, weights, tables, is_padded, levels, transport)


def _computed(inputs, out, options, recorded=None):
    y, weights, *tables = inputs
    return exchange(NAME, y, weights, Tables(*tables), *options, out, recorded=recorded)


def _fake(inputs, out, options):
    y, _, *tables = inputs
    result = fake_exchange(NAME, y, Tables(*tables), *options)
    return result if out is None else None


def _check(inputs, out, _):
    y, _, *tables = inputs
    require_rows(y, Tables(*tables), out)
    if out is not None:
        refuse_gradients(NAME, out, *inputs[:2])


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *tensors, ctx.is_padded, ctx.group, ctx.transport = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple:
    y, weights, *tables = ctx.saved_tensors
    source, _, place = tables
    needs_y, needs_weights, *_ = ctx.needs_input_grad
    grad_y = grad_weights = None
    grad = grad.contiguous()
    rows = torch.ops.tileweave.dispatch_rows(
        grad, *tables, True, ctx.is_padded, ctx.group, ctx.transport
    )
    rows = rows.to(weights.dtype)
    if needs_y:
        scale = _weights_of_rows(weights, source, place, ctx)
        grad_y = (rows * scale.unsqueeze(-1)).to(y.dtype)
    if needs_weights:
        products = (rows * y).sum(-1)
        all_products = gather_from_all(products, ctx.group, ctx.transport)
        grad_weights = torch.where(place >= 0, all_products[place.clamp(min=0)], 0)
    return grad_y, grad_weights, *(None for _ in range(6))


def _weights_of_rows(
    weights: torch.Tensor, source: torch.Tensor, place: torch.Tensor, ctx: Any
) -> torch.Tensor:
    """Return the weight of each row of this rank's experts. A token that names an expert several
    times adds its weights."""
    same = place.unsqueeze(-1).eq(place.unsqueeze(-2))
    of_experts = torch.where(same, weights.unsqueeze(-2), 0).sum(-1)
    all_weights = gather_from_all(of_experts.flatten(), ctx.group, ctx.transport)
    return torch.where(source >= 0, all_weights[source.clamp(min=0)], 0)


_INPUTS = f"Tensor y, Tensor topk_weights, {TABLES}, bool is_padded"
_OPTIONS = "str group, str transport"
_combine, _combine_out = define_pair(
    NAME, _INPUTS, _OPTIONS, _computed, _fake, _check, gradient=(_save, _gradients)
)
_across = define_composite(f"{NAME}_across({_INPUTS}, {_OPTIONS}) -> Tensor", _combine_across)
