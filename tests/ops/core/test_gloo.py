"""A collective by gloo returns when gloo's thread has released its tensors.

The thread needs Python's lock to release them. In an interpreter that ends, the thread never gets
the lock, and the process aborts.
"""

from __future__ import annotations

import threading
import time
import types

import pytest
import torch

from tests.ops import on_ranks
from tileweave.ops.core import nccl
from tileweave.runtime.host import collectives

COLLECTIVES = {
    "all_gather": lambda x, y, group: nccl.all_gather_into(x[:1], y, group),
    "reduce_scatter": lambda x, y, group: nccl.reduce_scatter(x, y[:1], group),
    "all_reduce": lambda x, y, group: nccl.all_reduce(x, group),
    "all_to_all": lambda x, y, group: nccl.all_to_all(x, y, group),
}
HELD_S = 0.2


class ProcessGroup:
    """Stand-in for a process group with one backend.

    Attributes:
        devices: types of the devices for which the backend was looked for.
    """

    def __init__(self, backend: str) -> None:
        self.backend, self.devices = types.SimpleNamespace(name=lambda: backend), []

    def _get_backend(self, device: torch.device) -> types.SimpleNamespace:
        self.devices.append(device.type)
        return self.backend


def group_of(backend: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(process_group=ProcessGroup(backend), world_size=2)


@pytest.fixture
def released(monkeypatch) -> threading.Event:
    """Event that is set when a thread has released the tensors of a collective."""
    event = threading.Event()

    def hold(tensors: list[torch.Tensor]) -> None:
        time.sleep(HELD_S)
        tensors.clear()
        event.set()

    def collective(*tensors: torch.Tensor, group: object, async_op: bool = False) -> object:
        thread = threading.Thread(target=hold, args=([*tensors],))
        thread.start()
        return types.SimpleNamespace(wait=lambda timeout: None)

    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(nccl, name, collective)
    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(nccl.dist, name, collective)
    return event


@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_tensors_are_released_when_a_collective_returns(released, what, backend):
    x, y = torch.ones(2, 4), torch.ones(2, 4)
    COLLECTIVES[what](x, y, group_of(backend))
    assert released.wait(0.05) == (backend == "gloo")
    assert released.wait(10 * HELD_S)


def test_a_reference_of_the_caller_is_not_waited_for(monkeypatch):
    saved = []

    def all_reduce(x: torch.Tensor, group: object, async_op: bool) -> object:
        saved.append(x)
        return types.SimpleNamespace(wait=lambda timeout: None)

    monkeypatch.setattr(nccl.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(collectives, "_RELEASE_S", 0.1)
    nccl.all_reduce(torch.ones(2), group_of("gloo"))
    assert len(saved) == 1


@pytest.fixture
def two():
    """Separate ranks, because a collective that never ends stays in their process group."""
    ranks = on_ranks.Ranks(2)
    yield ranks
    ranks.close()


def test_ranks_that_differ_after_known_calls_are_told_within_seconds(two):
    """Later calls raise at once: one rank is in a collective that the other has not begun."""
    differs = (
        "all_reduce: the ranks disagree (rank 0: all_reduce of (2, 3) float32, nccl; "
        "rank 1: all_reduce of (2, 4) float32, nccl); expected the same shapes"
    )
    for first, *later in two.run(on_ranks.exchange_differs_after_known_calls):
        assert first[0].startswith(differs) and first[1] < 20
        assert "a collective of this process group is still pending" in first[0]
        assert len(later) == 2
        for message, seconds in later:
            start = f"all_reduce: the ranks are at different calls since an error ({differs}"
            assert message.startswith(start) and "expected tw.finalize()" in message
            assert seconds < 0.5


@pytest.mark.long
def test_ranks_that_are_late_are_waited_for(three):
    assert three.run(on_ranks.late_after_known_calls, 2.5) == [48.0] * 3


@pytest.mark.long
def test_a_group_works_after_all_ranks_were_told_that_they_differ(three):
    for message, total in three.run(on_ranks.differ_while_a_rank_is_late, 2.5):
        assert message.startswith("all_reduce: the ranks disagree (rank 0: all_reduce of (7, 3)")
        assert total == 42


def test_a_backend_is_looked_for_once():
    group, other = ProcessGroup("gloo"), ProcessGroup("nccl")
    for device in ("cpu", "cuda", "cpu"):
        assert collectives.uses_gloo(group, torch.device(device))
        assert not collectives.uses_gloo(other, torch.device(device))
    assert group.devices == other.devices == ["cpu", "cuda"]
