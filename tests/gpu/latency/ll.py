"""The LL protocol on GPUs: values over many launches with delays, and latency beside counters.

    torchrun --nproc-per-node=2 tests/gpu/latency/ll.py [--launches 2000] [CHECK ...]

``inferred`` launches one program with counters and with words, with random sleeps before the
launches of each rank. ``graph`` replays it in a CUDA graph. ``ping_pong`` exchanges words and flags
of explicit programs. ``latency`` prints the one-way time of messages of 16 bytes to 64 KiB by both
protocols; it needs a GPU for each rank, because ranks that share one run in time slices.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tilelang.language as T
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import tileweave as tw
from tests.on_gpus import Verdicts, main, parser_of, runs_here, say
from tileweave import language as W
from tileweave.runtime.host import session

CHECKS = ("inferred", "graph", "ping_pong", "latency")
OFF = {"tileweave.verify": "off"}
"""The ping-pong reuses its memory within a launch, which is not verified."""
SIZES = (16, 1024, 4096, 16384, 65536)
"""Bytes of a message."""
ROUNDS = 1000
"""Round trips of one launch that is timed."""
MAX_SLEEP = 200_000
"""Longest sleep before a launch, in clock cycles."""


def shift(ranks: int, n: int, dtype: str) -> Any:
    """Return a program in which each rank sends 8 rows of ``n`` elements to the next rank."""

    @T.prim_func
    def program(X: T.Tensor((8, n), dtype), Y: T.Tensor((8, n), dtype)):
        with T.Kernel(8, threads=128) as block:
            S = W.alloc_symmetric((8, n), dtype)
            tile = T.alloc_shared((n,), dtype)
            T.copy(X[block, 0], tile)
            T.copy(tile, S[(W.rank() + 1) % ranks, block, 0])
            T.copy(S[W.rank(), block, 0], tile)
            T.copy(tile, Y[block, 0])

    return program


def words(size: int, rounds: int) -> Any:
    """Return a ping-pong of ``size`` bytes by words with flags between ranks 0 and 1."""
    count = size // 4
    threads = min(count // 2, 512)
    per_thread = count // 2 // threads

    @T.prim_func
    def program(S: W.Symmetric((count,), "uint64"), out: T.Tensor((count,), "uint32")):
        with T.Kernel(1, threads=threads) as _:
            me, t = W.rank(), T.get_thread_binding()
            data = T.alloc_local((per_thread, 2), "uint32")
            for j in T.serial(per_thread):
                data[j, 0] = t + j * threads
                data[j, 1] = t + j * threads + 1
            for k in T.serial(rounds):
                if me == 1:
                    for j in T.serial(per_thread):
                        at = 2 * (j * threads + t)
                        data[j, 0:2] = W.ll_ld(S[me, at], k + 1, words=2, peer=0)
                if me < 2:
                    for j in T.serial(per_thread):
                        W.ll_st(S[1 - me, 2 * (j * threads + t)], data[j, 0:2], k + 1)
                if me == 0:
                    for j in T.serial(per_thread):
                        at = 2 * (j * threads + t)
                        data[j, 0:2] = W.ll_ld(S[me, at], k + 1, words=2, peer=1)
                        data[j, 0] = data[j, 0] + 1
            for j in T.serial(per_thread):
                for half in T.serial(2):
                    out[2 * (j * threads + t) + half] = data[j, half]

    return program


def flags(size: int, rounds: int) -> Any:
    """Return the same ping-pong by stores, a signal and a wait."""
    count = size // 4
    threads = min(count // 4, 512)
    per_thread = count // 4 // threads

    @T.prim_func
    def program(
        S: W.Symmetric((count,), "uint32"), F: W.Symmetric((1,), "uint32"),
        out: T.Tensor((count,), "uint32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=threads) as _:
            me, t = W.rank(), T.get_thread_binding()
            data = T.alloc_local((per_thread, 4), "uint32")
            for j in T.serial(per_thread):
                for lane in T.serial(4):
                    data[j, lane] = 2 * (t + j * threads) + lane // 2 + lane % 2
            for k in T.serial(rounds):
                if me == 1:
                    W.wait_eq(F[me, 0], k + 1, peer=0)
                    for j in T.serial(per_thread):
                        at = 4 * (j * threads + t)
                        data[j, 0:4] = S[me, at : at + 4]
                if me < 2:
                    for j in T.serial(per_thread):
                        at = 4 * (j * threads + t)
                        S[1 - me, at : at + 4] = data[j, 0:4]
                    W.signal(F[1 - me, 0], k + 1, op="set")
                if me == 0:
                    W.wait_eq(F[me, 0], k + 1, peer=1)
                    for j in T.serial(per_thread):
                        at = 4 * (j * threads + t)
                        data[j, 0:4] = S[me, at : at + 4]
            for j in T.serial(per_thread):
                for lane in T.serial(4):
                    out[4 * (j * threads + t) + lane] = data[j, lane]

    return program


def expected(size: int, rounds: int) -> torch.Tensor:
    """Return what rank 1 has last received by ``words``: the first half of each pair of words
    grows by one in each round trip."""
    pairs = torch.arange(size // 8)
    return torch.stack([pairs + rounds - 1, pairs + 1], 1).flatten().to(torch.int64)


def inputs_of(launch: int, rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(8 * n).reshape(8, n) % 61 + 7 * launch + rank).remainder(128).to(dtype)


def compiled(protocol: str, n: int, dtype: str) -> Any:
    configs = {"tileweave.protocol": {"S": protocol}}
    return tw.compile(shift(tw.world_size(), n, dtype), pass_configs=configs)


def sleep() -> None:
    """Delay the next launch of this rank."""
    torch.cuda._sleep(random.randrange(MAX_SLEEP))


def inferred(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    random.seed(tw.rank())
    for dtype, n in (("float32", 256), ("bfloat16", 1024)):
        for protocol in ("flag", "ll"):
            kernel, type_ = compiled(protocol, n, dtype), getattr(torch, dtype)
            left = (tw.rank() - 1) % tw.world_size()
            wrong = 0
            for launch in range(0, options.launches, 50):
                numbers = range(launch, launch + 50)
                xs = [inputs_of(i, tw.rank(), n, type_).cuda() for i in numbers]
                ys = [torch.full_like(x, -1) for x in xs]
                for x, y in zip(xs, ys, strict=True):
                    sleep()
                    kernel(x, y)
                for i, y in zip(numbers, ys, strict=True):
                    wrong += not torch.equal(y.cpu(), inputs_of(i, left, n, type_))
            yield f"{protocol}, {dtype}", f"{wrong} launches are wrong" if wrong else ""


def graph(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    n, left = 256, (tw.rank() - 1) % tw.world_size()
    kernel = compiled("ll", n, "float32")
    x = inputs_of(0, tw.rank(), n, torch.float32).cuda()
    ys = [torch.empty_like(x) for _ in range(3)]
    kernel(x, ys[0])
    torch.cuda.synchronize()
    tw.barrier()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for y in ys:
            kernel(x, y)
    wrong, random_of_rank = 0, random.Random(tw.rank())
    for replay in range(options.launches // 10):
        x.copy_(inputs_of(replay, tw.rank(), n, torch.float32))
        torch.cuda._sleep(random_of_rank.randrange(MAX_SLEEP))
        captured.replay()
        if replay % 3 == 0:
            kernel(x, ys[0])  # between replays: the launches have one number
        want = inputs_of(replay, left, n, torch.float32)
        wrong += not all(torch.equal(y.cpu(), want) for y in ys)
    yield "ll in a graph", f"{wrong} replays are wrong" if wrong else ""


def launcher(make: Callable[[int, int], Any], size: int, rounds: int) -> tuple[Callable, Any]:
    """Return a function that launches a ping-pong, and its result."""
    kernel = tw.compile(make(size, rounds), pass_configs=OFF)
    out = torch.zeros(size // 4, dtype=torch.uint32, device="cuda")
    if make is words:
        memory = [tw.symmetric((size // 4,), torch.uint64)]
    else:
        memory = [tw.symmetric((size // 4,), torch.uint32), tw.symmetric((1,), torch.uint32)]
    for tensor in memory:
        tensor.local.zero_()
    torch.cuda.synchronize()
    tw.barrier()
    return (lambda: kernel(*memory, out)), out


def ping_pong(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    rounds = 3
    for size in SIZES:
        launch, out = launcher(words, size, rounds)
        for _ in range(5):
            launch()
        values = out.cpu().to(torch.int64)
        wrong = tw.rank() == 1 and not torch.equal(values, expected(size, rounds))
        yield f"ping-pong of {size} bytes", "wrong values" if wrong else ""


def one_way_us(launch: Callable[[], None]) -> float:
    """Return the time of one message in microseconds, the least of 5 launches."""
    launch()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        tw.barrier()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * ROUNDS))
    return min(times)


def latency(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if any(opened.group.shares_gpus for opened in session.opened()):
        say("latency: not run: ranks share a GPU")
        return
    for size in SIZES:
        times = [one_way_us(launcher(make, size, ROUNDS)[0]) for make in (words, flags)]
        yield f"{size} bytes one way: LL {times[0]:.2f} us, flag {times[1]:.2f} us", ""


def verdicts(options: argparse.Namespace) -> Verdicts:
    checks = {"inferred": inferred, "graph": graph, "ping_pong": ping_pong, "latency": latency}
    for name in options.checks or CHECKS:
        if runs_here(name, CHECKS):
            yield from checks[name](options)


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--launches", type=int, default=2000)
    sys.exit(main(verdicts, parser))
