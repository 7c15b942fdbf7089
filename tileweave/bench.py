"""``tileweave bench``: the operators beside what they are made of, in one process, on all ranks."""

from __future__ import annotations

import atexit
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import tilelang
import torch
import torch.distributed as dist
from tqdm import tqdm

from . import __version__, ops
from .builtins.errors import TileWeaveError
from .ops import nccl
from .ops.groups import group_of
from .ops.trial import TOLERANCE, Trial, problem_of
from .runtime import barrier, finalize, init
from .runtime.group import Group

OPERATORS = {
    "all_gather_matmul": ops.all_gather_matmul,
    "matmul_reduce_scatter": ops.matmul_reduce_scatter,
    "matmul_all_reduce": ops.matmul_all_reduce,
}
MODELS = {
    "llama8b": (4096, 14336),
    "llama70b": (8192, 28672),
    "llama405b": (16384, 53248),
    "qwen72b": (8192, 29568),
}
"""Hidden and inner size of the MLP. All-gather goes before its first product, reduce-scatter and
all-reduce behind its second."""
ROWS = (1024, 2048, 4096, 8192, 16384)
_SLEEP = 4_000_000
"""Cycles, about 2 ms, for which a GPU sleeps before each measurement, so that the host is ahead."""
_SPARE_BYTES = 64 << 20
"""Of the heap, for counters and tails."""


@dataclass(frozen=True)
class Shape:
    """A product of the whole group.

    Attributes:
        M, N, K: rows, columns and inner dimension. For ``all_gather_matmul`` N, else K is shared
            out among the ranks; so is M, but for ``matmul_all_reduce``.
    """

    name: str
    M: int
    N: int
    K: int


@dataclass(frozen=True)
class Result:
    """Times in ms: of each rank the median, of these the largest."""

    op: str
    shape: Shape
    strategy: str
    reason: str
    ours: float
    gemm: float
    comm: float
    nccl: float
    error: float
    """Relative, of the worst rank and run."""

    @property
    def ideal(self) -> float:
        """What no operator can beat."""
        return max(self.gemm, self.comm)

    @property
    def is_right(self) -> bool:
        return self.error <= TOLERANCE


def shapes_of(op: str, names: Iterable[str], rows: Iterable[int]) -> list[Shape]:
    """The shapes of the command line: names of models, each with all ``rows``, or ``MxNxK``.

    Raises:
        TileWeaveError: neither.
    """
    found = []
    for name in names:
        sizes = name.split("x")
        if name in MODELS:
            hidden, inner = MODELS[name]
            N, K = (inner, hidden) if op == "all_gather_matmul" else (hidden, inner)
            found += [Shape(name, M, N, K) for M in rows]
        elif len(sizes) == 3 and all(s.isdecimal() and int(s) > 0 for s in sizes):
            found.append(Shape("", *map(int, sizes)))
        else:
            raise TileWeaveError(f"bench: --shapes {name}; expected {', '.join(MODELS)} or MxNxK")
    return found


