"""Time the routing of dispatch on one GPU: its kernels beside the operations of torch.

    python benchmarks/routing.py [--case RANKS TOKENS CHOICES EXPERTS ...]
        [--routing uniform zipf hot] [--dtype int32] [--calls 20] [--rep 50]

No other rank takes part: rank 0 computes its tables from the experts of all tokens. ``TOKENS`` are
those of each rank, ``EXPERTS`` those of all ranks. Times are in us, medians of ``--rep``.

- ``graph``: a call in a CUDA graph of ``--calls`` calls
- ``eager``: a call from Python with its host time, on an idle GPU, until the GPU is idle again

``routing`` is that of ``tileweave bench moe``. The capacity is enough for every routing. All tables
are compared with those of torch. Without a GPU, torch runs twice on small sizes, which only tests
this file.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from graph_times import graph_us

from tileweave.bench.moe_shapes import ROUTINGS, Model, choices_of
from tileweave.ops.moe.routing import (
    Routing,
    default_capacity,
    has_kernel,
    routing_by_torch,
    routing_of,
)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CASES = (
    (4, 1, 8, 256),
    (4, 32, 8, 256),
    (4, 128, 8, 256),
    (4, 1024, 4, 128),
    (4, 1024, 8, 256),
    (4, 4096, 8, 256),
    (8, 8192, 8, 256),
    (8, 8192, 8, 512),
)
Call = Callable[[], Routing]


def eager_us(call: Call, rep: int) -> float:
    """Return the median time of a call that begins and ends with an idle GPU."""
    times = []
    for _ in range(rep):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def tables(routing: Routing) -> tuple[torch.Tensor, ...]:
    return *routing.tables, routing.offsets, routing.dropped


def measure(case: tuple[int, ...], routing: str, options: argparse.Namespace) -> str:
    """Return a row of the table."""
    ranks, tokens, choices, experts = case
    model = Model(experts, choices, 0, 0)
    ids = choices_of(model, tokens, routing, ranks, 0)
    ids = ids.to(DEVICE, getattr(torch, options.dtype))
    arguments = ids, 0, experts, default_capacity(tokens, ranks, choices, experts // ranks)
    if GPU and not has_kernel(ids, experts):
        raise SystemExit(f"{case}: the kernels do not accept this size")
    calls: list[Call] = [lambda f=f: f(*arguments) for f in (routing_of, routing_by_torch)]
    results = [tables(call()) for call in calls]
    if not all(torch.equal(*pair) for pair in zip(*results, strict=True)):
        raise SystemExit(f"{case}, {routing}: the tables differ")
    times = []
    if GPU:
        times = [graph_us(call, options.calls, options.rep) for call in calls]
        times += [eager_us(call, options.rep) for call in calls]
    shape = " ".join(f"{n:7}" for n in case)
    return f"{shape} {routing:>8} {' '.join(f'{us:11.1f}' for us in times)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, nargs=4, action="append")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    parser.add_argument("--dtype", choices=["int32", "int64"], default="int32")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rep", type=int, default=50)
    options = parser.parse_args()
    cases = options.case or (CASES if GPU else CASES[:2])
    print(time.strftime("%F %T"), torch.cuda.get_device_name() if GPU else "no GPU")
    shape = " ".join(f"{name:>7}" for name in ("ranks", "tokens", "choices", "experts"))
    columns = " ".join(f"{n:>11}" for n in ("graph", "torch graph", "eager", "torch eager"))
    print(f"{shape} {'routing':>8} {columns}")
    for case in cases:
        for routing in options.routing:
            print(measure(tuple(case), routing, options), flush=True)


if __name__ == "__main__":
    main()
