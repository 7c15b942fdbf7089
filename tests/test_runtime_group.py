"""The ranks of a group meet and exchange words through the host."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from tileweave import TileWeaveError
from tileweave.runtime.group import Group


def test_values_come_in_rank_order(every_rank):
    def exchange(group: Group) -> list[str]:
        time.sleep(0.02 * (group.world_size - group.rank))  # the last rank comes first
        return group.exchange("order", f"rank {group.rank}")

    assert every_rank(exchange, 4) == [["rank 0", "rank 1", "rank 2", "rank 3"]] * 4


def test_a_group_of_one_needs_no_store():
    alone = Group(0, 1, 0, torch.device("cpu"), None, None)
    assert alone.exchange("order", "mine") == ["mine"]
    assert alone.meet("order") is None


def test_calls_with_one_topic_meet_in_order(every_rank):
    def exchange(group: Group) -> list[list[str]]:
        return [group.exchange("turn", f"{group.rank}{turn}") for turn in range(20)]

    expected = [[f"0{turn}", f"1{turn}"] for turn in range(20)]
    assert every_rank(exchange) == [expected, expected]


def test_nobody_leaves_a_meeting_before_all_have_come(every_rank):
    came = []

    def meet(group: Group) -> int:
        time.sleep(0.02 * group.rank)
        came.append(group.rank)
        group.meet("here")
        return len(came)

    assert every_rank(meet, 3) == [3, 3, 3]


@pytest.mark.parametrize("method", ["exchange", "meet"])
def test_a_rank_that_never_comes_is_named(every_rank, method):
    def meet(group: Group) -> None:
        if group.rank != 1:
            arguments = ("value",) if method == "exchange" else ()
            getattr(group, method)("harvest", *arguments, timeout_s=0.1)

    first, second, third = every_rank(meet, 3)
    assert second is None
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, TileWeaveError)
        assert str(error) == (
            f"harvest: rank {rank} waited 0.1 s for rank 1; expected every rank to make the same "
            "calls in the same order"
        )


def test_another_failure_of_the_store_is_not_called_a_wait():
    class Lost:
        def set(self, key: str, value: str) -> None:
            pass

        def wait(self, keys: list[str], timeout: object) -> None:
            raise ConnectionError("the store is gone")

    group = Group(0, 2, 0, torch.device("cpu"), None, Lost())
    with pytest.raises(ConnectionError, match="the store is gone"):
        group.meet("here")


JOIN = """
import sys
import torch
import torch.distributed as dist
from tileweave.runtime.group import join

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3)
pair = dist.new_group([0, 2])
if rank != 1:
    group = join(pair)
    print(rank, group.rank, group.world_size, group.exchange("said", f"pair {rank}", 60))
for turn in range(2):
    group = join()
    print(rank, group.rank, group.world_size, group.exchange("said", f"all {turn} {rank}", 60))
dist.barrier()
"""


def test_groups_joined_one_after_the_other_do_not_mix(tmp_path):
    """Not even where some ranks have joined more of them than others."""
    command = [sys.executable, "-c", JOIN]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    alls = [f"['all {turn} 0', 'all {turn} 1', 'all {turn} 2']" for turn in range(2)]
    for rank, (out, err) in enumerate(outputs):
        pair = [f"{rank} {rank // 2} 2 ['pair 0', 'pair 2']"] if rank != 1 else []
        assert out.splitlines() == [*pair, *(f"{rank} {rank} 3 {said}" for said in alls)], err
