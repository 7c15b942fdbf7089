"""Functions that test_operators.py runs on each rank."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.modules import load_module
from tests.ops.meshes import Nodes, in_order, mesh_of
from tests.ops.moe.by_definition import (
    all_rows,
    kept_ids,
    mixture,
    quantized,
    quantized_mixture,
    random_ids,
)
from tests.ops.on_ranks import numbers, part_of_the_world
from tileweave import ops
from tileweave.ops.moe.row_problem import CHECK_IDS

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mixture.py"


class Layer(NamedTuple):
    """Extents of a mixture, and its routing.

    Attributes:
        uneven: whether ranks have 0 to ``tokens`` tokens, and pass ``max_tokens``.
    """

    routing: int = 0
    tokens: int = 5
    choices: int = 2
    per_rank: int = 2
    capacity: int | None = None
    hidden: int = 6
    width: int = 4
    transport: str = "auto"
    uneven: bool = False

    def ids(self, ranks: int) -> torch.Tensor:
        """Return the experts of all tokens, (W, T, k); -1 for tokens that a rank does not have."""
        generator = torch.Generator().manual_seed(self.routing)
        ids = random_ids(ranks, self.tokens, self.choices, self.per_rank * ranks, generator)
        for rank, of_rank in enumerate(ids):
            of_rank[self.tokens_of(rank, ranks) :] = -1
        return ids

    def tokens_of(self, rank: int, ranks: int) -> int:
        """Return the number of tokens of a rank."""
        return self.tokens * rank // (ranks - 1) if self.uneven else self.tokens

    def tensors(self, of: int) -> list[torch.Tensor]:
        """Return x, the weights of choices and of experts of a rank, and weights for its result."""
        shapes = {
            "x": (self.tokens, self.hidden),
            "topk": (self.tokens, self.choices),
            "gate and up": (self.per_rank, 2 * self.width, self.hidden),
            "down": (self.per_rank, self.hidden, self.width),
            "grad": (self.tokens, self.hidden),
        }
        return [numbers(*shape, of=of, what=what) for what, shape in shapes.items()]


Form = str | Nodes | None
"""Group of a call: a form of ``part_of_the_world``, the ranks of each node, or the default one."""


def _group(form: Form) -> tuple[Any, int, int]:
    """Return the group, the place of this rank in it, and the number of its ranks."""
    if isinstance(form, tuple):
        return mesh_of(form), *in_order(form)
    group = part_of_the_world(form) if form else None
    return group, dist.get_rank(), 2 if form else dist.get_world_size()


def apply(layer: Layer, form: Form, compiled: bool) -> dict[str, bool]:
    """Compare ``expert_mlp`` and its gradients with one process that has all tokens and experts."""
    group, me, count = _group(form)
    every = [layer.tensors(of=r) for r in range(count)]
    x, weights, w_gate_up, w_down, grads = (torch.stack(part) for part in zip(*every, strict=True))
    given = [x, weights, w_gate_up.flatten(0, 1), w_down.flatten(0, 1)]
    given = [tensor.requires_grad_() for tensor in given]
    ids, num_experts = layer.ids(count), count * layer.per_rank
    kept = ids if layer.capacity is None else kept_ids(ids, num_experts, layer.capacity)
    whole = mixture(given[0], kept, *given[1:])
    wholes = [whole, *torch.autograd.grad((whole * grads).sum(), given, materialize_grads=True)]

    tokens = layer.tokens_of(min(me, count - 1), count)

    def f(x, weights, w_gate_up, w_down):
        mine = ids[min(me, count - 1), :tokens]
        return ops.expert_mlp(
            x, mine, weights, w_gate_up, w_down, group, capacity=layer.capacity,
            max_tokens=layer.tokens if layer.uneven else None, transport=layer.transport,
        )  # fmt: skip

    torch.compiler.reset()
    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    x, weights, w_gate_up, w_down, grad = layer.tensors(of=me)
    mine = [x[:tokens], weights[:tokens], w_gate_up, w_down]
    mine = [tensor.detach().requires_grad_() for tensor in mine]
    out = f(*mine)
    results = [out, *torch.autograd.grad((out * grad[:tokens]).sum(), mine)]
    return {
        name: torch.allclose(one, all_of_them.reshape(count, -1, *one.shape[1:])[me, : len(one)])
        for name, one, all_of_them in zip(
            ("out", "x", "weights", "gate and up", "down"), results, wholes, strict=True
        )
    }


def quantized_layer(
    layer: Layer, rank: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return x, the weights of choices and the fp8 weights of a rank, and their scales."""
    x, weights, *experts, _ = layer.tensors(of=rank)
    scales = [
        numbers(w.shape[0], -(-w.shape[1] // 128), -(-w.shape[2] // 128), of=rank, what=what)
        for w, what in zip(experts, ("scales up", "scales down"), strict=True)
    ]
    scales = [scale.float().abs() / 8 + 0.01 for scale in scales]
    tensors = [x.to(dtype), weights.float(), *(w.to(torch.float8_e4m3fn) for w in experts)]
    return tensors, dict(zip(("scale_w_gate_up", "scale_w_down"), scales, strict=True))


def wide_weights(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return fp8 weights times their scales."""
    by_row = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return w.float() * by_row[:, : w.shape[1], : w.shape[2]]


def quantized_mlp(
    layer: Layer, dtype: torch.dtype, compiled: bool, form: Form = None
) -> dict[str, bool]:
    """Compare ``expert_mlp`` of fp8 with one process that has all experts, with equal rounding."""
    group, me, count = _group(form)
    every = [quantized_layer(layer, r, dtype) for r in range(count)]
    gate_up, down = (
        torch.cat([wide_weights(t[n], s[name]) for t, s in every])
        for n, name in ((2, "scale_w_gate_up"), (3, "scale_w_down"))
    )
    ids, (tensors, scales) = layer.ids(count), every[me]
    x, weights, *mine = tensors

    def f(x, weights):
        return ops.expert_mlp(
            x, ids[me], weights, *mine, group, **scales, quant="fp8_1x128",
            capacity=layer.capacity,
        )  # fmt: skip

    kept = kept_ids(ids, count * layer.per_rank, layer.capacity or 1 << 30)[me]
    right = quantized_mixture(x, kept, weights, gate_up, down).float()
    torch.compiler.reset()
    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    out = f(x, weights)
    error = (out.float() - right).norm() / right.norm().clamp(min=1e-6)
    return {"type": out.dtype == dtype, "out": bool(error < 4e-3)}


def rows(layer: Layer, dtype: torch.dtype, form: Form = None) -> dict[str, bool]:
    """Compare the rows of ``dispatch``, of any type, and its handle with the definition."""
    group, me, count = _group(form)
    ids, num_experts = layer.ids(count), count * layer.per_rank
    x = torch.stack([layer.tensors(of=r)[0] * 9 for r in range(count)]).to(dtype)
    out, offsets, handle = ops.dispatch(
        x[me], ids[me], torch.ones(ids[me].shape), num_experts=num_experts,
        capacity=layer.capacity, group=group,
    )  # fmt: skip
    every = all_rows(ids, num_experts)
    kept = every[me][: out.shape[0]]
    right = torch.stack([x[row.rank, row.token].float() for row in kept] or [torch.empty(0)])
    last = int(offsets[-1])
    first = me * layer.per_rank
    ends = [sum(row.expert <= first + e for row in kept) for e in range(layer.per_rank)]
    return {
        "type": out.dtype == dtype,
        "rows": torch.equal(out[:last].float(), right) if kept else last == 0,
        "rest": not out[last:].float().any(),
        "offsets": offsets.tolist() == ends,
        "dropped": handle.dropped.tolist() == [max(0, len(r) - out.shape[0]) for r in every],
    }


def quantized_rows(layer: Layer, dtype: torch.dtype, form: Form = None) -> dict[str, bool]:
    """Compare rows of e4m3 and their scales with the definition, and combine them."""
    group, me, count = _group(form)
    ids, num_experts = layer.ids(count), count * layer.per_rank
    x = torch.stack([layer.tensors(of=r)[0] for r in range(count)]).to(dtype)
    x[:, 1] = 0
    weights = torch.ones(ids[me].shape)
    (values, scales), offsets, handle = ops.dispatch(
        x[me], ids[me], weights, num_experts=num_experts, capacity=layer.capacity,
        quant="fp8_1x128", group=group,
    )  # fmt: skip
    kept = all_rows(ids, num_experts)[me][: len(values)]
    last = int(offsets[-1])
    right = [quantized(x[row.rank, row.token]) for row in kept]
    by_value = zip(*right, strict=True) if kept else ((), ())
    right_values, right_scales = (torch.stack([*v]) if v else torch.empty(0) for v in by_value)
    products = values.float() * scales.repeat_interleave(128, 1)[:, : layer.hidden]
    out = ops.combine(products, handle)
    all_kept = kept_ids(ids, num_experts, layer.capacity or 1 << 30)[me]
    is_kept = (all_kept >= 0) & (all_kept < num_experts)
    error = (out - is_kept.sum(-1, keepdim=True) * x[me].float()).abs().amax()
    return {
        "type": values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32,
        "shape": scales.shape == (len(values), -(-layer.hidden // 128)),
        "values": torch.equal(values[:last].float().flatten(), right_values.float().flatten()),
        "scales": torch.equal(scales[:last].flatten(), right_scales.flatten()),
        "rest": not (values[last:].float().any() or scales[last:].any()),
        "sum": bool(error <= 0.07 * layer.choices * x[me].float().abs().amax()),
    }


def compiled_exchange(layer: Layer) -> dict[str, bool]:
    """Compare dispatch and combine in one compiled graph with eager calls, and their gradients."""
    me, count = dist.get_rank(), dist.get_world_size()
    ids = layer.ids(count)[me]
    x, weights, *_, grad = layer.tensors(of=me)

    def f(x, ids, weights):
        rows, offsets, handle = ops.dispatch(
            x, ids, weights, num_experts=count * layer.per_rank, capacity=layer.capacity
        )
        (values, scales), *_ = ops.dispatch(
            x.detach(), ids, weights, num_experts=count * layer.per_rank, quant="fp8_1x128"
        )
        total = values.float().sum() + scales.sum()
        return ops.combine(rows.square() * total, handle), offsets

    mine = x.requires_grad_(), weights.requires_grad_()
    results = []
    for function in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        out, offsets = function(x, ids, weights)
        results.append((out, offsets, *torch.autograd.grad((out * grad).sum(), mine)))
    names = "out", "offsets", "x", "weights"
    return {n: torch.allclose(a, b) for n, a, b in zip(names, *results, strict=True)}


def types(dtype: torch.dtype, form: Form = None) -> dict[str, bool]:
    """Compare dispatch and combine of narrow types with sums in fp32, and repeat them. Each node
    rounds its sums."""
    (group, me, count), layer = _group(form), Layer(tokens=9, choices=3)
    nodes = len(form) if isinstance(form, tuple) else 1
    ids = layer.ids(count)[me]
    x, weights, *_ = layer.tensors(of=me)
    x, weights = x.to(dtype), weights.float()
    is_expert = (ids >= 0) & (ids < count * layer.per_rank)
    total = torch.zeros(nodes, *x.shape)
    for node, choice in product(range(nodes), range(layer.choices)):
        is_here = is_expert[:, choice] & (
            ids[:, choice] * nodes // (count * layer.per_rank) == node
        )
        total[node] += torch.where(is_here[:, None], weights[:, choice, None] * x.float(), 0)
    total = total.to(dtype).float().sum(0)
    outs = []
    for _ in range(2):
        received, _, handle = ops.dispatch(
            x, ids, weights, num_experts=count * layer.per_rank, group=group
        )
        outs.append(ops.combine(received, handle, out=torch.empty_like(x)))
    return {"sum": torch.equal(outs[0], total.to(dtype)), "again": torch.equal(*outs)}


def example() -> dict[str, bool]:
    """Train the example for a few steps, and compare its losses with those of one process."""
    module = load_module(EXAMPLE)
    module.STEPS = 12
    me, count = dist.get_rank(), dist.get_world_size()
    losses, right = (torch.tensor(module.train(count, me, parts)) for parts in (True, False))
    return {"losses": torch.allclose(losses, right, rtol=1e-3), "fall": losses[-1] < losses[0] / 2}


def illegal_ids(value: str, form: Form = None) -> None:
    """Let rank 1 name numbers that are no expert, with and without a check."""
    group, me, count = _group(form)
    x, ids = torch.ones(3, 4), torch.tensor([[0, -1], [1, 0], [1, 1]])
    if me == 1:
        ids[1, 1], ids[2, 0] = 2 * count, -2
    for os.environ[CHECK_IDS] in ("0", value):
        try:
            ops.dispatch(x, ids, torch.ones(3, 2), num_experts=2 * count, group=group)
        finally:
            del os.environ[CHECK_IDS]


def other_results() -> None:
    """Combine rows with another number of columns on every rank."""
    me, count = dist.get_rank(), dist.get_world_size()
    ids = torch.zeros(3, 2).int()
    rows, _, handle = ops.dispatch(torch.ones(3, 4), ids, torch.ones(3, 2), num_experts=2 * count)
    ops.combine(torch.ones(len(rows), 5 + me), handle)


def differ(what: str, form: Form = None) -> None:
    """Call with another argument on every rank, and with a new problem: a rank that knows its
    problem does not compare it."""
    (group, me, count), layer = _group(form), Layer(hidden=10)
    x, weights, *_ = layer.tensors(of=me)
    ids = layer.ids(count)[me]
    options: dict[str, Any] = {"num_experts": 2 * count}
    if what == "capacity":
        options["capacity"] = 17 + me
    if what == "columns":
        x = torch.ones(5, 6 + me)
    if what == "tokens":
        x, ids, weights = (tensor[: 1 + me] for tensor in (x, ids, weights))
    if what == "choices":
        ids, weights = (tensor.repeat(1, 1 + me) for tensor in (ids, weights))
    if what == "experts":
        options["num_experts"] *= 2 + me
    if what == "quant":
        options["quant"] = "fp8_1x128" if me else None
    if what == "transport":
        options["transport"] = "nccl" if me else "auto"
    if what == "check":
        os.environ[CHECK_IDS] = str(me % 2)
    try:
        ops.dispatch(x, ids, weights, group=group, **options)
    finally:
        os.environ.pop(CHECK_IDS, None)
