"""Measured rounds: order and arguments of the calls, and the reported time."""

from __future__ import annotations

import json

import pytest
import torch

from tests.groups import one_rank
from tileweave.runtime.host import measure
from tileweave.runtime.host.group import Group

ALONE = one_rank()


class OfTwo(Group):
    """Rank 0 of two; ``peer`` computes rank 1's answer from rank 0's bytes."""

    def exchange(self, topic, value, timeout_s=300.0):
        return [value, json.dumps({name: ms + 5 for name, ms in json.loads(value).items()})]


@pytest.fixture
def clock(monkeypatch):
    """Set the milliseconds that each call takes."""
    left: list[float] = []

    def milliseconds(self, call):
        return left.pop(0), call()

    monkeypatch.setattr(measure.Stopwatch, "milliseconds", milliseconds)
    return left


def test_all_are_called_in_every_round_on_the_same_inputs():
    seen = []
    contenders = {name: lambda x, name=name: seen.append((name, x)) for name in "abc"}
    times = measure.interleaved(contenders, [1, 2], ALONE, warmups=1, runs=3)
    rounds = [seen[i : i + 3] for i in range(0, 12, 3)]
    assert [{x for _, x in each} for each in rounds] == [{1}, {2}, {1}, {2}]
    assert all(sorted(name for name, _ in each) == ["a", "b", "c"] for each in rounds)
    assert list(times) == ["a", "b", "c"] and all(ms > 0 for ms in times.values())


def test_nobody_is_always_first_or_after_the_same():
    orders = [measure.order_of(["a", "b", "c"], turn) for turn in range(6)]
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert {order[order.index("a") - 1] for order in orders if order[0] != "a"} == {"b", "c"}


def test_the_median_without_warmups(clock):
    clock[:] = [1000, 1000, 3, 1, 200]
    assert measure.interleaved({"a": id}, [0], ALONE, warmups=2, runs=3) == {"a": 3}


def test_of_the_slowest_rank(clock):
    clock[:] = [1, 2]
    group = OfTwo(0, 2, 0, torch.device("cpu"), None, None)
    assert measure.interleaved({"a": id}, [0], group, warmups=1, runs=1) == {"a": 7}


def test_before_and_after_each_call():
    seen = []
    measure.interleaved(
        {"a": lambda x: seen.append("call") or x + 1}, [41], ALONE, warmups=1, runs=1,
        before=lambda *what: seen.append(what), after=lambda *what: seen.append(what),
    )  # fmt: skip
    assert seen == [("a", 41), "call", ("a", 41, 42)] * 2
