"""Time of calls in a CUDA graph, for other benchmarks."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

WARMUPS = 3
"""Replays before those that are measured."""


def graph_us(call: Callable[[], Any], calls: int, replays: int) -> float:
    """Return the median time of a call in us, over ``replays`` replays of a graph of ``calls``
    calls. The caller has compiled them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(WARMUPS + replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[WARMUPS:])
