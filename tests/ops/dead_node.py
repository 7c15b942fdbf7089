"""Rank of test_dead_node.py, which calls operators on 2 x 2 ranks until another one is killed."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ops.calls_on_mesh import EVERY, public
from tests.ops.meshes import NODES, mesh_of
from tileweave.builtins.errors import TileWeaveError

TIMEOUT_S = 60


def call_in_turn(folder: Path, rank: int, port: int) -> None:
    """Call all operators of a mesh in turn; write the error that ends this, and end the process.

    Args:
        port: port of the store. As under torchrun, no rank serves it, so it outlives all of them.
    """
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, timeout=limit)
    dist.init_process_group("gloo", timeout=limit, world_size=4, rank=rank, store=store)
    calls = [public(name, 4, mesh_of(NODES["2 x 2"])) for name in EVERY]
    try:
        while True:
            for call in calls:
                call()
            (folder / f"called {rank}").touch()
    except TileWeaveError as error:
        (folder / f"error {rank}").write_text(str(error))
        os._exit(1)
