"""tileweave.ops.decode_attention between real GPUs: values, many calls, graphs.

    torchrun --nproc-per-node=4 tests/gpu/decode/decode_attention.py [CHECK ...]
        [--strategies ...] [--launches 2000]

Each rank compares with the caches of all ranks, which it gathers. Results are equal, bit by bit, on
all ranks. Without a GPU the same checks, but for those of graphs, run with gloo, on small shapes:
that tries this file.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tileweave import ops
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of
from tileweave.ops.decode.decode_attention import DecodeAttention
from tileweave.ops.decode.problem import LATENT, NAME, DecodeProblem, Inputs, Results
from tileweave.ops.decode.reference import merged, part_of
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.gpu_calls import Call, back_to_back, replayed_in_turn, values
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here

STRATEGIES = ["fused", "nccl"] if GPU else ["auto"]
HEAP_BYTES = 2 << 30
ERROR = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Largest relative norm of the error of results."""
FP8 = torch.float8_e4m3fn
SCALES = 0.75, 1.5
"""Factors of the keys and of the values of fp8 caches."""
TABLE = 16 if GPU else 2
"""Pages of a sequence on each rank."""


def problem_of(
    batch: int, heads: int, kv_heads: int, dim: int, page_size: int,
    sharding: str = "interleaved", dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> DecodeProblem:  # fmt: skip
    """Return a problem whose caches have more pages than the sequences."""
    pages, is_latent = batch * TABLE + 3, dim == LATENT[0]
    return DecodeProblem(
        NAME, batch, heads, kv_heads, dim, LATENT[1] if is_latent else dim, pages, page_size, TABLE,
        0, dtype, cache_dtype or dtype, dim**-0.5, sharding, is_latent, True,
    )  # fmt: skip


CASES = [
    problem_of(1, 8, 1, 128, 64),
    problem_of(3, 32, 8, 128, 16),
    problem_of(5, 6, 2, 64, 32, "contiguous"),
    problem_of(33, 64, 8, 128, 128, dtype=torch.float16),
    problem_of(2, 96, 1, 128, 64, "local"),
    problem_of(3, 32, 8, 128, 16, cache_dtype=FP8),
    problem_of(2, 16, 2, 64, 64, "contiguous", torch.float16, FP8),
    problem_of(1, 128, 1, LATENT[0], 64),
    problem_of(3, 16, 1, LATENT[0], 128),
    problem_of(5, 96, 1, LATENT[0], 32, "contiguous", torch.float16),
]


class Step(Call):
    """Inputs of this rank, in fixed memory."""

    def __init__(self, problem: DecodeProblem, strategy: str) -> None:
        self.group = group_of("")
        self.problem, self.strategy = replace(problem, ranks=self.group.world_size), strategy
        self.name = str(problem)
        device = torch.device("cuda", torch.cuda.current_device()) if GPU else "cpu"
        options = {"device": device, "dtype": problem.dtype}
        cache = problem.pages, problem.page_size, problem.kv_heads
        stored = {"device": device, "dtype": problem.cache_dtype}
        is_quantized = problem.cache_dtype == FP8
        scales = [torch.tensor([x], device=device) if is_quantized else None for x in SCALES]
        table = torch.arange(problem.batch * TABLE, device=device, dtype=torch.int32)
        self.inputs = Inputs(
            torch.empty(problem.batch, problem.heads, problem.dim, **options),
            torch.empty(*cache, problem.dim, **stored),
            None if problem.latent else torch.empty(*cache, problem.v_dim, **stored),
            table.view(problem.batch, TABLE),
            torch.zeros(problem.batch, device=device, dtype=torch.int32),
            *scales,
        )
        self.refill(0)

    def refill(self, seed: int) -> None:
        """Write new numbers, lengths and pages: other caches on each rank, the rest equal."""
        torch.manual_seed(1000 * seed + self.problem.batch)
        q, k_cache, v_cache, table, lengths, *_ = self.inputs
        capacity = TABLE * self.problem.page_size
        if self.problem.sharding != "local":
            capacity *= self.problem.ranks
        q.normal_()
        lengths.random_(0, capacity + 1)
        if self.problem.batch > 1:
            lengths[0] = 0
        torch.manual_seed(1000 * seed + self.problem.batch + 1 + self.group.rank)
        for cache in (k_cache,) if v_cache is None else (k_cache, v_cache):
            cache.copy_(torch.randn(cache.shape, device=cache.device))
        order = torch.randperm(self.problem.pages, device=table.device)
        table.copy_(order[: table.numel()].view_as(table))

    def __call__(self) -> Results:
        problem = self.problem
        given = {name: x for name, x in self.inputs._asdict().items() if x is not None}
        return Results(
            *ops.decode_attention(
                **given, sharding=problem.sharding, return_lse=True, strategy=self.strategy
            )
        )

    def right(self) -> Results:
        """Return the results by definition, for the numbers now in memory."""
        parts = part_of(self.inputs, self.problem, self.group.rank)
        return merged(nccl.all_gather(parts[None], self.group), self.problem)

    def differs(self, actual: Results, right: Results) -> torch.Tensor:
        assert actual.lse is not None and right.lse is not None
        error = (actual.out.float() - right.out.float()).norm()
        limit = ERROR[self.problem.dtype] * right.out.float().norm() + 1e-6
        close = torch.isclose(actual.lse, right.lse, rtol=1e-3, atol=1e-2)
        return ~(error <= limit) | ~close.all()

    def fault(self, actual: Results, right: Results) -> str:
        """Return what is wrong with results, or ""."""
        if self.differs(actual, right):
            return f"{self.problem}: wrong results"
        for name, x in actual._asdict().items():
            flat = x.contiguous().view(torch.uint8).view(1, -1)
            if not (nccl.all_gather(flat, self.group) == flat).all():
                return f"{self.problem}: {name} differs between ranks"
        return ""


def steps(strategy: str) -> list[Call]:
    return [Step(case, strategy) for case in CASES]


def check_graphs(strategy: str, launches: int) -> str:
    """A graph for each case, with two calls; replayed in random order with new numbers, lengths,
    pages and delays."""
    if strategy == "nccl":
        return ""  # ranks that share a GPU use gloo, which graphs cannot capture
    return replayed_in_turn(steps(strategy), launches // 4)


CHECKS = {
    "values": lambda strategy: values(steps(strategy)),
    "back to back": lambda strategy, launches: back_to_back(steps(strategy), launches),
    "graphs": check_graphs,
}
NEED_GPU = ("graphs",)
MANY = ("back to back", "graphs")


@torch.no_grad()
def verdicts(options: argparse.Namespace) -> Verdicts:
    if GPU:
        ranks = group_of("").world_size
        compile_ahead(DecodeAttention.program(replace(case, ranks=ranks)) for case in CASES)
    for name, strategy in itertools.product(options.checks or CHECKS, options.strategies):
        if runs_here(name, NEED_GPU):
            arguments = (options.launches,) if name in MANY else ()
            fault = CHECKS[name](strategy, *arguments)
            yield f"{name} by {strategy if GPU else 'gloo'}", fault


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument(
        "--strategies", nargs="+", default=STRATEGIES, choices=[*STRATEGIES, "auto"]
    )
    parser.add_argument("--launches", type=int, default=2000 if GPU else 20)
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
