"""Operators of tileweave.ops between real GPUs: values, gradients, graphs, refusals.

    torchrun --nproc-per-node=4 tests/gpu/operators.py [CHECK ...]

Results are compared with fp32 products of torch. Without a GPU the same checks, but for those of
graphs and of the heap, run with gloo: that tries this file, not the kernels.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.autotune.store import Measurement, table_for, tuning_key
from tileweave.ops.core import nccl
from tileweave.ops.core.compiled import op_cache_of
from tileweave.ops.core.epilogue import Epilogue
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.problem import Problem, checked_problem
from tileweave.ops.core.registry import OPERATORS as OPERATOR_OF
from tileweave.ops.gemm.gemm_operator import choice_of
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.executor.recorded_calls import invalidate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu_calls import Call, back_to_back, captured, relative_error, replayed, values
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here

FUSED = "fused" if GPU else "nccl"
HEAP_BYTES = 1 << 30
TOLERANCE = 1e-2
SIZES = [
    (256, 512, 256), (1024, 2048, 1024), (264, 520, 4104), (200, 328, 136), (1000, 2056, 1800),
    (8, 8, 8),
]  # fmt: skip
"""Rows per rank, N, K: whole tiles, long rows, tails along every axis, less than a tile.

An all-reduce has one row less in total."""
ALIKE = torch.Generator().manual_seed(0)
"""Generator that gives every rank the same numbers."""
FP8 = torch.float8_e4m3fn
OPERATORS = (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce)


class Product(Call):
    """One operator with its inputs and reference."""

    def __init__(
        self, op, share, N, K, dtype=torch.bfloat16, transposed=True, biased=False
    ) -> None:
        if dtype == FP8:
            N, K = (-(-extent // 16) * 16 for extent in (N, K))
        self.op, self.sizes, self.dtype = op, (share, N, K), dtype
        self.ranks = group_of("").world_size
        whole = share * self.ranks
        wanted = torch.float16 if dtype == FP8 else dtype
        rows, out = {
            ops.all_gather_matmul: (share, whole),
            ops.matmul_reduce_scatter: (whole, share),
            ops.matmul_all_reduce: (whole - 1, whole - 1),
        }[op]
        self.name = f"{op.__name__} {self.sizes} {dtype} {'transposed' if transposed else 'as is'}"
        self.name += " with bias" * biased
        self.more = {"bias": self.new(N, dtype=wanted)} if biased else {}
        if dtype == FP8:
            rank = group_of("").rank
            self.more |= {
                "scale_a": self.new(1, dtype=torch.float32).fill_(0.75),
                "scale_b": self.new(2, dtype=torch.float32).fill_(0.5 + rank)[1:],
                "out_dtype": wanted,
            }
        self.a, self.b = self.new(rows, K), self.new(N, K).t() if transposed else self.new(K, N)
        self.out = self.new(out, N, dtype=wanted)
        self.refill()

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="cuda" if GPU else "cpu")

    def refill(self, seed: int = 0) -> None:
        for operand in (self.a, self.b):
            operand.copy_(torch.randn(operand.shape, device=operand.device).div_(8))
        if "bias" in self.more:  # the same on every rank
            self.more["bias"].copy_(torch.randn(self.more["bias"].shape, generator=ALIKE))
        self.out.fill_(float("nan"))

    def __call__(self, strategy: str = FUSED) -> torch.Tensor:
        return self.op(self.a, self.b, **self.more, out=self.out, strategy=strategy)

    def right(self) -> torch.Tensor:
        return self.product() + self.more.get("bias", torch.zeros(())).float()

    def product(self) -> torch.Tensor:
        a, b, group = self.a.float(), self.b.float(), group_of("")
        if self.dtype == FP8:
            b *= self.more["scale_a"] * self.more["scale_b"]
        if self.op is ops.all_gather_matmul:
            return nccl.all_gather(a, group) @ b
        if self.op is ops.matmul_all_reduce:
            right = a @ b
            nccl.all_reduce(right, group)
            return right
        right = torch.empty(self.out.shape, device=a.device)
        nccl.reduce_scatter(a @ b, right, group)
        return right

    def differs(self, actual: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return ~(relative_error(actual, right) <= TOLERANCE)

    def fault(self, actual: torch.Tensor, right: torch.Tensor) -> str:
        wrong = self.differs(actual, right)
        return f"{self.name}: relative error {relative_error(actual, right):.1e}" if wrong else ""


def products(**options) -> list[Product]:
    return [Product(op, *sizes, **options) for sizes in SIZES for op in OPERATORS]


def every_product() -> list[Product]:
    """Return problems of all sizes with several types and layouts, and a bias."""
    return [
        product
        for dtype, transposed, biased in (
            (torch.bfloat16, True, False), (torch.float16, False, False),
            (torch.bfloat16, False, True), (FP8, True, False), (FP8, True, True),
        )
        for product in products(dtype=dtype, transposed=transposed, biased=biased)
    ]  # fmt: skip


def problem_of(product: Product) -> Problem:
    epilogue = Epilogue(**product.more)
    return checked_problem(
        product.op.__name__, product.a, product.b, product.ranks, product.out, epilogue
    )


def share_out_programs() -> None:
    """Every program of each operator runs for some of the problems, with any number of chunks, not
    only the choices of the table."""
    known = table_for(group_of(""))
    for number, product in enumerate(every_product()):
        problem = problem_of(product)
        kind = OPERATOR_OF[problem.op]
        every = reversed(kind.candidates(problem))
        ways = {(c.program, c.tiles.num_chunks): c for c in every}
        place = number // len(OPERATORS)
        choice = list(ways.values())[(place + place // len(SIZES)) % len(ways)]
        known[tuning_key(problem)] = Measurement(choice, 0.0, 1.0)
    invalidate()


def usual_products() -> list[Product]:
    return [*every_product(), *products(biased=True)]


def gradient_products() -> list[Product]:
    """Return the products of ``two_layers``, forwards and backwards."""
    wide, narrow = (
        (ops.all_gather_matmul, 200, 1032, 512),
        (ops.matmul_reduce_scatter, 200, 512, 1032),
    )
    return [
        *(Product(*layer, biased=True) for layer in (wide, narrow)),
        *(Product(*layer, transposed=False) for layer in (wide, narrow)),
    ]


def heap_products() -> list[Product]:
    """Return three problems, each of which needs two fifths of the heap."""
    share = HEAP_BYTES * 2 // 5 // (2 * 1024 * group_of("").world_size)
    return [Product(ops.all_gather_matmul, share - 8 * i, 512, 1024) for i in range(3)]


def compile_all(checks: Iterable[str]) -> None:
    """Compile the programs of the checks in parallel."""
    group = group_of("")
    needed = dict.fromkeys(NEEDED.get(name, usual_products) for name in checks)
    chosen = [
        (problem, choice_of("fused", problem, group))
        for products_of in needed
        for problem in map(problem_of, products_of())
    ]
    compile_ahead(
        program
        for problem, choice in chosen
        for program in OPERATOR_OF[problem.op].compiled_programs(problem, choice)
    )


def check_values() -> str:
    return values(every_product(), 3)


def check_exact(calls: int = 500) -> str:
    """Compare each element of sums that every type represents exactly."""
    calls = calls if GPU else 4
    for product in products():
        given = [(sparse(product.a), sparse(product.b)) for _ in range(4)]
        rights = []
        for product.a, product.b in given:
            rights.append(product.right().to(product.out.dtype))
        wrong = torch.zeros((), dtype=torch.int64, device=product.out.device)
        for number in range(calls):
            product.a, product.b = given[number % 4]
            wrong += (product() != rights[number % 4]).sum()
        if wrong.item():
            return f"{product.name}: {wrong.item()} elements wrong in {calls} calls"
    return ""


def sparse(like: torch.Tensor) -> torch.Tensor:
    """Return -1 and 1 in a tenth of the elements, with the memory order of ``like``."""
    actual = torch.empty_like(like)
    signs = torch.randn(like.shape, device=like.device).sign()
    return actual.copy_(signs * (torch.rand(like.shape, device=like.device) < 0.1))


def check_bits() -> str:
    """Equal inputs give equal bits, on all ranks of an all-reduce; gathered rows are copies."""
    for product in [*products(), *products(dtype=FP8, biased=True)]:
        first = product().clone()
        if any(not torch.equal(product(), first) for _ in range(10)):
            return f"{product.name}: not the same in each call"
        if product.op is ops.matmul_all_reduce and not is_equal_on_ranks(first):
            return f"{product.name}: not the same on all ranks"
        if product.op is ops.all_gather_matmul:
            _, rows = ops.all_gather_matmul(
                product.a, product.b, **product.more, return_gathered=True, strategy=FUSED
            )
            if not torch.equal(rows, nccl.all_gather(product.a, group_of(""))):
                return f"{product.name}: gathered rows are wrong"
    return ""


def is_equal_on_ranks(result: torch.Tensor) -> bool:
    every = nccl.all_gather(result, group_of("")).view(-1, *result.shape)
    return all(torch.equal(other, result) for other in every)


def check_back_to_back(calls: int = 200) -> str:
    """Many calls of all sizes without host synchronization, with random delays of ranks."""
    return back_to_back([*products(biased=True), *products(), *products(dtype=FP8)], calls)


def check_graph(replays: int = 100) -> str:
    """Two calls of each in one graph, replayed with changing inputs."""
    every = [*products(), *products(biased=True), *products(dtype=FP8)]
    if fault := replayed([p for p in every for _ in range(2)], replays):
        return fault
    new = Product(ops.all_gather_matmul, 16, 16, 24)
    try:
        captured(new)
    except tw.TileWeaveError as error:
        return "" if "not compiled yet" in str(error) else str(error)
    return "a new shape was captured"


def two_layers(x, up, down, before, behind, strategy):
    h = ops.all_gather_matmul(x, up.t(), bias=before, strategy=strategy)
    return ops.matmul_reduce_scatter(h.relu(), down.t(), bias=behind, strategy=strategy)


def check_gradients() -> str:
    """Compare fused with torch, and compiled with eager."""
    new = Product(ops.all_gather_matmul, 8, 8, 8).new
    names = ("y", "x", "up", "down", "before", "behind")
    shapes = ((200, 512), (1032, 512), (512, 1032), (1032,), (512,), (200, 512))
    tensors = [new(*shape).normal_().div_(8) for shape in shapes]
    compiled = torch.compile(two_layers, backend="aot_eager", fullgraph=True)
    results = []
    for f, strategy in ((two_layers, "nccl"), (two_layers, FUSED), (compiled, FUSED)):
        *given, weight = (t.clone().requires_grad_() for t in tensors)
        y = f(*given, strategy)
        results.append([y, *torch.autograd.grad((y * weight).sum(), given)])
    for of, result in zip(("fused", "compiled"), results[1:], strict=True):
        for name, actual, right in zip(names, result, results[0], strict=True):
            if not (error := relative_error(actual, right)) <= 2 * TOLERANCE:
                return f"{of}: {name}: relative error {error:.1e}"
    return ""


def check_heap() -> str:
    """Operators make room for each other; one that cannot fit is refused."""
    given = heap_products()
    share = given[0].sizes[0]
    for _ in range(2):
        for product in given:
            product.refill()
            if fault := product.fault(product(), product.right()):
                return fault
    shares = [p.rows_per_rank for p, _ in op_cache_of(group_of("")).operators]
    if all(product.sizes[0] in shares for product in given):
        return "three times two fifths of the heap are allocated"
    try:
        Product(ops.all_gather_matmul, 4 * share, 512, 1024)()
    except tw.TileWeaveError as error:
        return "" if "TILEWEAVE_HEAP_BYTES" in str(error) else str(error)
    return "more than the heap was allocated"


def check_disagreement() -> str:
    me = group_of("").rank
    begin = time.perf_counter()
    wrong = Product(ops.matmul_reduce_scatter, 64, 512 + 8 * me, 256)
    try:
        wrong.op(wrong.a, wrong.b, strategy=FUSED)
    except tw.TileWeaveError as error:
        if f"(256, {512 + 8 * me})" not in str(error):
            return str(error)
        if (seconds := time.perf_counter() - begin) > 10:
            return f"told after {seconds:.0f} s"
    else:
        return "" if group_of("").world_size == 1 else "not told"
    product = Product(ops.matmul_reduce_scatter, 64, 512, 256)
    return product.fault(product(), product.right())


CHECKS = {
    "values": check_values,
    "exact": check_exact,
    "bits": check_bits,
    "back to back": check_back_to_back,
    "heap": check_heap,
    "graph": check_graph,  # what graphs captured stays in the heap, in pieces
    "gradients": check_gradients,
    "disagreement": check_disagreement,
}
NEED_GPU = ("graph", "heap")
NEEDED = {
    "gradients": gradient_products,
    "heap": heap_products,
    "disagreement": list,
}
"""Products of checks that do not use the usual ones."""


def verdicts(options: argparse.Namespace) -> Verdicts:
    if GPU:
        share_out_programs()
        compile_all(options.checks or CHECKS)
    torch.manual_seed(group_of("").rank)
    for name in options.checks or CHECKS:
        if runs_here(name, NEED_GPU):
            yield name, CHECKS[name]()


if __name__ == "__main__":
    sys.exit(main(verdicts, parser_of(__doc__, CHECKS), heap_bytes=HEAP_BYTES))