class Bench:
    """Measures one operator for one shape."""

    def __init__(
        self, op: str, shape: Shape, group: Group, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.op, self.shape, self.group, self.device = op, shape, group, device
        operator = OPERATORS[op]
        problem = problem_of(op, shape.M, shape.N, shape.K, group.world_size, dtype)
        self.gathers, self.scatters = problem.gathers, problem.scatters
        self.trial = Trial(problem, group)
        self.c = self.trial.c
        self.whole = self.trial.new(problem.M, problem.K).normal_() if self.gathers else None
        """Rows of all ranks, for the product alone."""
        self.rows = None if self.gathers else self.trial.new(problem.M, problem.N)
        """The rank's product, for the product and the reduction alone."""
        self.contenders: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
            "ours": lambda a, b: operator(a, b, out=self.c),
            "gemm": self._multiply,
            "comm": lambda a, b: self._communicate(a),
            "nccl": lambda a, b: operator(a, b, out=self.c, strategy="nccl"),
        }

    def _multiply(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if self.gathers:
            torch.mm(self.whole, b, out=self.c)
        else:
            torch.mm(a, b, out=self.rows)

    def _communicate(self, a: torch.Tensor) -> None:
        if self.gathers:
            nccl.all_gather(a, self.group)
        elif self.scatters:
            nccl.reduce_scatter(self.rows, self.c, self.group)
        else:
            nccl.all_reduce(self.rows, self.group)

    def run(self, warmups: int, runs: int, progress: bool) -> Result:
        """The medians of ``runs`` rounds. In each, every contender runs once, in another order
        than before, on inputs that none before it has read."""
        times: dict[str, list[float]] = {name: [] for name in self.contenders}
        error = 0.0
        names = list(self.contenders)
        what = f"{self.op} {self.shape.M} x {self.shape.N} x {self.shape.K}"
        for turn in tqdm(range(warmups + runs), what, disable=not progress, leave=False):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                given = self.trial.inputs()
                self.c.fill_(float("nan"))
                ms = self.milliseconds(name, given)
                if turn >= warmups:
                    times[name].append(ms)
                if name == "ours":
                    ours = *given, self.c.clone()
            error = max(error, self.trial.error_of(*ours))
        strategy = ops.strategy_of(getattr(ops, self.op), *self.trial.inputs())
        medians = {name: self._slowest(statistics.median(t)) for name, t in times.items()}
        return Result(
            self.op,
            self.shape,
            strategy.name,
            strategy.reason,
            error=self._slowest(error),
            **medians,
        )

    def milliseconds(self, name: str, inputs: tuple[torch.Tensor, torch.Tensor]) -> float:
        """How long this rank takes for a contender, from when all ranks have come."""
        call = self.contenders[name]
        if self.device.type != "cuda":
            if self.group.process_group is not None:
                dist.barrier(self.group.process_group)
            begin = time.perf_counter()
            call(*inputs)
            return (time.perf_counter() - begin) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        barrier()
        torch.cuda._sleep(_SLEEP)
        first.record()
        call(*inputs)
        last.record()
        torch.cuda.synchronize(self.device)
        return first.elapsed_time(last)

    def _slowest(self, value: float) -> float:
        """The largest of all ranks."""
        every = torch.tensor([value], device=self.device, dtype=torch.float64)
        return nccl.all_gather(every, self.group).max().item()


def run(
    names: Sequence[str],
    shapes: Sequence[str],
    rows: Sequence[int],
    dtype: str,
    warmups: int,
    runs: int,
    file: str | None,
) -> bool:
    """Measure, print a table on rank 0 and, with ``file``, write JSON; whether all was right.

    Collective: under torchrun every process calls it.

    Raises:
        TileWeaveError: an operator, a shape or a type that there is not.
    """  # fmt: skip
    for name in names:
        if name not in OPERATORS:
            raise TileWeaveError(f"bench: {name}; expected {', '.join(OPERATORS)}")
    wanted = [(op, s) for op in names or OPERATORS for s in shapes_of(op, shapes, rows)]
    device = _join(wanted)
    group = group_of("")
    leads = group.rank == 0
    if leads and device.type == "cpu":
        print("no GPU: gloo and torch.mm on the CPU; these times say nothing of operators")
    found: list[Result] = []
    for op, shape in wanted:
        bench = Bench(op, shape, group, device, getattr(torch, dtype))
        found.append(bench.run(warmups, runs, progress=leads and sys.stderr.isatty()))
        if leads:
            if len(found) == 1:
                print(_HEAD)
            print(_row(found[-1]), flush=True)
    if leads and file is not None:
        with open(file, "w") as out:
            json.dump(
                _machine(group, device, dtype, runs) | {"results": [asdict(r) for r in found]},
                out, indent=1,
            )  # fmt: skip
    if device.type == "cuda":
        finalize()
    return all(r.is_right for r in found)


def _join(wanted: list[tuple[str, Shape]]) -> torch.device:
    """Meet the other ranks, with a heap for the largest operator unless its size is given."""
    if torch.cuda.is_available():
        most = max(_symmetric_bytes(op, shape) for op, shape in wanted)
        given = "TILEWEAVE_HEAP_BYTES" in os.environ
        init(heap_bytes=None if given else most + _SPARE_BYTES)
        return torch.device("cuda", torch.cuda.current_device())
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)
    return torch.device("cpu")


def _symmetric_bytes(op: str, shape: Shape) -> int:
    """What an operator takes on each rank, without counters and tails: of 2-byte numbers."""
    taken = {
        "all_gather_matmul": shape.M * shape.K,
        "matmul_reduce_scatter": 2 * shape.M * shape.N,
        "matmul_all_reduce": 3 * shape.M * shape.N,
    }
    return 2 * taken[op]


_HEAD = (
    f"{'operator':<22}{'M x N x K':<22}{'ours':>8}{'gemm':>8}{'comm':>8}{'nccl':>8}"
    f"{'ours/ideal':>12}{'nccl/ours':>11}{'error':>9}  how"
)


def _row(r: Result) -> str:
    size = f"{r.shape.M} x {r.shape.N} x {r.shape.K}"
    how = r.strategy if r.strategy == "fused" else f"{r.strategy}: {r.reason}"
    return (
        f"{r.op:<22}{size:<22}{r.ours:>8.3f}{r.gemm:>8.3f}{r.comm:>8.3f}{r.nccl:>8.3f}"
        f"{r.ours / r.ideal:>12.3f}{r.nccl / r.ours:>11.3f}{r.error:>9.1e}  {how}"
        + ("" if r.is_right else "  WRONG")
    )


def _machine(group: Group, device: torch.device, dtype: str, runs: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": name,
        "ranks": group.world_size,
        "dtype": dtype,
        "runs": runs,
        "unit": "ms",
        "versions": {
            "tileweave": __version__,
            "tilelang": tilelang.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
