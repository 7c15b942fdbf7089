"""tileweave.ops.ulysses_attention between real GPUs: values, gradients, many calls, graphs.

    torchrun --nproc-per-node=4 tests/gpu/ulysses.py [CHECK ...] [--transports ...]

Results are compared with fp32 attention over the whole sequence, which every rank computes. Without
a GPU the same checks, but for that of graphs, run with gloo, on small shapes: that tries this file.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from tileweave import ops
from tileweave.ops.attention.ulysses import exchanges_of, problem_of
from tileweave.ops.collectives.all_to_all import AllToAll
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.transport import auto_transports
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu_calls import Call, back_to_back, relative_error, replayed, values
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here, transports_here

TRANSPORTS = ["auto", "ldst", "nccl"] if GPU else ["auto"]
HEAP_BYTES = 6 << 30
VALUE_ERROR, GRADIENT_ERROR = 2e-2, 2e-2
"""Largest absolute error of results, and relative norm of gradients, for inputs from N(0, 1)."""


class Case(NamedTuple):
    """Extents of the whole sequence. Heads are per rank; 0 heads of k and v mean one for all
    ranks."""

    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    v_width: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16

    def shapes(self, ranks: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a rank's inputs."""
        kv = self.kv_heads * ranks or 1
        whole = {
            "q": (self.rows, self.heads * ranks, self.width),
            "k": (self.keys, kv, self.width),
            "v": (self.keys, kv, self.v_width),
            "grad": (self.rows, self.heads * ranks, self.v_width),
        }
        return {name: (self.batch, n // ranks, *more) for name, (n, *more) in whole.items()}


CASES = [
    Case(1, 2048, 2048, 4, 4, 128, 128, True),
    Case(1, 2048, 2048, 4, 1, 128, 128, True),
    Case(2, 1024, 1024, 4, 2, 64, 64, False),
    Case(2, 1024, 1024, 4, 1, 64, 64, True, torch.float16),
    Case(1, 1024, 3072, 4, 4, 128, 128, True),
    Case(1, 1024, 3072, 4, 1, 128, 128, True),
    Case(3, 512, 1536, 2, 0, 128, 128, True),
    Case(1, 1024, 1024, 4, 0, 128, 128, False),
    Case(1, 1024, 1024, 2, 2, 192, 128, True),
    Case(1, 1000, 1016, 2, 1, 80, 80, True),
]
if not GPU:
    CASES = [c._replace(rows=c.rows // 64 * 4, keys=c.keys // 64 * 4) for c in CASES]


class Attention(Call):
    """One call with its inputs and reference."""

    def __init__(self, case: Case, transport: str, seed: int) -> None:
        self.case, self.transport, self.group = case, transport, group_of("")
        self.name = str(case)
        self.device = torch.device("cuda", torch.cuda.current_device()) if GPU else "cpu"
        torch.manual_seed(1000 * seed + self.group.rank)
        self.q, self.k, self.v, self.grad = (
            torch.randn(shape, dtype=case.dtype, device=self.device).requires_grad_(name != "grad")
            for name, shape in case.shapes(self.group.world_size).items()
        )

    def __call__(self) -> torch.Tensor:
        return ops.ulysses_attention(
            self.q, self.k, self.v, causal=self.case.causal, transport=self.transport
        )

    def refill(self, seed: int) -> None:
        for x in (self.q, self.k, self.v):
            x.data.normal_()

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks in fp32."""
        every = nccl.all_gather(x.detach()[None], self.group)
        return torch.cat([*every], 1).float()

    @torch.enable_grad()
    def right(self) -> list[torch.Tensor]:
        """Return the reference result and gradients."""
        whole = [self.gathered(x).requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = (x.transpose(1, 2) for x in whole)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=self.device)
        if self.case.causal:
            seen = seen.tril(k.shape[2] - q.shape[2])
        out = scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)
        gradients = torch.autograd.grad(out, whole, self.gathered(self.grad))
        return [
            x.detach().chunk(self.group.world_size, 1)[self.group.rank] for x in (out, *gradients)
        ]

    def fault(self, out: torch.Tensor, right: list[torch.Tensor]) -> str:
        if out.shape != right[0].shape or out.dtype != self.case.dtype:
            return f"{self.case}: {tuple(out.shape)} {out.dtype}; expected {tuple(right[0].shape)}"
        error = (out.float() - right[0]).abs().max().item()
        return "" if error <= VALUE_ERROR else f"{self.case}: largest error {error:.1e}"


class Training(Attention):
    """A call and its gradients."""

    def __call__(self) -> list[torch.Tensor]:
        out = super().__call__()
        return [out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)]

    def differs(self, actual: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
        wrong = [~((actual[0].float() - right[0]).abs().max() <= VALUE_ERROR)]
        for gradient, expected in zip(actual[1:], right[1:], strict=True):
            wrong.append(~(relative_error(gradient, expected) <= GRADIENT_ERROR))
        return torch.stack(wrong).any()


def compile_all(transports: list[str]) -> None:
    """Compile the exchanges, also of gradients, in parallel."""
    ranks, results = group_of("").world_size, []
    for case in CASES:
        q, k, v, _ = (
            torch.empty(shape, dtype=case.dtype, device="meta")
            for shape in case.shapes(ranks).values()
        )
        for problem in exchanges_of(problem_of(q, k, v, case.causal, None, ranks)):
            grad = torch.empty(problem.result, dtype=case.dtype, device="meta")
            results += [
                problem,
                checked_problem(problem.op, grad, None, ranks, problem.options[::-1]),
            ]
    compile_ahead(
        AllToAll.steps(
            problem, auto_transports(problem, AllToAll)[0] if transport == "auto" else transport
        )
        for problem in dict.fromkeys(results)
        for transport in transports
        if transport != "nccl"
    )


def attentions(transport: str) -> list[Attention]:
    return [Attention(case, transport, seed) for seed, case in enumerate(CASES)]


@torch.no_grad()
def check_values(transport: str) -> str:
    return values(attentions(transport))


def check_gradients(transport: str) -> str:
    """Eager, and compiled."""

    def f(q, k, v, causal):
        return ops.ulysses_attention(q, k, v, causal=causal, transport=transport)

    for one in attentions(transport):
        right, given = one.right(), (one.q, one.k, one.v)
        torch.compiler.reset()
        for how in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
            out = how(*given, one.case.causal)
            if fault := one.fault(out.detach(), right):
                return fault
            gradients = torch.autograd.grad(out, given, one.grad)
            for name, gradient, expected in zip("qkv", gradients, right[1:], strict=True):
                if not (error := relative_error(gradient, expected)) <= GRADIENT_ERROR:
                    return f"{one.case}: gradient of {name}: relative error {error:.1e}"
    return ""


def check_back_to_back(transport: str, calls: int = 60) -> str:
    """Many calls, forwards and backwards, without host synchronization, with random delays."""
    every = [Training(case, transport, seed) for case in CASES[:3] for seed in (7, 8, 9)]
    return back_to_back(every, calls)


@torch.no_grad()
def check_graph(transport: str, replays: int = 20) -> str:
    """Calls of all cases in one graph, replayed with changing inputs."""
    return replayed(attentions(transport)[:5], replays, period=5)


CHECKS = {
    "values": check_values,
    "gradients": check_gradients,
    "back to back": check_back_to_back,
    "graph": check_graph,
}
NEED_GPU = ("graph",)


def verdicts(options: argparse.Namespace) -> Verdicts:
    transports = transports_here(options.transports)
    if GPU:
        compile_all(transports)
    for name, transport in product(options.checks or CHECKS, transports):
        if runs_here(name, NEED_GPU):
            yield f"{name} by {transport if GPU else 'gloo'}", CHECKS[name](transport)


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS[:1], choices=TRANSPORTS)
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
