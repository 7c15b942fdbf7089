"""The mesh that ``tileweave doctor`` reports under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_doctor import H200, L4, machine
from tileweave.runtime.host.mesh_report import Mesh, gather
from tileweave.runtime.host.topology import Topology

CHECKOUT = Path(__file__).resolve().parents[2]


def mesh_of(every_rank, hosts: list[str], machines: list[Topology], problems=()) -> Mesh:
    """Return the mesh of ranks with these hosts and machines."""

    def run(group):
        return gather(group, hosts[group.rank], machines[group.rank], problems)

    local_size = hosts.count(hosts[0])
    first, *others = every_rank(run, len(hosts), local_size)
    assert others == [None] * len(others)
    assert isinstance(first, Mesh), first
    return first


def test_equal_nodes_are_reported_once(every_rank):
    mesh = mesh_of(every_rank, ["a", "a", "b", "b"], [machine(H200, L4)] * 4, ["x: y"])
    assert str(mesh) == (
        "Mesh of nodes and ranks of a node: 2 x 2\n"
        "  node 0  a, ranks 0 to 1\n"
        "  node 1  b, ranks 2 to 3\n"
        "\n"
        "Connections of two ranks, by their places in nodes 0, 1\n"
        "               0      1\n"
        "        0      -   NV18\n"
        "        1   NV18      -\n"
        "\n"
        "Connection of ranks of different nodes: torch.distributed\n"
        "\n"
        "What does not work on this mesh, and why\n"
        "  b: x: y"
    )


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (machine(H200, L4), "NV18"),
        (machine(H200, L4, links=0), "P2P"),
        (machine(H200, L4, links=0, p2p=False), "none"),
        (machine(H200), "same"),
        (Topology(), "no GPU"),
    ],
)
def test_connections(every_rank, topology, expected):
    (node,) = mesh_of(every_rank, ["a", "a"], [topology] * 2).nodes
    assert node.links == (("-", expected), (expected, "-"))


def test_gpus_that_another_rank_does_not_see(every_rank):
    (node,) = mesh_of(every_rank, ["a", "a"], [machine(H200), machine(L4)]).nodes
    assert node.links == (("-", "hidden"), ("hidden", "-"))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (
            ["a", "a", "b"],
            "DeviceMesh of nodes: b has rank 2; expected 2 ranks as on a",
        ),
        (
            ["a", "b", "a", "b"],
            "init_device_mesh of nodes: a has ranks 0, 2; expected consecutive ranks, or "
            "DeviceMesh with the ranks of each node",
        ),
    ],
)
def test_nodes_of_which_no_mesh_can_be_made(every_rank, hosts, expected):
    assert expected in str(mesh_of(every_rank, hosts, [machine(H200, L4)] * len(hosts)))


@pytest.mark.long
def test_torchrun_prints_one_report():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "tileweave", "doctor"],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Everything works") + done.stdout.count("What does not work") == 1
    assert "ranks 0 to 1" in done.stdout
