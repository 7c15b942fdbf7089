"""Calls of operators in the programs of tests/gpu: back to back, and replayed from CUDA graphs."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tests.on_gpus import GPU
from tileweave.ops.core.groups import group_of

DEVICE = "cuda" if GPU else "cpu"
Made = TypeVar("Made")


class Call(ABC):
    """A call with its inputs, in fixed memory; calling it returns the results."""

    name: str

    @abstractmethod
    def __call__(self) -> Any: ...

    @abstractmethod
    def right(self) -> Any:
        """Return the results by definition, for the inputs now in memory."""

    def refill(self, seed: int) -> None:
        """Write new inputs."""
        raise NotImplementedError

    def differs(self, actual: Any, right: Any) -> torch.Tensor | bool:
        """Return whether results are wrong, without reading them on the host."""
        return (actual != right).any()

    def fault(self, actual: Any, right: Any) -> str:
        """Return what is wrong with results, or ""."""
        return f"{self.name}: wrong results" if self.differs(actual, right) else ""


def relative_error(actual: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the norm of the difference relative to that of ``right``."""
    right = right.float()
    return (actual.float() - right).norm() / right.norm().clamp(min=1e-9)


def order_of(count: int, length: int, seed: int = 1) -> list[int]:
    """Return random numbers below ``count``, equal on all ranks."""
    rng = random.Random(seed)
    return [rng.randrange(count) for _ in range(length)]


class Delays:
    """Delays of the GPU of this rank, now and then."""

    def __init__(self) -> None:
        self.rng = random.Random(100 + group_of("").rank)

    def __call__(self) -> None:
        if GPU and self.rng.random() < 0.3:
            torch.cuda._sleep(self.rng.randrange(1, 400_000))


def values(calls: Sequence[Call], times: int = 1) -> str:
    """Make each call with several inputs, and compare the results."""
    for call in calls:
        for seed in range(times):
            if times > 1:
                call.refill(seed)
            if fault := call.fault(call(), call.right()):
                return fault
    return ""


def back_to_back(calls: Sequence[Call], launches: int) -> str:
    """Make calls in random order without host synchronization, with random delays of ranks."""
    rights, delay = [call.right() for call in calls], Delays()
    wrong = torch.zeros(len(calls), dtype=torch.int64, device=DEVICE)
    for which in order_of(len(calls), launches):
        delay()
        wrong[which] += calls[which].differs(calls[which](), rights[which])
    counts = zip(calls, wrong.tolist(), strict=True)
    return next((f"{call.name}: {n} launches are wrong" for call, n in counts if n), "")


def captured(make: Callable[[], Made], mode: str = "global") -> tuple[torch.cuda.CUDAGraph, Made]:
    """Return a graph of what ``make`` enqueues, which is compiled already, and its results."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        results = make()
    return graph, results


def replayed(calls: Sequence[Call], replays: int, period: int = 10, mode: str = "global") -> str:
    """Replay one graph of all calls with new inputs and random delays.

    Args:
        period: replays between two comparisons of the results.
    """
    for call in calls:
        call()
    graph, results = captured(lambda: [call() for call in calls], mode)
    delay = Delays()
    for number in range(replays):
        for call in calls:
            call.refill(number)
        delay()
        graph.replay()
        if number % period == 0:
            for call, result in zip(calls, results, strict=True):
                if fault := call.fault(result, call.right()):
                    return f"replay {number}: {fault}"
    return ""


def replayed_in_turn(calls: Sequence[Call], replays: int) -> str:
    """Replay a graph of two results for each call, in random order, with new inputs and delays."""
    for call in calls:
        call()
    graphs = [captured(lambda call=call: (call(), call())) for call in calls]
    delay = Delays()
    for number, which in enumerate(order_of(len(calls), replays, seed=2)):
        call, (graph, results) = calls[which], graphs[which]
        call.refill(number)
        delay()
        graph.replay()
        if number % 10 == 0:
            right = call.right()
            for result in results:
                if fault := call.fault(result, right):
                    return f"replay {number}: {fault}"
    return ""
