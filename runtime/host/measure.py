"""How long contenders take: in one process, in interleaved rounds, on the slowest rank."""

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
"""Cycles, about 2 ms, for which a GPU sleeps before each call, so that the host is ahead."""


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
    """The time of each contender in ms: of each rank the median, of these the largest.

    In every round each contender is called once, in another order than in the round before, on the
    inputs whose turn it is. All ranks begin together; on a GPU L2 holds no operand then.
    Collective, with contenders of the same names.

    Args:
        contenders: each takes one of ``inputs``; on a GPU it enqueues on torch's current stream.
        inputs: one for each round, in turn.
        group: the one that ``tw.init`` joined, or one of CPUs.
        warmups: rounds that do not count.
        runs: rounds that do.
        before: called with a contender's name and inputs before it, untimed.
        after: called with its name, its inputs and what it returned, when it is over on this rank.
        title: of the progress bar that rank 0 shows in a terminal.
    """
    watch = Stopwatch(group)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    shown = None if title and group.rank == 0 else True  # None: in a terminal only
    for turn in tqdm(range(warmups + runs), title, disable=shown, leave=False):
        given = inputs[turn % len(inputs)]
        for name in order_of(list(contenders), turn):
            if before is not None:
                before(name, given)
            ms, result = watch.milliseconds(partial(contenders[name], given))
            if after is not None:
                after(name, given, result)
            if turn >= warmups:
                times[name].append(ms)
    return largest({name: statistics.median(found) for name, found in times.items()}, group)


def order_of(names: list[str], turn: int) -> list[str]:
    """Who is called when in a round: nobody always first, or always after the same other."""
    first = turn // 2 % len(names)
    names = names[first:] + names[:first]
    return names[::-1] if turn % 2 else names


def largest(values: Mapping[str, float], group: Group) -> dict[str, float]:
    """The largest of all ranks for each name. Collective, through the host."""
    everyones = [json.loads(said) for said in group.exchange("measure", json.dumps(dict(values)))]
    return {name: max(each[name] for each in everyones) for name in values}


class Stopwatch:
    """Times single calls on this rank's device."""

    def __init__(self, group: Group) -> None:
        self.group, self.device = group, group.device
        if self.device.type == "cuda":
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            self._larger_than_l2 = torch.zeros(2 * l2 // 4, device=self.device)

    def milliseconds(self, call: Callable[[], Result]) -> tuple[float, Result]:
        """How long ``call`` takes here, from when all ranks have come, and what it returns, when it
        is over. Collective."""
        if self.device.type != "cuda":
            return self._on_cpu(call)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._larger_than_l2.sum()  # reading leaves nothing in L2 that must be written back
        torch.cuda._sleep(_SLEEP)
        barrier()  # behind the sleep, which clocks make longer on one GPU than on another
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
