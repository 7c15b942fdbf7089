"""Meshes of nodes and ranks of a node, made of the processes of a test."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tileweave.ops.core.across_nodes import Mesh

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node."""
NODES: dict[str, Nodes] = {
    "2 x 2": ((0, 1), (2, 3)),
    "2 x 2, across": ((0, 2), (1, 3)),
    "4 x 1": ((0,), (1,), (2,), (3,)),
    "1 x 4": ((0, 1, 2, 3),),
}
THREE: dict[str, Nodes] = {"3 x 1": ((0,), (1,), (2,)), "1 x 3": ((0, 1, 2),)}
_meshes: dict[Nodes, DeviceMesh] = {}


def mesh_of(nodes: Nodes) -> DeviceMesh:
    """Return the mesh of these nodes."""
    if nodes not in _meshes:
        _meshes[nodes] = DeviceMesh("cpu", torch.tensor(nodes), mesh_dim_names=("node", "local"))
    return _meshes[nodes]


def in_order(nodes: Nodes) -> tuple[int, int]:
    """Return the index of this rank in the order of results, and the number of ranks."""
    ranks = [rank for node in nodes for rank in node]
    return ranks.index(dist.get_rank()), len(ranks)


def recorded_mesh(log: list[str]) -> Mesh:
    """Return a mesh of 3 x 2 ranks whose transfers and waits are only written to ``log``."""

    def start(sent, target, received, source) -> list[SimpleNamespace]:
        log.append("start")
        return [SimpleNamespace(wait=lambda: log.append("wait"))]

    return Mesh(1, 3, 0, 2, start, lambda *_: log.append("broadcast"))
