"""Functions that test_across_nodes.py runs: processes on a CPU are the ranks of several nodes.

Inputs are numbered by the place of a rank in the order of results, not by its rank.
"""

from __future__ import annotations

from typing import Any

import torch

import tileweave as tw
from tests.ops.meshes import NODES, Nodes, in_order, mesh_of
from tests.ops.on_ranks import numbers
from tileweave import ops

ROWS, N, K = 3, 5, 7
FP8 = torch.float8_e4m3fn
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(op: str, place: int, count: int) -> Operands:
    """Return a rank's a, b and bias. The number of rows of a sum is no multiple of the ranks."""
    rows = {"all_gather_matmul": ROWS, "matmul_reduce_scatter": ROWS * count}.get(op, 2 * count + 1)
    owner = place if op == "all_gather_matmul" else 0  # the bias of a sum is equal on all ranks
    return (
        numbers(rows, K, of=place, what="a"),
        numbers(K, N, of=place, what="b"),
        numbers(N, of=owner, what="bias"),
    )


def by_one(op: str, every: list[Operands]) -> list[torch.Tensor]:
    """Return the result of each rank, computed by one process from all operands."""
    if op == "all_gather_matmul":
        rows = torch.cat([a for a, *_ in every])
        return [rows @ b + bias for _, b, bias in every]
    total = sum(a @ b for a, b, _ in every) + every[0][2]
    return [total] * len(every) if op == "matmul_all_reduce" else list(total.chunk(len(every)))


def values(op: str, nodes: Nodes, where: str) -> dict[str, bool]:
    """Compare an operator on several nodes with one process."""
    me, count = in_order(nodes)
    every = [operands(op, place, count) for place in range(count)]
    (a, b, bias), right = every[me], by_one(op, every)[me]
    out = torch.full_like(right, torch.nan) if where == "out" else None
    actual = getattr(ops, op)(a, b, mesh_of(nodes), bias=bias, out=out)
    return {"result": torch.allclose(actual, right), "in out": out is None or actual is out}


def rows(nodes: Nodes, where: str) -> dict[str, bool]:
    """Compare the gathered rows and their product with one process."""
    me, count = in_order(nodes)
    every = [operands("all_gather_matmul", place, count) for place in range(count)]
    right, (a, b, _) = torch.cat([a for a, *_ in every]), every[me]
    out = a.new_empty(len(right), N) if where == "out" else None
    c, gathered = ops.all_gather_matmul(a, b, mesh_of(nodes), out=out, return_gathered=True)
    return {"rows": torch.equal(gathered, right), "product": torch.allclose(c, right @ b)}


def gradients(op: str, nodes: Nodes, compiled: bool) -> dict[str, bool]:
    """Compare gradients of all operands with one process.

    Weights differ between ranks, except for a sum that all ranks receive.
    """
    me, count = in_order(nodes)
    every = [[x.requires_grad_() for x in operands(op, place, count)] for place in range(count)]
    is_sum = op != "all_gather_matmul"
    if is_sum:
        every = [[a, b, every[0][2]] for a, b, _ in every]
    results = by_one(op, [(a.sin(), b, bias) for a, b, bias in every])
    is_equal = op == "matmul_all_reduce"
    weights = [
        numbers(*y.shape, of=0 if is_equal else place, what="weight")
        for place, y in enumerate(results)
    ]
    loss = sum((y * w).sum() for y, w in zip(results, weights, strict=True))
    loss = loss / count if is_equal else loss
    rights = torch.autograd.grad(loss, every[me])
    mesh = mesh_of(nodes)

    def f(a, b, bias):
        return getattr(ops, op)(a.sin(), b, mesh, bias=bias)

    torch.compiler.reset()
    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    mine = [x.detach().clone().requires_grad_() for x in every[me]]
    result = f(*mine)
    actual = list(torch.autograd.grad((result * weights[me]).sum(), mine))
    if op == "matmul_reduce_scatter":  # each rank has the gradient of its rows
        rights = [*rights[:2], weights[me].sum(0)]
    return {"value": torch.allclose(result, results[me])} | {
        name: torch.allclose(x, y)
        for name, x, y in zip(("a", "b", "bias"), actual, rights, strict=True)
    }


def gradients_of_rows(nodes: Nodes) -> dict[str, bool]:
    """Compare gradients through the product and the gathered rows with one process."""
    me, count = in_order(nodes)
    every = [
        [x.requires_grad_() for x in operands("all_gather_matmul", place, count)[:2]]
        for place in range(count)
    ]
    weights = [numbers(count * ROWS, N + K, of=place, what="weight") for place in range(count)]
    whole = torch.cat([a for a, _ in every])
    loss = sum(
        (torch.cat([whole @ b, whole], 1) * weight).sum()
        for (_, b), weight in zip(every, weights, strict=True)
    )
    rights = torch.autograd.grad(loss, every[me])
    mine = [x.detach().clone().requires_grad_() for x in every[me]]
    both = ops.all_gather_matmul(*mine, mesh_of(nodes), return_gathered=True)
    actual = torch.autograd.grad((torch.cat(both, 1) * weights[me]).sum(), mine)
    pairs = zip("ab", actual, rights, strict=True)
    return {name: torch.allclose(x, y) for name, x, y in pairs}


def fp8(op: str) -> dict[str, bool]:
    """Compare fp8 operands, with scales and a bias, with one process; all sums are exact."""
    me, count = in_order(NODES["2 x 2"])
    rows = 15 if op == "matmul_all_reduce" else 16

    def integers(*shape: int, of: int, what: str, dtype: torch.dtype = FP8) -> torch.Tensor:
        return (numbers(*shape, of=of, what=what) * 2).round().to(dtype)

    def given(place: int) -> dict[str, Any]:
        shared = place if op == "all_gather_matmul" else 0
        return {
            "a": integers(rows, 16, of=place, what="a"),
            "b": integers(32, 16, of=place, what="b").t(),
            "bias": integers(32, of=shared, what="bias", dtype=torch.float16),
        }

    every = [
        (x["a"].double() * 0.25, x["b"].double() * 2.0, x["bias"].double())
        for x in map(given, range(count))
    ]
    mine = given(me)
    actual = getattr(ops, op)(
        mine["a"], mine["b"], mesh_of(NODES["2 x 2"]), bias=mine["bias"],
        scale_a=torch.tensor(0.25), scale_b=torch.tensor(2.0), out_dtype=torch.float16,
    )  # fmt: skip
    right = by_one(op, every)[me]
    return {"type": actual.dtype == torch.float16, "value": torch.equal(actual.double(), right)}


def refusals() -> list[str]:
    """Return the messages of illegal calls, and the strategy of a legal one."""
    mesh, said = mesh_of(NODES["2 x 2"]), []
    a, b = torch.ones(8, 8), torch.ones(8, 8)
    for call in (
        lambda: ops.matmul_reduce_scatter(torch.ones(6, 8), b, mesh),
        lambda: ops.matmul_all_reduce(a, b, mesh, strategy="fused"),
        lambda: ops.all_gather_matmul(a, b, mesh, out=torch.ones(8, 8)),
        lambda: ops.strategy_of(ops.matmul_all_reduce, a, b, mesh),
    ):
        try:
            said.append(str(call()))
        except tw.TileWeaveError as error:
            said.append(str(error))
    return said
