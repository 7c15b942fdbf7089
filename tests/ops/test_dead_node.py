"""A node, or a rank of it, that is killed ends all other ranks, which name it."""

from __future__ import annotations

import re
import time
from multiprocessing import get_context

import pytest
import torch.distributed as dist

from tests.ops.dead_node import call_in_turn
from tileweave.ops.core.registry import OPERATORS

LIMIT_S = 20.0
"""Most seconds from the kill until all ranks have ended; they end in one or two if they have a
processor. The time limit of gloo is 60 s."""
START_S = 300.0
VICTIMS = {"a node": (2, 3), "a rank": (3,), "the first rank": (0,)}


@pytest.mark.long
@pytest.mark.parametrize("killed", VICTIMS)
def test_survivors_end_and_name_the_dead(tmp_path, killed):
    context, victims = get_context("forkserver"), VICTIMS[killed]
    context.set_forkserver_preload(["tests.ops.on_ranks"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=call_in_turn, args=(tmp_path, rank, store.port)) for rank in range(4)
    ]
    for process in ranks:
        process.start()
    try:
        began = time.monotonic()
        while len([*tmp_path.glob("called *")]) < 4:
            assert time.monotonic() < began + START_S, "the ranks do not start"
            time.sleep(0.05)
        for victim in victims:
            ranks[victim].kill()
        killed_at = time.monotonic()
        for process in ranks:
            process.join(max(0.1, killed_at + LIMIT_S - time.monotonic()))
        took = time.monotonic() - killed_at
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    print(f"{killed}: all ended after {took:.1f} s")
    assert codes == [-9 if rank in victims else 1 for rank in range(4)]
    dead = "|".join(map(str, victims))
    for rank in set(range(4)) - set(victims):
        message = (tmp_path / f"error {rank}").read_text()
        assert re.match(rf"({'|'.join(OPERATORS)}|sp_attention): ", message), message
        assert re.search(rf"\(global ranks? [\d, ]*\b({dead})\b", message), message
        assert "; expected every rank to run and to make the same calls" in message
