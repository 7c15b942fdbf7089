"""Functions that test_operator.py runs on each rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.ops.meshes import Nodes, in_order, mesh_of
from tests.ops.on_ranks import numbers, part_of_the_world
from tileweave import ops
from tileweave.ops.norm.problem import Inputs
from tileweave.ops.norm.reference import Results, reference


class Call(NamedTuple):
    """Arguments of a call. Sums of its numbers are exact in all types."""

    shape: tuple[int, ...] = (5, 264)
    dtype: torch.dtype = torch.bfloat16
    quant: str | None = None
    biased: bool = False
    where: str = "new"
    eps: float = 1e-5
    valid: int | None = None

    def rows(self, of: int, what: str = "x") -> torch.Tensor:
        return (numbers(*self.shape, of=of, what=what) * 4).round().clamp(-8, 8).to(self.dtype)

    def inputs(self, of: int) -> Inputs:
        """Return the tensors of one rank."""
        weight, bias = (
            numbers(self.shape[-1], of=0, what=what).to(self.dtype) for what in ("weight", "bias")
        )
        scale = torch.tensor([0.05]) if self.quant == "fp8" else None
        residual = self.rows(0, "residual")
        num_tokens = None if self.valid is None else torch.tensor([self.valid], dtype=torch.int32)
        bias = bias if self.biased else None
        return Inputs(self.rows(of), residual, weight, bias, scale, num_tokens)

    def results(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Return the arguments ``out`` and ``residual_out``."""
        dtype = torch.float8_e4m3fn if self.quant else self.dtype
        return {
            "new": {},
            "out": {
                "out": torch.empty(self.shape, dtype=dtype),
                "residual_out": torch.empty(self.shape, dtype=self.dtype),
            },
            "residual": {"residual_out": inputs.residual},
            "in place": {"out": inputs.x, "residual_out": inputs.residual},
            "crossed": {"out": inputs.residual, "residual_out": inputs.x},
        }[self.where]

    def __call__(self, inputs: Inputs, group: Any = None) -> Results:
        """Call the operator."""
        x, residual, weight, bias, scale, num_tokens = inputs
        results = self.results(inputs)
        out, *scales, residual_out = ops.all_reduce_rms_norm(
            x, residual, weight, self.eps, bias=bias, quant=self.quant, scale=scale,
            num_tokens=num_tokens, group=group, **results,
        )  # fmt: skip
        assert out is results.get("out", out)
        assert residual_out is results.get("residual_out", residual_out)
        return Results(out, residual_out, *scales)

    def valid_rows(self, results: Results) -> Results:
        """Return the results of the valid rows."""
        if self.valid is None:
            return results
        return Results(*(t if t is None else t[: self.valid] for t in results))


def compare(actual: Results, right: Results) -> dict[str, bool]:
    """Compare results bit by bit."""
    verdicts = {"scales": (actual.scales is None) == (right.scales is None)}
    for name, one, other in zip(Results._fields, actual, right, strict=True):
        if one is not None and other is not None:
            same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            verdicts[name] = same and one.dtype == other.dtype
    return verdicts


def values(call: Call, form: str | None, compiled: bool) -> dict[str, bool]:
    """Compare a call with the definition."""
    group = part_of_the_world(form) if form else None
    me, count = dist.get_rank(), 2 if form else dist.get_world_size()
    right = reference([call.rows(r) for r in range(count)], call.inputs(me), call.eps, call.quant)
    inputs = call.inputs(me)
    given = [None if t is None else t.clone() for t in inputs]
    if compiled:
        torch._dynamo.reset()  # calls differ in their options, too many for one cache
        results = torch.compile(call, backend="aot_eager", fullgraph=True)(inputs, group)
    else:
        results = call(inputs, group)
    written = call.where in ("residual", "in place", "crossed")
    pairs = [(t, g) for t, g in zip(inputs, given, strict=True) if t is not None]
    kept = all(torch.equal(t, g) for t, g in pairs)
    verdicts = compare(call.valid_rows(results), call.valid_rows(right))
    if call.valid is not None:
        verdicts["padding"] = all(torch.equal(t[call.valid :], g[call.valid :]) for t, g in pairs)
    return verdicts | {"inputs": kept or written}


def one_rank(call: Call) -> dict[str, bool]:
    """Compare a call of a single process with the definition."""
    right = reference([call.rows(0)], call.inputs(0), call.eps, call.quant)
    return compare(call.valid_rows(call(call.inputs(0))), call.valid_rows(right))


def on_mesh(call: Call, nodes: Nodes) -> dict[str, bool]:
    """Compare a call of several nodes with the definition."""
    me, count = in_order(nodes)
    right = reference([call.rows(r) for r in range(count)], call.inputs(me), call.eps, call.quant)
    return compare(call(call.inputs(me), mesh_of(nodes)), right)


def program_on_mesh(nodes: Nodes) -> None:
    ops.all_reduce_rms_norm(*Call().inputs(0)[:3], group=mesh_of(nodes), strategy="one_shot")


def differ(what: str) -> None:
    """Call with another argument on every rank. No rank has made its call before: a difference
    between known and new calls would fail the group."""
    me, call = dist.get_rank(), Call()
    if what == "eps":
        call = call._replace(eps=2e-5 * (1 + me))
    elif what == "tokens":
        call = call._replace(shape=(11 + me, 264))
    elif what == "quant":
        call = call._replace(shape=(17, 264), quant="fp8_1x128" if me else None)
    call(call.inputs(me))
