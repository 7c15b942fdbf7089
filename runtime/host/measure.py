"""Measure the times of contenders in one process: in interleaved rounds, on the slowest rank."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..kernel.barrier import barrier
from .group import Group

Result = TypeVar("Result")
_SLEEP = 4_000_000
"""Cycles, about 2 ms, that a GPU sleeps before each call, so that the host enqueues ahead of it."""


def interleaved(
    contenders: Mapping[str, Callable[[Any], Any]],
    inputs: Sequence[Any],
    group: Group,
    *,
    warmups: int = 5,
    runs: int = 20,
    before: Callable[[str, Any], object] | None = None,
    after: Callable[[str, Any, Any], None] | None = None,
    title: str = "",
) -> dict[str, float]:
    """Return the time of each contender in ms: the largest of the ranks' medians.

    Each round calls each contender once, in another order than the previous round, on the next
    inputs. All ranks begin together; on a GPU, L2 contains no operand at that time. Collective,
    with the same names of contenders on all ranks.

    Args:
        contenders: name -> function of one of ``inputs``; on a GPU it enqueues on torch's current
            stream.
        inputs: each round uses the next of them, cyclically.
        group: the one that ``tw.init`` joined, or one of CPUs.
        warmups: number of rounds that are not counted.
        runs: number of rounds that are counted.
        before: called with a contender's name and inputs before each call, untimed.
        after: called with its name, inputs and result when the call has ended on this rank.
        title: title of the progress bar that rank 0 shows in a terminal.
    """
    watch = Stopwatch(group)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    disable = None if title and group.rank == 0 else True  # None: in a terminal only
    for turn in tqdm(range(warmups + runs), title, disable=disable, leave=False):
        arguments = inputs[turn % len(inputs)]
        for name in order_of(list(contenders), turn):
            if before is not None:
                before(name, arguments)
            ms, result = watch.milliseconds(partial(contenders[name], arguments))
            if after is not None:
                after(name, arguments, result)
            if turn >= warmups:
                times[name].append(ms)
    return largest({name: statistics.median(ms) for name, ms in times.items()}, group)


def order_of(names: list[str], turn: int) -> list[str]:
    """Return the order of calls in a round.

    The first contender changes, and no contender always follows the same one.
    """
    first = turn // 2 % len(names)
    names = names[first:] + names[:first]
    return names[::-1] if turn % 2 else names


def largest(values: Mapping[str, float], group: Group) -> dict[str, float]:
    """Return the largest value of all ranks for each name. Collective, through the host."""
    messages = group.exchange("measure", json.dumps(dict(values)))
    by_rank = [json.loads(message) for message in messages]
    return {name: max(values[name] for values in by_rank) for name in values}


class Stopwatch:
    """Timer of single calls on this rank's device."""

    def __init__(self, group: Group) -> None:
        self.group, self.device = group, group.device
        if self.device.type == "cuda":
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            self._larger_than_l2 = torch.zeros(2 * l2 // 4, device=self.device)

    def milliseconds(self, call: Callable[[], Result]) -> tuple[float, Result]:
        """Return the time of ``call`` on this rank, from a barrier of all ranks to its end, and its
        result. Collective."""
        if self.device.type != "cuda":
            return self._on_cpu(call)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._larger_than_l2.sum()  # a read leaves no dirty lines in L2
        torch.cuda._sleep(_SLEEP)
        # After the sleep, whose length depends on the GPU's clock.
        barrier(group=self.group.process_group)
        begin.record()
        result = call()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end), result

    def _on_cpu(self, call: Callable[[], Result]) -> tuple[float, Result]:
        if self.group.process_group is not None:
            dist.barrier(self.group.process_group)
        begin = time.perf_counter()
        result = call()
        return (time.perf_counter() - begin) * 1e3, result
