"""Collectives of tileweave.ops between real GPUs: values, bits, gradients, graphs, refusals.

    torchrun --nproc-per-node=4 tests/gpu/collectives.py [CHECK ...] [--transports ...]

Results are compared with what torch.distributed gathers, computed by one rank. Without a GPU the
same checks, but for that of graphs, run with gloo: that tries this file, not the transports.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.collectives.collective import Collective, checked_problem
from tileweave.ops.core import nccl
from tileweave.ops.core.collective_problem import CollectiveProblem
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu_calls import Call, back_to_back, replayed, values
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here, transports_here

TRANSPORTS = ["copy_engine", "ldst", "ll"]
HEAP_BYTES = 6 << 30
LAYOUTS: list[tuple[str, tuple[int, ...], list[tuple[int, ...]]]] = [
    ("all_gather", (), [(1024, 256), (3, 5, 8), (7, 8), (5 << 20, 4)]),
    ("reduce_scatter", (), [(1024, 256), (3, 5, 8), (7, 8), (5 << 20, 4)]),
    ("all_reduce", (), [(1024, 256), (3, 5, 8), (7, 8), (5 << 20, 4)]),
    ("all_to_all", (1, 0), [(64, 8, 128), (5, 1, 16), (2048, 16, 128)]),
    ("all_to_all", (0, 1), [(64, 8, 128), (1, 5, 16), (2048, 16, 128)]),
    ("all_to_all", (0, 0), [(64, 8, 128), (1, 8), (1, 6), (1 << 16, 128)]),
    ("all_to_all", (2, 1), [(2, 40, 8, 64)]),
    ("all_to_all", (1, 2), [(2, 40, 8, 64)]),
    ("all_to_all", (1, 1), [(6, 8, 64)]),
    ("broadcast", (0,), [(1024, 256), (3, 5, 8), (7, 8), (5 << 20, 4)]),
    ("broadcast", (1,), [(3, 5, 8)]),
    ("ring_shift", (1,), [(1024, 256), (3, 5, 8), (7, 8), (5 << 20, 4)]),
]
LAYOUTS += [
    (op, (), [(1024, 256), (7, 8), (5 << 20, 4)])
    for op in operators_of(Collective)
    if op not in {op for op, *_ in LAYOUTS}
]
"""Operator, axes or root, shapes: the sharded axis is a multiple of the number of ranks. A
collective without options needs no line."""
ODD = [
    ("all_gather", (), (3, 7), torch.uint8),
    ("all_gather", (), (5, 3), torch.float64),
    ("all_to_all", (1, 0), (3, 1, 7), torch.uint8),
    ("reduce_scatter", (), (3, 7), torch.float32),
    ("all_reduce", (), (13,), torch.bfloat16),
    ("broadcast", (0,), (3, 7), torch.uint8),
]
"""Cases with unaligned parts, and with types that are only moved.

An all-reduce by copy engines needs a multiple of the number of ranks."""


class Case(NamedTuple):
    """A collective, and the shape of each rank's part."""

    op: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def given(self) -> tuple[int, ...]:
        """Return the shape of a rank's input."""
        shape = list(self.shape)
        if self.op in ("reduce_scatter", "all_to_all"):
            shape[self.axes[0] if self.axes else 0] *= group_of("").world_size
        return tuple(shape)

    @property
    def problem(self) -> CollectiveProblem:
        x = torch.empty(self.given, dtype=self.dtype, device="meta")
        return checked_problem(self.op, x, None, group_of("").world_size, self.axes)

    def can(self, transport: str) -> bool:
        return OPERATORS[self.op].obstacle(self.problem, transport) is None


def cases(last: int | None = None) -> list[Case]:
    """All layouts.

    Args:
        last: how many of the shapes of each are taken; None for all.
    """
    ranks = group_of("").world_size
    return [
        Case(op, axes, shape)
        for op, axes, shapes in LAYOUTS
        if op != "broadcast" or axes[0] < ranks
        for shape in shapes[:last]
    ]


class Exchange(Call):
    """One collective with its input and reference."""

    def __init__(self, case: Case, transport: str) -> None:
        self.op, self.axes, self.transport = case.op, case.axes, transport if GPU else "nccl"
        self.group = group_of("")
        self.name = f"{case.op} {case.axes} of {case.given} {case.dtype} by {self.transport}"
        self.x = torch.empty(case.given, dtype=case.dtype, device="cuda" if GPU else "cpu")
        self.refill()
        self.out = self.call(None)

    def refill(self, seed: int = 0) -> None:
        """Fill the input with integers whose sums are exact in any order and type."""
        self.x.copy_(torch.randint(0, 9, self.x.shape, device=self.x.device))

    def call(self, out: torch.Tensor | None) -> torch.Tensor:
        return getattr(ops, self.op)(self.x, *self.axes, out=out, transport=self.transport)

    def __call__(self) -> torch.Tensor:
        """Return the result of one more call in ``out``, which is overwritten with 77 first."""
        return self.call(self.out.fill_(77))

    def right(self) -> torch.Tensor:
        every = nccl.all_gather(self.x[None], self.group)
        return OPERATORS[self.op].expected(every, self.group.rank, *self.axes)

    def fault(self, actual: torch.Tensor, right: torch.Tensor) -> str:
        if actual.shape != right.shape:
            return f"{self.name}: shape {tuple(actual.shape)}; expected {tuple(right.shape)}"
        wrong = int((actual != right).sum())
        return f"{self.name}: {wrong} of {right.numel()} elements are wrong" if wrong else ""


