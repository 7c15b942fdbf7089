"""tileweave.ops.all_reduce_rms_norm between real GPUs: values, many calls, graphs.

    torchrun --nproc-per-node=4 tests/gpu/decode/all_reduce_rms_norm.py [CHECK ...]
        [--strategies ...] [--launches 2000]

Each rank compares with the rows of all ranks, which it gathers. The new residual has the bits of
the reference, and results are equal, bit by bit, on all ranks and by both programs. Without a GPU
the same checks, but for those of graphs, run with gloo, on small shapes: that tries this file.
"""

import argparse
import itertools
import random
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from tileweave import ops
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of
from tileweave.ops.norm.all_reduce_rms_norm import OWN, AllReduceRmsNorm
from tileweave.ops.norm.problem import Inputs, NormProblem
from tileweave.ops.norm.reference import Results, reference
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.gpu_calls import Call, back_to_back, relative_error, replayed_in_turn
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here

STRATEGIES = [*OWN, "nccl"] if GPU else ["auto"]
HEAP_BYTES = 2 << 30
EPS = 1e-5
ERROR = {torch.float8_e4m3fn: 6e-2, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Largest relative norm of the error of normalized rows and scales."""


class Case(NamedTuple):
    """Arguments of a call."""

    tokens: int
    hidden: int
    quant: str | None = None
    biased: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = [
    Case(1, 4096),
    Case(6, 6144, biased=True),
    Case(32, 7168, "fp8_1x128"),
    Case(138, 6144, "fp8"),
    Case(200, 8192, dtype=torch.float16),
    Case(5, 16384, "fp8_1x128", True),
    Case(33, 2888, "fp8_1x128"),
    Case(3, 8, "fp8", dtype=torch.float16),
]
if not GPU:
    CASES = [case._replace(tokens=case.tokens // 8 + 1) for case in CASES]


class Layer(Call):
    """Inputs of this rank, in fixed memory."""

    def __init__(self, case: Case, strategy: str) -> None:
        self.case, self.strategy, self.group = case, strategy, group_of("")
        self.name = str(case)
        options = {
            "device": torch.device("cuda", torch.cuda.current_device()) if GPU else "cpu",
            "dtype": case.dtype,
        }
        torch.manual_seed(case.tokens)
        shape = case.tokens, case.hidden
        x, residual = torch.empty(shape, **options), torch.empty(shape, **options)
        weight, bias = torch.randn(2, case.hidden, **options)
        scale = torch.full((1,), 0.03, device=options["device"]) if case.quant == "fp8" else None
        self.inputs = Inputs(
            x, residual, weight.clone(), bias.clone() if case.biased else None, scale
        )
        self.refill(0)

    def refill(self, seed: int) -> None:
        """Write new numbers: another x on each rank, the same residual on all."""
        torch.manual_seed(1000 * seed + self.case.tokens)
        self.inputs.residual.normal_()
        torch.manual_seed(1000 * seed + self.case.tokens + 1 + self.group.rank)
        self.inputs.x.normal_()

    def __call__(self, in_place: bool = False) -> Results:
        x, residual, weight, bias, scale, num_tokens = self.inputs
        results = {"residual_out": residual} if in_place else {}
        if in_place and self.case.quant is None:
            results["out"] = x
        out, *scales, residual_out = ops.all_reduce_rms_norm(
            x, residual, weight, EPS, bias=bias, quant=self.case.quant, scale=scale,
            num_tokens=num_tokens, strategy=self.strategy, **results,
        )  # fmt: skip
        return Results(out, residual_out, *scales)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, (W, ...)."""
        every = nccl.all_gather(x.contiguous().view(1, -1), self.group)
        return every.view(self.group.world_size, *x.shape)

    def right(self) -> Results:
        """Return the results by definition, for the numbers now in memory."""
        return reference(list(self.gathered(self.inputs.x)), self.inputs, EPS, self.case.quant)

    def limit(self, number: int) -> None:
        """Set the number of valid rows, in fixed memory."""
        if self.inputs.num_tokens is None:
            memory = torch.zeros(1, dtype=torch.int32, device=self.inputs.x.device)
            self.inputs = self.inputs._replace(num_tokens=memory)
        self.inputs.num_tokens.fill_(number)

    def fault_of_rows(self, number: int, actual: Results, right: Results) -> str:
        """Return what is wrong with the first rows of results, or ""."""
        rows = [Results(*(t if t is None else t[:number] for t in r)) for r in (actual, right)]
        return Layer.fault(self, *rows) if number else ""

    def differs(self, actual: Results, right: Results) -> torch.Tensor:
        differs = ~(relative_error(actual.out, right.out) <= ERROR[actual.out.dtype])
        if self.strategy in OWN:
            differs = differs | (actual.residual != right.residual).any()
        return differs

    def fault(self, actual: Results, right: Results) -> str:
        exact = self.strategy in OWN
        for name, one, other in zip(Results._fields, actual, right, strict=True):
            if one is None or other is None:
                continue
            every = self.gathered(one.view(torch.uint8))
            if not (every == every[:1]).all():
                return f"{self.case}: {name} differs between ranks"
            if exact and name == "residual" and not torch.equal(one, other):
                return f"{self.case}: the residual has other bits than the reference"
            error = relative_error(one, other)
            limit = ERROR[one.dtype] if one.dtype in ERROR else 1e-2
            if not error <= limit:
                return f"{self.case}: {name}: relative error {error:.1e}"
        return ""


class Padded(Layer):
    """A layer of which some rows are valid, another number of them after each ``refill``."""

    def refill(self, seed: int) -> None:
        super().refill(seed)
        self.number = random.Random(f"{seed} {self.case}").randrange(self.case.tokens + 1)
        self.limit(self.number)

    def fault(self, actual: Results, right: Results) -> str:
        return self.fault_of_rows(self.number, actual, right)


def layers(strategy: str) -> list[Layer]:
    return [Layer(case, strategy) for case in CASES]


def check_values(strategy: str) -> str:
    for layer in layers(strategy):
        right = layer.right()
        if fault := layer.fault(layer(), right) or layer.fault(layer(in_place=True), right):
            return fault
    return ""


def check_same_bits(strategy: str) -> str:
    """Rows of a call with more tokens, and the other program, have the same bits."""
    if strategy not in OWN:
        return ""
    for case in CASES:
        by_program = [Layer(case, name)() for name in OWN]
        if any(
            not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(*by_program, strict=True)
            if a is not None
        ):
            return f"{case}: the programs differ"
        whole, row = Layer(case, strategy), Layer(case._replace(tokens=1), strategy)
        x, residual, *others = whole.inputs
        row.inputs = Inputs(x[-1:].clone(), residual[-1:].clone(), *others)
        if not torch.equal(whole().out[-1:].view(torch.uint8), row().out.view(torch.uint8)):
            return f"{case}: a row depends on the number of tokens"
    return ""


def check_back_to_back(strategy: str, launches: int) -> str:
    """Many calls of changing shapes, without host synchronization, with random delays."""
    return back_to_back(layers(strategy), launches)


def check_graphs(strategy: str, launches: int, kind: type[Layer] = Layer) -> str:
    """A graph for each case, with two calls; replayed in random order with new numbers and
    delays."""
    if strategy == "nccl":
        return ""  # ranks that share a GPU use gloo, which graphs cannot capture
    return replayed_in_turn([kind(case, strategy) for case in CASES], launches // 4)


def check_numbers(strategy: str) -> str:
    """Calls with numbers of valid rows, among them 0 and more than the rows; padding is NaN."""
    for layer in layers(strategy):
        tokens = layer.case.tokens
        for number in dict.fromkeys((tokens, 0, tokens // 2, 1, tokens + 3)):
            layer.refill(number)
            layer.limit(number)
            right = layer.right()
            for padded in layer.inputs[:2]:
                padded[number:] = float("nan")
            if fault := layer.fault_of_rows(min(number, tokens), layer(), right):
                return f"{number} valid rows: {fault}"
            if number < tokens and not layer(in_place=True).residual[number:].isnan().all():
                return f"{layer.case}: {number} valid rows: rows of padding are written"
    return ""


def check_graphs_of_numbers(strategy: str, launches: int) -> str:
    """Replay the graphs with other numbers of valid rows."""
    return check_graphs(strategy, launches, Padded)


def compile_all(strategies: list[str]) -> None:
    """Compile all programs in parallel."""
    ranks = group_of("").world_size
    problems = [
        NormProblem("", tokens, c.hidden, ranks, c.dtype, EPS, c.biased, c.quant)
        for c in CASES
        for tokens in dict.fromkeys((c.tokens, 1))
    ]
    names = [name for name in OWN if name in strategies or "auto" in strategies]
    compile_ahead(
        AllReduceRmsNorm.program(problem, name)
        for problem, name in itertools.product(problems, names)
    )


CHECKS = {
    "values": check_values,
    "same bits": check_same_bits,
    "back to back": check_back_to_back,
    "graphs": check_graphs,
    "numbers of tokens": check_numbers,
    "graphs of numbers": check_graphs_of_numbers,
}
NEED_GPU = ("graphs", "graphs of numbers")
MANY = ("back to back", "graphs", "graphs of numbers")


@torch.no_grad()
def verdicts(options: argparse.Namespace) -> Verdicts:
    if GPU:
        compile_all(options.strategies)
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
