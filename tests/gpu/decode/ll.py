"""The LL protocol on GPUs: values over many launches with delays, and latency beside counters.

    torchrun --nproc-per-node=2 tests/gpu/decode/ll.py [--launches 2000] [CHECK ...]

``inferred`` launches one program with counters and with words, with random sleeps before the
launches of each rank. ``graph`` replays it in a CUDA graph. ``ping_pong`` exchanges words and flags
of explicit programs. ``latency`` prints the one-way time of messages of 16 bytes to 64 KiB by both
protocols; it needs a GPU for each rank, because ranks that share one run in time slices.

``small`` calls small collectives by words: types, sizes, and many launches with delays.
``small_graphs`` replays captured graphs of two sizes in turn. ``small_latency`` prints their times
beside NCCL, stores with signals, and ``one_shot_all_reduce`` of PyTorch where it runs.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tilelang.language as T
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import tileweave as tw
from tests.gpu_calls import Call, Delays, back_to_back, captured, order_of, values
from tests.on_gpus import Verdicts, main, parser_of, runs_here, say
from tileweave import language as W
from tileweave import ops
from tileweave.ops.core.registry import OPERATORS
from tileweave.runtime.host import session

CHECKS = ("inferred", "graph", "ping_pong", "latency", "small", "small_graphs", "small_latency")
NEED_GPU_EACH = ("latency", "small_latency")
"""Checks that print times, which mean nothing if ranks share a GPU."""
SMALL = [
    ("all_reduce", (), (4096,), torch.bfloat16),
    ("all_reduce", (), (3, 1001), torch.float32),
    ("all_reduce", (), (1 << 19,), torch.float16),
    ("all_gather", (), (16, 512), torch.bfloat16),
    ("all_gather", (), (5, 7), torch.uint8),
    ("all_gather", (), (64 << 10,), torch.uint8),
    ("all_to_all", (1, 0), (16, 8, 64), torch.bfloat16),
    ("all_to_all", (0, 1), (8, 3, 40), torch.float32),
    ("all_to_all", (0, 0), (8, 6), torch.float16),
]
"""Operator, axes, shape of the input and type. Axis 0, or that of 8, is shared by up to 8 ranks."""
TIMED = {"all_reduce": (8, 32, 128, 512, 1024), "all_gather": (1, 8, 64), "all_to_all": (8, 64)}
"""KiB of a rank's input, by operator."""
CALLS = 100
"""Calls of a captured graph that is timed."""
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
    replays, _ = captured(lambda: [kernel(x, y) for y in ys])
    wrong, random_of_rank = 0, random.Random(tw.rank())
    for replay in range(options.launches // 10):
        x.copy_(inputs_of(replay, tw.rank(), n, torch.float32))
        torch.cuda._sleep(random_of_rank.randrange(MAX_SLEEP))
        replays.replay()
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
    for size in SIZES:
        times = [one_way_us(launcher(make, size, ROUNDS)[0]) for make in (words, flags)]
        yield f"{size} bytes one way: LL {times[0]:.2f} us, flag {times[1]:.2f} us", ""


class SmallCall(Call):
    """A small collective by words with its input, in fixed memory."""

    def __init__(self, op: str, axes: tuple[int, ...], shape: tuple[int, ...], dtype) -> None:
        self.op, self.axes = op, axes
        self.x = torch.zeros(shape, dtype=dtype, device="cuda")
        self.name = f"{op} {axes} of {shape} {dtype}"
        self.refill(0)

    @property
    def serves(self) -> bool:
        """Whether the ranks can share the axis."""
        return not self.axes or self.x.shape[self.axes[0]] % tw.world_size() == 0

    def input_of(self, seed: int, rank: int) -> torch.Tensor:
        """Return small integers, whose sums are exact in any order."""
        numbers = torch.arange(self.x.numel(), device="cuda") % 7 + (3 * seed + rank) % 5
        return numbers.to(self.x.dtype).view(self.x.shape)

    def refill(self, seed: int) -> None:
        self.seed = seed
        self.x.copy_(self.input_of(seed, tw.rank()))

    def __call__(self, transport: str = "ll", out: torch.Tensor | None = None) -> torch.Tensor:
        return getattr(ops, self.op)(self.x, *self.axes, out=out, transport=transport)

    def right(self) -> torch.Tensor:
        inputs = torch.stack([self.input_of(self.seed, rank) for rank in range(tw.world_size())])
        return OPERATORS[self.op].expected(inputs, tw.rank(), *self.axes)


def small_calls(seed: int = 0) -> list[SmallCall]:
    calls = [call for case in SMALL if (call := SmallCall(*case)).serves]
    for call in calls:
        call.refill(seed)
    return calls


def small(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    yield "small collectives", values(small_calls(), 5)
    calls = [call for seed in range(5) for call in small_calls(seed)]
    yield "small collectives in turn", back_to_back(calls, options.launches)


def small_graphs(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Two graphs, of the first calls and of all calls twice, with random delays in between."""
    calls = small_calls()
    for call in calls:
        call()
    tw.barrier()
    graphs = [
        captured(lambda chosen=chosen: [(call, call()) for call in chosen])
        for chosen in (calls[:3], [*calls, *calls])
    ]
    delay, wrong = Delays(), 0
    for replay, which in enumerate(order_of(2, options.launches // 10, seed=2)):
        graph, results = graphs[which]
        for call in calls:
            call.refill(replay % 5)
        delay()
        graph.replay()
        if replay % 3 == 0:
            calls[0]()
        wrong += any(call.fault(out, call.right()) for call, out in results)
    yield "graphs of small collectives in turn", f"{wrong} replays are wrong" if wrong else ""


def graphed_us(call: Callable[[], Any]) -> float:
    """Return the time of a call in microseconds, in a captured graph of ``CALLS`` calls: the
    slowest rank's least of 5 replays."""
    call()
    torch.cuda.synchronize()
    tw.barrier()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        tw.barrier()
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(min(times[1:]), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def others_of(call: SmallCall) -> dict[str, Callable[[], Any]]:
    """Return the implementations to compare a call with."""
    out = torch.empty_like(call())
    others = {"ldst": lambda: call("ldst", out), "NCCL": lambda: call("nccl", out)}
    if call.op == "all_reduce":
        shared = symm_mem.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
        name = dist.group.WORLD.group_name
        symm_mem.rendezvous(shared, name)
        one_shot = torch.ops.symm_mem.one_shot_all_reduce
        others["symm_mem one-shot"] = lambda: one_shot(shared, "sum", name)
    return others


def small_latency(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for op, sizes in TIMED.items():
        for kib in sizes:
            axes = (0, 0) if op == "all_to_all" else ()
            call = SmallCall(op, axes, (kib << 9,), torch.bfloat16)
            out = torch.empty_like(call())
            times = {"ll": graphed_us(lambda call=call, out=out: call("ll", out))}
            for name, other in others_of(call).items():
                try:
                    times[name] = graphed_us(other)
                except RuntimeError as error:
                    say(f"{name} of {call.name}: not run: {str(error).splitlines()[0]}")
            text = ", ".join(f"{name} {us:.2f} us" for name, us in times.items())
            yield f"{op} of {kib} KiB: {text}", ""


def verdicts(options: argparse.Namespace) -> Verdicts:
    checks = {
        "inferred": inferred, "graph": graph, "ping_pong": ping_pong, "latency": latency,
        "small": small, "small_graphs": small_graphs, "small_latency": small_latency,
    }  # fmt: skip
    for name in options.checks or CHECKS:
        shares_gpus = any(opened.group.shares_gpus for opened in session.opened())
        if name in NEED_GPU_EACH and shares_gpus:
            say(f"{name}: not run: ranks share a GPU")
        elif runs_here(name, CHECKS):
            yield from checks[name](options)


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--launches", type=int, default=2000)
    sys.exit(main(verdicts, parser))
