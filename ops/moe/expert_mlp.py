"""Experts of a mixture: dispatch, two grouped GEMMs around SwiGLU, and combine."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ...builtins.errors import brief_errors
from ..core.autocast import lowers
from ..core.checks import refused, require_dense
from ..core.groups import group_of, name_of, ranks_of
from ..core.library import define_composite
from ..core.registry import RegisteredOp, TableRow
from ..core.removed import removed
from .call_sequence import Recorder, find, record
from .combine import NAME as COMBINE
from .combine import as_read, combine
from .dispatch import NO_EXPERT, dispatch, record_dispatch
from .grouped_matmul import grouped_matmul, record_grouped_matmul
from .kernels.grouped_gemm import SWIGLU
from .problem import Options
from .quantized_mlp import Weights, check_quantized, quantized_experts
from .routing import Tables, routing_memory
from .row_exchange import check_options
from .row_problem import check_tokens, checked_problem, checks_ids, padded

NAME = "expert_mlp"


class ExpertMlp(RegisteredOp, op=NAME):
    """Gated MLPs of the experts of a mixture."""

    arguments = ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down")
    row = TableRow(
        inputs="the rank's tokens as for `dispatch`; the weights of this rank's experts, "
        "`w_gate_up`, (E / W, 2 I, H), the gate first, and `w_down`, (E / W, H, I)",
        result="(T, H): the weighted sums of the experts' MLPs with SwiGLU for the rank's tokens",
        gradient="of `x`, `topk_weights` and both weights; none with `quant`",
        memory="at most 3 x W x T x H",
    )


def _check_shapes(x: torch.Tensor, w_gate_up: Any, w_down: Any) -> None:
    require_dense(NAME, w_gate_up=w_gate_up, w_down=w_down)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise refused(NAME, f"x is of {x.dtype}", "a floating-point type of 16 bits or more")
    hidden, shape = x.shape[1], tuple(w_gate_up.shape)
    if w_gate_up.ndim != 3 or 0 in shape or shape[1] % 2 or shape[2] != hidden:
        raise refused(
            NAME, f"w_gate_up has shape {shape}",
            f"(experts of a rank, 2 * intermediate, {hidden}) for x of shape {tuple(x.shape)}",
        )  # fmt: skip
    expected = shape[0], hidden, shape[1] // 2
    if tuple(w_down.shape) != expected:
        raise refused(
            NAME, f"w_down has shape {tuple(w_down.shape)}",
            f"{expected} for w_gate_up of shape {shape}",
        )  # fmt: skip


def _expert_mlp(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, scale_w_gate_up: torch.Tensor | None, scale_w_down: torch.Tensor | None,
    quant: str | None, capacity: int | None, is_padded: bool, group: str, transport: str,
) -> torch.Tensor:  # fmt: skip
    num_experts = w_gate_up.shape[0] * ranks_of(group).world_size
    # Undefined gradients of rows that no rank reads would fail torch.autograd.detect_anomaly.
    clear_rest = torch.is_grad_enabled() and any(
        t.requires_grad for t in (x, topk_weights, w_gate_up, w_down)
    )
    rows, offsets, handle = dispatch(
        x, topk_ids, topk_weights, num_experts=num_experts, capacity=capacity,
        max_tokens=len(x) if is_padded else None, quant=quant, clear_rest=clear_rest, group=group,
        transport=transport,
    )  # fmt: skip
    if isinstance(rows, tuple):
        weights = Weights(w_gate_up, w_down, scale_w_gate_up, scale_w_down)
        return combine(quantized_experts(*rows, offsets, weights, x.dtype), handle)
    hidden = _gated(rows, w_gate_up, offsets, clear_rest)
    return combine(grouped_matmul(hidden, w_down, offsets, clear_rest=clear_rest), handle)


def _gated(
    rows: torch.Tensor, w_gate_up: torch.Tensor, offsets: torch.Tensor, clear_rest: bool
) -> torch.Tensor:
    """Return silu(gate) * up: in one kernel if there is no gradient, which would need the
    products of that kernel again."""
    if not (torch.is_grad_enabled() and (rows.requires_grad or w_gate_up.requires_grad)):
        return grouped_matmul(rows, w_gate_up, offsets, epilogue=SWIGLU, clear_rest=clear_rest)
    gate, up = grouped_matmul(rows, w_gate_up, offsets, clear_rest=clear_rest).chunk(2, dim=-1)
    return functional.silu(gate) * up


@brief_errors
@removed(strategy="a call without strategy, which runs the separate steps")
def expert_mlp(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    group: Any = None,
    *,
    scale_w_gate_up: torch.Tensor | None = None,
    scale_w_down: torch.Tensor | None = None,
    quant: str | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    transport: str = "auto",
) -> torch.Tensor:
    """Apply the gated MLPs of each token's experts and add their results with ``topk_weights``.

    The steps are ``dispatch``, ``silu(rows @ gate.T) * (rows @ up.T)``, a product with ``w_down``,
    and ``combine``. Every rank calls it with the same shapes, but for T if ``max_tokens`` is given.

    Args:
        x: (T, H) floating-point.
        topk_ids, topk_weights: (T, k), see ``dispatch``.
        w_gate_up: (E / W, 2 I, H), weights of this rank's experts, the gate first.
        w_down: (E / W, H, I).
        scale_w_gate_up, scale_w_down: float32, one for each 128 x 128 weights of an expert,
            (E / W, 2 I / 128, H / 128) and (E / W, H / 128, I / 128), rounded up; with ``quant``
            only.
        quant: ``fp8_1x128``: weights are e4m3 with scales. Tokens are sent as e4m3, and the result
            of SwiGLU is quantized in the same way. x is bf16 or fp16, I a multiple of 128 and H of
            16. Nothing has a gradient.
        group, capacity, max_tokens, transport: see ``dispatch``.

    Returns:
        (T, H), in the type of ``x``. Without ``quant``, all floating-point arguments have
        gradients.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    group, weights = name_of(group), Weights(w_gate_up, w_down, scale_w_gate_up, scale_w_down)
    tensors = x, topk_ids, topk_weights, *weights
    options = quant, capacity, max_tokens, group, transport
    key, addresses, sequence = find(NAME, tensors, options)
    if sequence is not None and not checks_ids():
        read_weights = as_read(topk_weights, x)
        addresses[2] = read_weights.data_ptr()
        if (results := sequence(addresses)) is not None:
            return results[0]
    return _checked(tensors, options, key)


