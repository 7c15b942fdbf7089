"""Functions that test_across_nodes.py runs: processes on a CPU are the ranks of several nodes.

Inputs are numbered by the place of a rank in the order of results, not by its rank.
"""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tileweave as tw
from tests.ops.collectives.exchanges import EXCHANGES, exchange_by_one
from tests.ops.meshes import NODES, Nodes, in_order, mesh_of
from tests.ops.on_ranks import numbers
from tileweave import ops
from tileweave.ops.core.registry import OPERATORS as COLLECTIVES

OPERATORS = ("all_gather", "reduce_scatter")
TWO_BY_TWO = NODES["2 x 2"]


def integers(shape: tuple[int, ...], of: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a rank's input. Its sums are exact."""
    return (numbers(*shape, of=of, what="x") * 4).round().to(dtype)


def unaligned(count: int, what: str = "all_gather") -> tuple[int, ...]:
    """Return the shape of an input with unaligned parts for ``count`` ranks."""
    return EXCHANGES[what].shape(3 * count, count)


def values(what: str, nodes: Nodes, where: str) -> dict[str, bool]:
    """Compare a collective of several nodes with one process that has all inputs."""
    me, count = in_order(nodes)
    every = [integers(unaligned(count, what), place) for place in range(count)]
    right = exchange_by_one(every, what)[me]
    out = torch.full_like(right, torch.nan) if where == "out" else None
    op, options = getattr(ops, what.split()[0]), EXCHANGES[what].options
    actual = op(every[me], *options, mesh_of(nodes), out=out)
    return {"result": torch.equal(actual, right), "in out": out is None or actual is out}


def values_by_all_ranks(what: str, nodes: Nodes) -> dict[str, bool]:
    """Compare a collective that declares nothing for several nodes."""
    collective = COLLECTIVES[what.split()[0]]
    with mock.patch.object(collective, "across", None):
        return values(what, nodes, "new")


def values_by_some_ranks() -> dict[str, bool]:
    """Compare a collective of two of three ranks that declares nothing for several nodes."""
    nodes = ((0,), (2,))
    mesh_of(nodes)  # all ranks make its groups
    return {} if dist.get_rank() == 1 else values_by_all_ranks("all_gather", nodes)


def in_place() -> dict[str, bool]:
    """Results that overlap the input, where an operator allows it."""
    me, count = in_order(TWO_BY_TWO)
    every, mesh = [integers(unaligned(count), place) for place in range(count)], mesh_of(TWO_BY_TWO)
    rows = torch.cat(every)
    own = rows.chunk(count)[me].copy_(every[me])
    summands = torch.arange(8.0 * count).view(count, 8)
    part, total = summands[me : me + 1], count * summands[me : me + 1]
    results = {
        "all_gather": (ops.all_gather(own, mesh, out=rows), torch.cat(every)),
        "all_reduce": (ops.all_reduce(x := every[me].clone(), mesh, out=x), sum(every)),
        "reduce_scatter": (ops.reduce_scatter(summands, mesh, out=part), total),
        "broadcast": (ops.broadcast(x := every[me].clone(), 2, mesh, out=x), every[2]),
    }
    return {name: torch.equal(actual, right) for name, (actual, right) in results.items()}


def same_as_flat(op: str) -> dict[str, bool]:
    """Compare all supported types with ``torch.distributed`` without nodes."""
    mesh, right = mesh_of(TWO_BY_TWO), {}
    moved = (torch.uint8, torch.float8_e4m3fn, torch.float64)
    for dtype in moved if op == "all_gather" else (torch.float32, torch.float64, torch.int32):
        x = integers(unaligned(4), dist.get_rank(), dtype)
        actual, flat = (
            getattr(ops, op)(x, group, transport="nccl") for group in (mesh, dist.group.WORLD)
        )
        right[str(dtype)] = torch.equal(actual.view(torch.uint8), flat.view(torch.uint8))
    return right


def order_of_sums(dtype: torch.dtype) -> bool:
    """Return whether four nodes of one rank add in fp32: the own value, then the right
    neighbor's."""
    me, count = dist.get_rank(), dist.get_world_size()
    every = [numbers(400, of=rank, what="sums").to(dtype) for rank in range(count)]
    total = every[me].float()
    for step in range(1, count):
        total = total + every[(me + step) % count].float()
    actual = ops.reduce_scatter(every[me], mesh_of(NODES["4 x 1"]))
    return torch.equal(actual, total.to(dtype).chunk(count)[me])


def gradients(what: str, nodes: Nodes, compiled: bool) -> dict[str, bool]:
    """Compare results and gradients with one process.

    Weights differ between ranks; for an all-reduce they are equal.
    """
    (me, count), op = in_order(nodes), getattr(ops, what.split()[0])
    every = [
        numbers(*unaligned(count, what), of=place, what="x").requires_grad_()
        for place in range(count)
    ]
    results = exchange_by_one([x.relu() for x in every], what)
    is_equal = what == "all_reduce"
    weights = [
        numbers(*y.shape, of=0 if is_equal else place, what="weight")
        for place, y in enumerate(results)
    ]
    loss = sum((y * w).sum() for y, w in zip(results, weights, strict=True))
    loss = loss / count if is_equal else loss
    (right,) = torch.autograd.grad(loss, every[me], materialize_grads=True)
    mesh = mesh_of(nodes)

    def f(x):
        return op(x.relu(), *EXCHANGES[what].options, mesh)

    torch.compiler.reset()
    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    x = every[me].detach().clone().requires_grad_()
    result = f(x)
    (gradient,) = torch.autograd.grad((result * weights[me]).sum(), x)
    return {
        "value": torch.allclose(result, results[me]),
        "gradient": torch.allclose(gradient, right),
    }


def differ() -> None:
    """Call with another shape on one rank."""
    ops.all_gather(torch.ones(2, 3 + (dist.get_rank() == 3)), mesh_of(TWO_BY_TWO))


def refusals() -> list[str]:
    """Return the messages of illegal calls."""
    mesh, said = mesh_of(TWO_BY_TWO), []
    cube = DeviceMesh("cpu", torch.arange(4).reshape(2, 2, 1))
    for call in (
        lambda: ops.reduce_scatter(torch.ones(6, 2), mesh),
        lambda: ops.all_gather(torch.ones(2), cube),
        lambda: ops.all_gather(torch.ones(2), mesh, transport="ldst"),
        lambda: ops.all_reduce(torch.ones(2), mesh, transport="copy_engine"),
        lambda: ops.all_gather(torch.ones(2), mesh, out=torch.ones(4)),
        lambda: ops.broadcast(torch.ones(2), 4, mesh),
        lambda: tw.tune(ops.matmul_all_reduce, [(8, 8, 8)], group=mesh),
    ):
        try:
            call()
            said.append("")
        except tw.TileWeaveError as error:
            said.append(str(error))
    return said


def other_order(*nodes: tuple[int, ...]) -> str:
    """Return the message for a mesh whose ranks rise along one axis and not along the other."""
    try:
        ops.all_gather(torch.ones(2), mesh_of(nodes))
    except tw.TileWeaveError as error:
        return str(error)
    return ""


def dead_node() -> None:
    """End the process of node 1 of 2 after a first call."""
    nodes = ((0,), (1,))
    ops.all_gather(torch.ones(2), mesh_of(nodes))
    if dist.get_rank() == 1:
        os._exit(1)
    ops.all_gather(torch.ones(2), mesh_of(nodes))


def transport() -> str:
    return str(ops.transport_of(ops.all_gather, torch.ones(4), group=mesh_of(TWO_BY_TWO)))
