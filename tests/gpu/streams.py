"""All operators on several streams that only the runtime orders: results are exact.

    torchrun --nproc-per-node=2 tests/gpu/streams.py [CHECK ...] [--calls 10000] [--seed S]

All ranks make the same calls in the same order. Each rank chooses the stream of each call by
itself, out of two or three that do not wait for each other, and sleeps at random before and after
calls. Inputs are small integers, whose sums are exact; other results must have the bits of a call
that ran alone. Without a GPU the calls run with gloo, without streams: that tries this file.

| check | calls |
|---|---|
| eager | Python enqueues |
| recorded | one native call enqueues |
| external | on streams that are destroyed after each call |
| captured | CUDA graphs of several streams, replayed between other calls |
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.soak import Results
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here, say
from tests.soak_mixtures import Mixture
from tests.soak_problems import (
    CHECKED,
    COLLECTIVES,
    DEVICE,
    Data,
    Draw,
    Exchange,
    Gemm,
    Inferred,
    _transports,
)
from tileweave import ops
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.executor.recorded_calls import invalidate
from tileweave.runtime.host.driver import call as call_driver

HEAP_BYTES = 2 << 30
SHARES = {"eager": 0.2, "recorded": 0.4, "external": 0.1, "captured": 0.3}
"""Share of each check in the calls."""
CHECKS = tuple(SHARES)
ROUND = 48
"""Calls between two comparisons. Each uses inputs and results that no other one of the round
uses."""
GRAPHS, CALLS_OF_GRAPH = 6, 5
REFILLED = 8
"""Rounds with the same inputs."""
WRONG_SHOWN = 10
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING, as torch's streams are."""
Call = tuple[Data, int]
"""A problem, and the number of its inputs."""


class Alone(Draw):
    """A function whose results must have the bits of a call that runs alone."""

    def __init__(
        self, name: str, function: Callable[..., Any], *shapes: tuple[int, ...], equal: str = ""
    ) -> None:
        """
        Args:
            function: accepts the inputs and returns a tensor or a tuple of tensors.
            shapes: shapes of the inputs, which are bf16.
            equal: indices of the inputs that are equal on all ranks.
        """
        self.name, self.function, self.shapes = name, function, shapes
        self.equal = {int(index) for index in equal}

    def data(self) -> Data:
        return AloneData(self)


class AloneData(Data):
    """Inputs of ``Alone``, and the results of calls that ran alone."""

    def __init__(self, drawn: Alone) -> None:
        self.drawn = drawn
        self.inputs: list[list[torch.Tensor]] = []
        self.rights: list[list[torch.Tensor]] = []
        self.outs: dict[int, list[torch.Tensor]] = {}

    def fill(self, seed: int) -> None:
        for slot in range(self.launches):
            new = [
                self._random(seed + 1000 * slot, index) for index in range(len(self.drawn.shapes))
            ]
            if slot == len(self.inputs):
                self.inputs.append(new)
                self.rights.append([x.clone() for x in self._call(slot)])
            else:
                for old, value in zip(self.inputs[slot], new, strict=True):
                    old.copy_(value)
                for old, value in zip(self.rights[slot], self._call(slot), strict=True):
                    old.copy_(value)
            if GPU:
                torch.cuda.synchronize()

    def _random(self, seed: int, index: int) -> torch.Tensor:
        rank = 0 if index in self.drawn.equal else 1 + group_of("").rank
        generator = torch.Generator(DEVICE).manual_seed(100 * seed + 10 * rank + index)
        x = torch.randn(self.drawn.shapes[index], generator=generator, device=DEVICE)
        return x.bfloat16()

    def _call(self, slot: int) -> list[torch.Tensor]:
        results = self.drawn.function(*self.inputs[slot])
        return [results] if isinstance(results, torch.Tensor) else list(results)

    def launch(self, slot: int) -> None:
        self.outs[slot] = self._call(slot)

    def results(self, slot: int) -> CHECKED:
        pairs = zip(self.outs[slot], self.rights[slot], strict=True)
        return [(f"result {n}", out, right, 0.0) for n, (out, right) in enumerate(pairs)]


def gemms() -> Iterator[Draw]:
    """Yield a small and a large problem of each GEMM operator, by different programs."""
    for op in sorted(operators_of(GemmOperator)):
        for pick, share in enumerate((48, 1024) if GPU else (8,)):
            N, K = (512, 512) if GPU else (16, 16)
            dtype = torch.bfloat16 if GPU else torch.float32
            yield Gemm(op, share, N, K, dtype, True, False, pick)