def _checked(
    tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...], key: Hashable
) -> torch.Tensor:
    """Return the result of a call that is not recorded, and record it with ``key``."""
    x, topk_ids, topk_weights, *others = tensors
    weights, (quant, capacity, max_tokens, group, transport) = Weights(*others), options
    check_tokens(NAME, x, topk_ids, topk_weights, max_tokens)
    _check_shapes(x, *weights[:2])
    check_quantized(NAME, quant, x, topk_weights, weights)
    check_options(NAME, capacity, transport)
    if max_tokens is not None and len(x) < max_tokens:
        result = expert_mlp(
            padded(x, max_tokens), padded(topk_ids, max_tokens, NO_EXPERT),
            padded(topk_weights, max_tokens), *weights[:2], group, scale_w_gate_up=weights[2],
            scale_w_down=weights[3], quant=quant, capacity=capacity, max_tokens=max_tokens,
            transport=transport,
        )  # fmt: skip
        return result[: len(x)]
    result = _mlp(*tensors, quant, capacity, max_tokens is not None, group, transport)
    if key is not None and quant is None and not checks_ids():
        record(key, group, x.device, partial(_recorder, tensors[:5], options))
    return result


def _recorder(tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...]) -> Recorder:
    """Return the kernels of a call of ``expert_mlp`` without a gradient."""
    x, topk_ids, topk_weights, w_gate_up, w_down = tensors
    _, capacity, max_tokens, group, transport = options
    ranks = group_of(group).world_size
    num_experts, (hidden, intermediate) = w_down.shape[0] * ranks, w_down.shape[1:]
    problem = checked_problem(NAME, x, topk_ids, num_experts, capacity, ranks)
    problem = replace(problem, clear_rest=False, is_padded=max_tokens is not None)
    inputs = {
        "x": x, "topk_ids": topk_ids, "topk_weights": as_read(topk_weights, x),
        "w_gate_up": w_gate_up, "w_down": w_down,
    }  # fmt: skip
    shared = {
        "rows": ((problem.capacity, hidden), x.dtype),
        "gated": ((problem.capacity, intermediate), x.dtype),
        "y": ((problem.capacity, hidden), x.dtype),
        **routing_memory(topk_ids, ranks, num_experts, problem.capacity),
    }
    recorder = Recorder(inputs, {"out": (tuple(x.shape), x.dtype)}, shared)
    record_dispatch(recorder, problem, group, transport)
    gated = Options(epilogue=SWIGLU, clear_rest=False)
    record_grouped_matmul(recorder, "rows", "w_gate_up", "gated", gated)
    record_grouped_matmul(recorder, "gated", "w_down", "y", Options(clear_rest=False))
    sizes = problem.tokens, problem.choices, problem.capacity
    recorder.operator(
        COMBINE, ["y", "topk_weights", *Tables._fields], "out",
        (*sizes, True, problem.is_padded, group, transport),
    )  # fmt: skip
    return recorder


_mlp = define_composite(
    f"{NAME}(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, "
    "Tensor? scale_w_gate_up, Tensor? scale_w_down, str? quant, int? capacity, bool is_padded, "
    "str group, str transport) -> Tensor",
    _expert_mlp,
    lowers("x", "w_gate_up", "w_down"),
)