LEFT_OUT: set[Case] = set()
"""Cases that the transport of the running check does not support."""


def exchanges(transport: str, last: int | None = None) -> list[Exchange]:
    """Return cases of every layout that a transport supports; add the others to ``LEFT_OUT``.

    Args:
        last: how many of the shapes of each are taken; None for all.
    """
    every = cases(last if GPU else 1)
    LEFT_OUT.update(case for case in every if not case.can(transport))
    return [Exchange(case, transport) for case in every if case.can(transport)]


def compile_all(transports: list[str]) -> None:
    """Compile the programs of most checks in parallel."""
    every = [*cases(), *(Case(*odd) for odd in ODD)]
    compile_ahead(
        OPERATORS[case.op].steps(case.problem, transport)
        for transport in transports
        for case in every
        if case.can(transport)
    )


def check_values(transport: str) -> str:
    return values(exchanges(transport), 3)


def check_odd(transport: str) -> str:
    """Unaligned parts, and types that are only moved; the others are refused."""
    for odd in ODD:
        case = Case(*odd)
        try:
            one = Exchange(case, transport)
        except tw.TileWeaveError as error:
            legal = "expected a multiple of", "has no program by"
            if not case.can(transport) and any(text in str(error) for text in legal):
                continue
            return str(error)
        if GPU and not case.can(transport):
            return f"{one.name}: not refused"
        if fault := values([one], 2):
            return fault
    return ""


def check_bits(transport: str) -> str:
    """Equal inputs give equal bits even if sums depend on the order; so do all ranks of an
    all-reduce."""
    for one in exchanges(transport, 2):
        if not one.x.is_floating_point() or one.op not in ("reduce_scatter", "all_reduce"):
            continue
        one.x.normal_()
        first = one.call(None)
        if GPU and any(not torch.equal(one(), first) for _ in range(10)):
            return f"{one.name}: not the same in each call"
        every = nccl.all_gather(first[None], one.group)
        if one.op == "all_reduce" and any(not torch.equal(actual, first) for actual in every):
            return f"{one.name}: not the same on all ranks"
        total = nccl.all_gather(one.x[None], one.group).float().sum(0)
        if one.op == "reduce_scatter":
            total = total.chunk(one.group.world_size)[one.group.rank]
        error = ((first.float() - total).norm() / total.norm()).item()
        if not error < 1e-2:
            return f"{one.name}: relative error {error:.1e}"
    return ""


def check_back_to_back(transport: str, calls: int = 300) -> str:
    """Many calls without host synchronization, with random delays of ranks."""
    return back_to_back([one for _ in range(3) for one in exchanges(transport, 2)], calls)


def check_graph(transport: str, replays: int = 100) -> str:
    """Two calls of each in one graph, replayed with changing inputs."""
    return replayed([one for one in exchanges(transport, 2) for _ in range(2)], replays)


def weighted(op, axes, weight):
    """A function of a tensor and a transport."""

    def f(x, transport):
        return op(x, *axes, transport=transport) * weight

    return f


def check_gradients(transport: str) -> str:
    """Gradients equal those of torch.distributed, eager and compiled."""
    for one in exchanges(transport, 1):
        weight = torch.randint(0, 5, one.out.shape, device=one.x.device).to(one.x.dtype)
        f = weighted(getattr(ops, one.op), one.axes, weight)
        torch.compiler.reset()
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        results = []
        for call, transport in ((f, "nccl"), (f, one.transport), (compiled, one.transport)):
            x = one.x.clone().requires_grad_()
            results.append(torch.autograd.grad(call(x, transport).sum(), x)[0])
        for what, gradient in zip(("eager", "compiled"), results[1:], strict=True):
            if not torch.equal(gradient, results[0]):
                return f"{one.name}: {what}: gradients are wrong"
    return ""


CHECKS = {
    "values": check_values,
    "odd": check_odd,
    "bits": check_bits,
    "back to back": check_back_to_back,
    "graph": check_graph,
    "gradients": check_gradients,
}
NEED_GPU = ("graph",)


def verdicts(options: argparse.Namespace) -> Verdicts:
    transports = transports_here(options.transports)
    if GPU:
        compile_all(transports)
    torch.manual_seed(group_of("").rank)
    for name, transport in product(options.checks or CHECKS, transports):
        if runs_here(name, NEED_GPU):
            LEFT_OUT.clear()
            fault = CHECKS[name](transport)
            by = transport if GPU else f"gloo, what {transport} takes"
            without = [f"{len(LEFT_OUT)} that it cannot take left out"] if LEFT_OUT else []
            yield f"{name} by {by}", fault, *without


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
