"""The ranks of a group synchronize and exchange bytes through the host."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import tileweave as tw
from tests import warm
from tests.groups import one_rank
from tileweave import TileWeaveError
from tileweave.runtime.host.collectives import run_by_gloo
from tileweave.runtime.host.group import Group, join


def test_values_come_in_rank_order(every_rank):
    def exchange(group: Group) -> list[str]:
        time.sleep(0.02 * (group.world_size - group.rank))  # the last rank comes first
        return group.exchange("order", f"rank {group.rank}")

    assert every_rank(exchange, 4) == [["rank 0", "rank 1", "rank 2", "rank 3"]] * 4


def test_a_group_of_one_needs_no_store():
    alone = one_rank()
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


def test_after_a_failed_exchange_all_ranks_raise_instead_of_mixing_values(every_rank):
    """Rank 1 is no longer waiting when rank 0 makes the call, so later calls would not match."""

    def exchange(group: Group) -> list[str]:
        errors = []
        time.sleep(0.3 * (1 - group.rank))
        for topic in ("first", "second", "third") if group.rank else ("other", "first"):
            begin = time.monotonic()
            with pytest.raises(TileWeaveError) as error:
                group.exchange(topic, "value", timeout_s=0.1 if topic == "first" else 10)
            assert time.monotonic() - begin < 3
            errors.append(str(error.value))
        return errors

    reason = "first: rank 1 waited 0.1 s for rank 0; expected every rank to make the same calls"
    (other, *_), (first, *later) = every_rank(exchange)
    assert first.startswith(reason)
    for error in (other, *later):
        assert f"the ranks are at different calls since an error ({reason}" in error
        assert "expected tw.finalize() and a new process group on all ranks" in error


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


INTERRUPTED = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from tileweave.runtime.host.group import Group

# A shell lets its background processes ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
group = Group(0, 2, 0, torch.device("cpu"), None, dist.FileStore(sys.argv[1], 2))
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    group.meet("harvest")
except KeyboardInterrupt:
    print(f"interrupted after {time.monotonic() - start:.0f} s")
"""


def test_a_wait_can_be_interrupted(tmp_path):
    command = [*warm.python(), "-c", INTERRUPTED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout in {f"interrupted after {seconds} s\n" for seconds in (0, 1, 2)}, done.stderr


def test_a_failed_collective_raises_though_gloo_does_not_call_it_complete():
    # A reduce-scatter of gloo, one of whose ranks was killed, does this.
    failed = Mock(is_completed=lambda: False, wait=Mock(side_effect=RuntimeError("reset by peer")))
    look = Mock(side_effect=AssertionError("it was taken for a collective that runs"))
    with pytest.raises(RuntimeError, match=r"^reset by peer$"):
        run_by_gloo(lambda *_, **__: failed, [], Mock(), look=look)


def test_another_failure_of_the_store_is_not_called_a_wait():
    class Lost:
        def set(self, key: str, value: str) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            raise ConnectionError("the store is gone")

    group = Group(0, 2, 0, torch.device("cpu"), None, Lost())
    with pytest.raises(ConnectionError, match="the store is gone"):
        group.meet("here")


JOIN = """
import sys
import types
import torch
import torch.distributed as dist
from tileweave.runtime.host.group import join

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=sys.argv[1])
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
    """Not even if some ranks have joined more groups than others."""
    command = [*warm.python(), "-c", JOIN]
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


@pytest.fixture
def gpu(monkeypatch):
    """One GPU, which is never used, and no torchrun."""
    for name, value in (
        ("is_available", True), ("device_count", 1), ("current_device", 0), ("set_device", None)
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for variable in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WORLD_SIZE", "many", "init: WORLD_SIZE='many'; expected 1 or more, from torchrun"),
        ("WORLD_SIZE", "", "init: WORLD_SIZE=''; expected 1 or more"),
        ("WORLD_SIZE", "0", "init: WORLD_SIZE='0'; expected 1 or more"),
        ("LOCAL_RANK", "-1", "init: LOCAL_RANK='-1'; expected 0 or more"),
        ("WORLD_SIZE", "2", "init: .*variable RANK expected.*; expected the variables of torchrun"),
    ],
)
def test_variables_that_torchrun_would_not_set(gpu, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(TileWeaveError, match=message):
        join()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("pair", "group='pair': .*; expected the name of a process group"),
        (3, "group=3; expected None, a ProcessGroup, its name, or a DeviceMesh with one axis"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this process is not in it; expected only its ranks"),
    ],
)
def test_groups_without_this_rank_are_refused(gpu, group, message):
    with pytest.raises(TileWeaveError, match=message):
        tw.init(group)


INITIALISE = """
import os
import sys
import types
import warnings
import torch
import torch.distributed as dist
from tileweave.runtime.host.group import join

given, uuid, visible = dist.init_process_group, sys.argv[1], int(sys.argv[2])

def init_process_group(backend, *, device_id, **options):
    print("shared" if device_id is None else device_id, backend)
    given("gloo", **options)

dist.init_process_group = init_process_group
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: visible
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=uuid)
with warnings.catch_warnings(record=True) as warned:
    group = join()
print(group.gpus, group.shares_gpus, *(str(w.message)[:29] for w in warned))
print(os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"))
dist.barrier()
"""
BOTH = "cpu:gloo,cuda:nccl"
SHARED = "tileweave: 2 ranks on 1 GPU(s)"[:29]


@pytest.mark.parametrize(
    ("uuids", "visible", "said"),
    [
        pytest.param("ab", 2, ("cuda:{} " + BOTH, "False", "None"), marks=pytest.mark.long),
        ("ab", 1, ("cuda:0 " + BOTH, "False", "1")),  # each process sees its own
        ("aa", 1, ("shared gloo", "True " + SHARED, "1")),
    ],
)
def test_ranks_know_whether_they_share_a_gpu(tmp_path, uuids, visible, said):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    here = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    here.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    of_rank = [here | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    ranks = [
        subprocess.Popen(
            [*warm.python(), "-c", INITIALISE, uuid, str(visible)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for uuid, environment in zip(uuids, of_rank, strict=True)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=240)
        begun, joined, allowed = said
        expected = [begun.format(rank), f"{tuple(uuids)} {joined}", allowed]
        assert out.splitlines() == expected, err