def exchanges() -> Iterator[Draw]:
    """Yield a small and a large problem of each collective, each by all of its transports."""
    ranks = group_of("").world_size
    for op in COLLECTIVES:
        axes = {"broadcast": (ranks - 1,), "all_to_all": (0, 0)}.get(op, ())
        for rows in (16 * ranks, 1024 * ranks) if GPU else (4 * ranks,):
            shape, dtype = (rows, 128), torch.bfloat16 if GPU else torch.float32
            problem = checked_problem(
                op, torch.empty(shape, dtype=dtype, device="meta"), None, ranks, axes
            )
            for transport in _transports() if GPU else ["nccl"]:
                if not GPU or OPERATORS[op].obstacle(problem, transport) is None:
                    yield Exchange(op, axes, shape, dtype, transport, True)


def mixtures() -> Iterator[Draw]:
    """Yield a problem of each operator of a mixture of experts."""
    tokens, hidden, width = (64, 256, 64) if GPU else (8, 16, 8)
    capacity = tokens * group_of("").world_size * 2
    dtype = torch.bfloat16 if GPU else torch.float32
    for op in ("dispatch", "combine", "expert_mlp"):
        yield Mixture(op, tokens, 2, 2, hidden, width, capacity, dtype, True)


def attention() -> Iterator[Draw]:
    """Yield problems of the operators on random numbers."""
    rows, dim = (256, 64) if GPU else (8, 16)
    q, k = (1, rows, 4, dim), (1, rows, 2, dim)
    fused = {"strategy": "fused"} if GPU else {}
    yield Alone("sp_attention", lambda *x: ops.sp_attention(*x, causal=True, **fused), q, k, k)
    yield Alone("ulysses_attention", lambda *x: ops.ulysses_attention(*x, causal=True), q, k, k)
    for strategy in ("one_shot", "two_shot") if GPU else ("auto",):
        yield Alone(
            f"all_reduce_rms_norm by {strategy}",
            lambda *x, s=strategy: ops.all_reduce_rms_norm(*x, strategy=s),
            (8, 1024), (8, 1024), (1024,), equal="12",
        )  # fmt: skip
    pages = torch.arange(16, dtype=torch.int32, device=DEVICE).view(4, 4)
    lengths = torch.tensor([1, 40, 99, 128], dtype=torch.int32, device=DEVICE)
    cache = 16, 16, 2, 64

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.decode_attention(q, k, v, block_table=pages, seq_lens=lengths, **fused)

    yield Alone("decode_attention", decode, (4, 8, 64), cache, cache, equal="0")


def problems() -> list[Draw]:
    """Return problems of all operators, and of kernels that the user compiles."""
    inferred = [Inferred(n, None) for n in ("ring_all_reduce", "gemm_reduce_scatter")] * GPU
    return [*gemms(), *exchanges(), *mixtures(), *attention(), *inferred]


