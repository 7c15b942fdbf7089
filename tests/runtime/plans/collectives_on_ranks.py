"""Functions that test_collectives.py runs on each of four ranks, as nodes of two, with gloo."""

import pytest
import tilelang.language as T
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tileweave as tw
from tests.runtime.plans.fakes import Ranks
from tileweave.runtime.host.group import Group

NODES, LOCAL, N = 2, 2, 6


@tw.plan
def gather_and_sum(
    p: tw.PlanBuilder,
    x: T.Tensor((N,), "float32"),
    pieces: T.Tensor((NODES, N), "float32"),
    other: T.Tensor((N,), "float32"),
    neighbors: T.Tensor((LOCAL, N), "float32"),
    part: T.Tensor((N,), "float32"),
    total: T.Tensor((2, N), "float32"),
):
    p.collective("all_gather", pieces, x, stream="nodes")
    p.collective("all_gather", neighbors, x, across="ranks")
    p.wait_stream("nodes")
    p.copy(other, pieces[1 - p.node])
    p.collective("reduce_scatter", part, pieces)
    p.collective("all_reduce", total[0], part)
    p.copy(total[1], x)
    p.collective("all_reduce", total[1], total[1])


@tw.plan
def gather_bytes(
    p: tw.PlanBuilder, x: T.Tensor((N,), "float8_e4m3fn"), out: T.Tensor((2, N), "float8_e4m3fn")
):
    p.collective("all_gather", out, x)


def mesh_of(ranks: list[list[int]]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("node", "local"))


def on_mesh(ranks: list[list[int]]) -> tuple:
    """Return what the plans write on this rank, and what the host of a plan logs."""
    mesh, monkeypatch = mesh_of(ranks), pytest.MonkeyPatch()
    local = mesh.get_group("local")
    rank = dist.get_rank(local)
    world = Ranks(LOCAL, monkeypatch)
    world.join(Group(rank, LOCAL, rank, torch.device("cpu"), local, None))
    try:
        x = torch.full((N,), 10.0 ** dist.get_rank())
        results = [torch.zeros(shape) for shape in [(NODES, N), N, (LOCAL, N), N, (2, N)]]
        plan = gather_and_sum.on(mesh)
        for _ in range(2):
            plan(x, *results)
        narrow = torch.zeros(2, N).to(torch.float8_e4m3fn)
        gather_bytes.on(mesh)(torch.full((N,), 1.0 + dist.get_rank()).to(narrow.dtype), narrow)
        # Equal elements, so one of each row is enough.
        return (plan.node, plan.nodes), *(t[..., 0].tolist() for t in (*results, narrow.float()))
    finally:
        monkeypatch.undo()


def refused_order() -> str:
    """Return why a mesh in another order than that of ranks is refused."""
    mesh = mesh_of([[1, 0], [3, 2]])
    with pytest.raises(tw.TileWeaveError) as error:
        gather_and_sum.on(mesh)
    return str(error.value)


def one_node() -> tuple:
    """Return node and nodes of a plan on a mesh of one node, and whether it has the group."""
    plan = gather_and_sum.on(mesh_of([[0, 1, 2, 3]]))
    return plan.node, plan.nodes, plan._nodes is None
