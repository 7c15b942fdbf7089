"""Mesh that the processes of ``torchrun ... -m tileweave doctor`` form, and its connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .group import Group, from_torchrun
from .topology import Topology

_PATIENCE_S = 60.0
"""Time in which all processes must have started."""
Links = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Node:
    """Ranks of one node.

    Attributes:
        links: ``links[i][j]``: connection of the i-th and the j-th of ``ranks``, such as ``NV18``
            for 18 NVLink links.
        problems: what does not work there, and why.
    """

    host: str
    ranks: tuple[int, ...]
    links: Links
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Mesh:
    """Nodes in the order of their first ranks."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        sizes = {len(node.ranks) for node in self.nodes}
        shape = f"{len(self.nodes)} x {sizes.pop()}" if len(sizes) == 1 else "unequal nodes"
        yield f"Mesh of nodes and ranks of a node: {shape}"
        for number, node in enumerate(self.nodes):
            yield f"  node {number}  {node.host}, {_ranks(node.ranks)}"
        for links, numbers in self._by_links().items():
            nodes = ("node " if len(numbers) == 1 else "nodes ") + ", ".join(map(str, numbers))
            yield from ("", f"Connections of two ranks, by their places in {nodes}", *_table(links))
        if len(self.nodes) > 1:
            yield from ("", "Connection of ranks of different nodes: torch.distributed")
        if found := self.problems:
            yield from ("", "What does not work on this mesh, and why")
            yield from (f"  {problem}" for problem in found)

    def _by_links(self) -> dict[Links, list[int]]:
        """Return the numbers of the nodes with equal connections."""
        numbers: dict[Links, list[int]] = {}
        for number, node in enumerate(self.nodes):
            numbers.setdefault(node.links, []).append(number)
        return numbers

    @property
    def problems(self) -> list[str]:
        """Faults of all nodes but the first, whose own report has its faults."""
        problems = [f"{node.host}: {text}" for node in self.nodes[1:] for text in node.problems]
        expected = len(self.nodes[0].ranks)
        for node in self.nodes:
            if len(node.ranks) != expected:
                problems.append(
                    f"DeviceMesh of nodes: {node.host} has {_ranks(node.ranks)}; expected "
                    f"{expected} ranks as on {self.nodes[0].host}"
                )
            elif node.ranks[-1] - node.ranks[0] >= len(node.ranks):
                problems.append(
                    f"init_device_mesh of nodes: {node.host} has {_ranks(node.ranks)}; expected "
                    "consecutive ranks, or DeviceMesh with the ranks of each node"
                )
        return problems


def find_mesh(machine: Topology, problems: Sequence[str]) -> Mesh | None:
    """Return the mesh on rank 0 of several processes; None on the others. Collective.

    Args:
        problems: what does not work on this machine.
    """
    import torch
    import torch.distributed as dist

    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore("tileweave/doctor", store)
    local_rank = from_torchrun("LOCAL_RANK", 0)
    group = Group(rank, world_size, local_rank, torch.device("cpu"), None, store)
    return gather(group, socket.gethostname(), machine, problems)


def gather(group: Group, host: str, machine: Topology, problems: Sequence[str]) -> Mesh | None:
    """Return the mesh of the ranks of a group on rank 0; None on the others. Collective."""
    gpus = [gpu.uuid for gpu in machine.gpus]
    member = {
        "host": host,
        "gpu": gpus[group.local_rank % len(gpus)] if gpus else "",
        "gpus": gpus,
        "nvlinks": machine.nvlinks,
        "p2p": machine.p2p,
        "problems": list(problems),
    }
    value = json.dumps(member)
    group.publish("doctor", value)
    if group.rank:
        return None
    members = [json.loads(text) for text in group.collect("doctor", value, _PATIENCE_S)]
    hosts: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        hosts.setdefault(member["host"], []).append(rank)
    return Mesh(tuple(_node(host, ranks, members) for host, ranks in hosts.items()))


def _node(host: str, ranks: list[int], members: list[dict[str, Any]]) -> Node:
    links = tuple(
        tuple("-" if i == j else _connection(members[i], members[j]["gpu"]) for j in ranks)
        for i in ranks
    )
    return Node(host, tuple(ranks), links, tuple(members[ranks[0]]["problems"]))


def _connection(member: dict[str, Any], gpu: str) -> str:
    """Return how the GPU of a rank is connected to another GPU of its node."""
    if not member["gpu"] or not gpu:
        return "no GPU"
    if member["gpu"] == gpu:
        return "same"
    if gpu not in member["gpus"]:
        return "hidden"
    i, j = (member["gpus"].index(uuid) for uuid in (member["gpu"], gpu))
    if links := member["nvlinks"][i][j]:
        return f"NV{links}"
    return "P2P" if member["p2p"][i][j] else "none"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _table(links: Links) -> list[str]:
    places = [str(place) for place in range(len(links))]
    rows = [["", *places], *([place, *row] for place, row in zip(places, links, strict=True))]
    return ["  " + "".join(f"{cell:>7}" for cell in row) for row in rows]
