"""Functions that test_across_nodes.py runs: four processes on a CPU are the ranks of
several nodes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tileweave as tw
from tests.ops.on_ranks import numbers
from tileweave import ops

OPERATORS = ("all_gather", "reduce_scatter")
ROWS = {"all_gather": 3, "reduce_scatter": 12}
_meshes: dict[tuple[tuple[int, ...], ...], DeviceMesh] = {}


def mesh_of(*nodes: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh with nodes of these ranks."""
    if nodes not in _meshes:
        _meshes[nodes] = DeviceMesh("cpu", torch.tensor(nodes), mesh_dim_names=("node", "local"))
    return _meshes[nodes]


def in_order(nodes: tuple[tuple[int, ...], ...]) -> tuple[list[int], int]:
    """Return the ranks in the order of the result, and the index of this rank."""
    ranks = [rank for node in nodes for rank in node]
    return ranks, ranks.index(dist.get_rank())


def integers(op: str, of: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a rank's input: parts are unaligned, and sums are exact."""
    return (numbers(ROWS[op], 5, of=of, what="x") * 4).round().to(dtype)


def values(op: str, nodes: tuple[tuple[int, ...], ...], where: str) -> dict[str, bool]:
    """Compare a collective of several nodes with one process that has all inputs."""
    ranks, me = in_order(nodes)
    every = [integers(op, rank) for rank in ranks]
    right = torch.cat(every) if op == "all_gather" else sum(every).chunk(len(ranks))[me]
    out = torch.full_like(right, torch.nan) if where == "out" else None
    actual = getattr(ops, op)(every[me], mesh_of(*nodes), out=out)
    return {"result": torch.equal(actual, right), "in out": out is None or actual is out}


def same_as_flat(op: str) -> dict[str, bool]:
    """Compare all supported types with ``torch.distributed`` without nodes."""
    mesh, right = mesh_of((0, 1), (2, 3)), {}
    moved = (torch.uint8, torch.float8_e4m3fn, torch.float64)
    for dtype in moved if op == "all_gather" else (torch.float32, torch.float64, torch.int32):
        x = integers(op, dist.get_rank(), dtype)
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
    actual = ops.reduce_scatter(every[me], mesh_of((0,), (1,), (2,), (3,)))
    return torch.equal(actual, total.to(dtype).chunk(count)[me])


def gradients(op: str, nodes: tuple[tuple[int, ...], ...], compiled: bool) -> dict[str, bool]:
    """Compare gradients, weighted by numbers of each rank, with those without nodes."""
    x = numbers(ROWS[op], 5, of=dist.get_rank(), what="x")
    results = []
    for group in (mesh_of(*nodes), dist.group.WORLD):
        given = x.clone().requires_grad_()

        def f(x, group=group):
            return getattr(ops, op)(x.relu(), group)

        f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
        result = f(given)
        weight = numbers(*result.shape, of=dist.get_rank(), what="weight")
        results.append((result, *torch.autograd.grad((result * weight).sum(), given)))
    (result, gradient), (right, right_gradient) = results
    return {
        "value": torch.allclose(result, right),
        "gradient": torch.allclose(gradient, right_gradient),
    }


def differ() -> None:
    """Call with another shape on one rank."""
    ops.all_gather(torch.ones(2, 3 + (dist.get_rank() == 3)), mesh_of((0, 1), (2, 3)))


def refusals() -> list[str]:
    """Return the messages of illegal calls."""
    mesh, said = mesh_of((0, 1), (2, 3)), []
    cube = DeviceMesh("cpu", torch.arange(4).reshape(2, 2, 1))
    for call in (
        lambda: ops.reduce_scatter(torch.ones(6, 2), mesh),
        lambda: ops.all_gather(torch.ones(2), cube),
        lambda: ops.all_reduce(torch.ones(4), mesh),
        lambda: ops.matmul_reduce_scatter(torch.ones(8, 2), torch.ones(2, 2), mesh),
        lambda: ops.all_gather(torch.ones(2), mesh, transport="ldst"),
        lambda: ops.all_gather(torch.ones(2), mesh, out=torch.ones(4)),
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
        ops.all_gather(torch.ones(2), mesh_of(*nodes))
    except tw.TileWeaveError as error:
        return str(error)
    return ""


def transport() -> str:
    return str(ops.transport_of(ops.all_gather, torch.ones(4), group=mesh_of((0, 1), (2, 3))))