class Streams:
    """Calls on several streams, and the number of wrong results."""

    def __init__(self, seed: int) -> None:
        drawn = problems()
        start = time.monotonic()
        if GPU:
            compile_ahead(program for problem in drawn for program in problem.programs())
        self.problems = {problem: problem.data() for problem in drawn}
        self.shared = random.Random(seed)
        """Generator of the calls, equal on all ranks."""
        self.own = random.Random(f"{seed} {group_of('').rank}")
        """Generator of the streams and sleeps of this rank."""
        self.streams = [torch.cuda.Stream() for _ in range(3)] if GPU else []
        self.graphs: list[tuple[torch.cuda.CUDAGraph, list[Call]]] = []
        self._fill()
        for data in self.problems.values():
            data.launch(0)  # compiles, which a capture may not
        self._synchronize()
        if group_of("").rank == 0:
            say(f"streams: {len(drawn)} problems, {time.monotonic() - start:.0f} s of compiling")

    def check(self, name: str, calls: int) -> str:
        """Make at least ``calls`` calls; return what is wrong."""
        start, made, wrong, number = time.monotonic(), 0, 0, 0
        if name == "captured":
            self._capture()
        while made < calls:
            if number % REFILLED == 0:
                self._fill()
            results, count = self._round(name)
            texts = results.wrong()
            for text in texts[: max(0, WRONG_SHOWN - wrong)]:
                say(f"streams: WRONG: {name}, round {number}: {text}")
            made, wrong, number = made + count, wrong + len(texts), number + 1
        self.graphs.clear()
        every = sum(map(int, group_of("").exchange(f"streams: {name}", str(wrong))))
        if group_of("").rank == 0:
            say(f"{name}: {made} calls, {every} wrong, {time.monotonic() - start:.0f} s")
        return f"{every} wrong results of {made} calls" if every else ""

    def _round(self, name: str) -> tuple[Results, int]:
        """Make calls on streams; return the comparison of their results, and their number."""
        captured = [call for _, calls in self.graphs for call in calls]
        others = [call for call in self._calls(name) if call not in captured]
        items: list[Any] = [*self.graphs, *self.shared.sample(others, min(ROUND, len(others)))]
        self.shared.shuffle(items)
        streams = self.own.sample(self.streams, self.own.choice((2, 3))) if GPU else []
        ends: list[Any] = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for item in items:
            with self._on_a_stream(streams, name == "external", ends):
                self._sleep(0.3)
                if isinstance(item[0], Data):
                    item[0].launch(item[1])
                else:
                    item[0].replay()
                self._sleep(0.1)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        for end in ends:
            torch.cuda.current_stream().wait_event(end)
        calls = [*captured, *(item for item in items if isinstance(item[0], Data))]
        results = Results(sum(len(data.results(slot)) for data, slot in calls))
        names = {id(data): problem.name for problem, data in self.problems.items()}
        for number, (data, slot) in enumerate(calls):
            results.add(number, data, slot)
            results.names[-1] += f" of {names[id(data)]}"
        return results, len(calls)

    def _calls(self, name: str) -> list[Call]:
        """Return all calls that a check may make."""
        # torch gives memory that a destroyed stream used to a new stream with the same handle, so
        # calls on such streams must not allocate.
        kinds = (Gemm, Exchange) if name == "external" else Draw
        every = self.problems.items()
        return [(d, slot) for p, d in every if isinstance(p, kinds) for slot in range(d.launches)]

    @contextlib.contextmanager
    def _on_a_stream(
        self, streams: Sequence[torch.cuda.Stream], is_external: bool, ends: list[Any]
    ) -> Iterator[None]:
        """Make a stream current: one of ``streams``, or one that is destroyed afterwards; append
        the event at its end to ``ends``."""
        if not GPU:
            yield
            return
        if not is_external:
            with torch.cuda.stream(self.own.choice(streams)):
                yield
            return
        handle = int(call_driver("cuStreamCreate", NON_BLOCKING))
        stream = torch.cuda.ExternalStream(handle)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        ends.append(stream.record_event())
        call_driver("cuStreamDestroy", handle)

    def _sleep(self, probability: float) -> None:
        if GPU and self.own.random() < probability:
            torch.cuda._sleep(self.own.randrange(10_000, 300_000))

    def _capture(self) -> None:
        """Capture graphs of calls, each in several streams."""
        every = self.shared.sample(self._calls("captured"), GRAPHS * CALLS_OF_GRAPH)
        for first in range(0, len(every), CALLS_OF_GRAPH):
            calls, graph = every[first : first + CALLS_OF_GRAPH], torch.cuda.CUDAGraph()
            sides = self.own.sample(self.streams, self.own.randrange(3))
            with torch.cuda.graph(graph):
                outer = torch.cuda.current_stream()
                for side in sides:
                    side.wait_stream(outer)
                for data, slot in calls:
                    with torch.cuda.stream(self.own.choice([outer, *sides])):
                        data.launch(slot)
                for side in sides:
                    outer.wait_stream(side)
            self.graphs.append((graph, calls))

    def _fill(self) -> None:
        seed = self.shared.randrange(1 << 30)
        for data in self.problems.values():
            data.fill(seed)
        self._synchronize()

    def _synchronize(self) -> None:
        if GPU:
            torch.cuda.synchronize()


def verdicts(options: argparse.Namespace) -> Verdicts:
    group = group_of("")
    seed = int(group.exchange("streams: seed", str(options.seed))[0])
    if group.rank == 0:
        say(f"streams: seed {seed}")
    streams = Streams(seed)
    for name in options.checks or CHECKS:
        if not runs_here(name, ("external", "captured")):
            continue
        os.environ["TILEWEAVE_NATIVE"] = "0" if name == "eager" else "1"
        invalidate()
        yield name, streams.check(name, round(SHARES[name] * options.calls))


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--calls", type=int, default=10_000, help="calls of each rank")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9)
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
