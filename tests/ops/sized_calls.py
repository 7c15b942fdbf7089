"""Small calls of each operator whose programs for several sizes share kernels."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from tests.ops.attention import test_sp_attention as attention
from tests.ops.decode import by_definition as decode
from tests.ops.moe import test_programs as moe
from tests.ops.norm import test_programs as norm
from tileweave.ops.attention.flash import FlashTiles
from tileweave.ops.attention.reference import reference_attention
from tileweave.ops.attention.sequence import PARTS
from tileweave.ops.collectives import all_reduce
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import Choice, Tiles
from tileweave.ops.decode.problem import DecodeProblem
from tileweave.ops.moe.kernels import row_layout
from tileweave.ops.moe.row_problem import RowProblem
from tileweave.ops.norm.problem import NormProblem
from tileweave.runtime.plans.parameters import parameters_of

Outputs = list[dict[str, np.ndarray]]


class SizedCall(NamedTuple):
    """A call of one size.

    Attributes:
        steps: its program or plan.
        similar: returns the programs that its operator compiles kernels for, too.
        inputs: arguments of each rank.
        check: compares the results of all ranks with the right ones.
    """

    steps: Any
    similar: Callable[[], list[Any]]
    inputs: list[dict[str, Any]]
    check: Callable[[Outputs], None]


@dataclass(frozen=True)
class SizedOperator:
    """Calls of an operator that differ in their size.

    Attributes:
        op: the operator.
        choice: its transport, strategy or tiles.
        problem: the problem of a size.
        call: inputs of all ranks, and the check of the results, for a problem and a seed.
        draw: draws a size, at most the given number in each extent.
        simulated: maximum number in an extent of sizes that are simulated.
        largest: maximum number in an extent of all sizes.
        most: maximum number of kernels for all sizes.
        constants: replaces constants of a module, so that small calls have several blocks.
    """

    op: str
    choice: Any
    problem: Callable[[Any], Any]
    call: Callable[[Any, int], tuple[list[dict[str, Any]], Callable[[Outputs], None]]]
    draw: Callable[[random.Random, int], Any]
    simulated: int
    most: int
    largest: int = 1 << 17
    constants: tuple[Any, str, Any] | None = None

    @property
    def ranks(self) -> int:
        return self.problem(self.draw(random.Random(0), 1)).ranks

    def sizes(self, count: int, seed: int = 0, largest: int | None = None) -> list[Any]:
        """Return different sizes in random order, by default small ones that are simulated."""
        rng, sizes = random.Random(seed), []
        for _ in range(100 * count):
            if (size := self.draw(rng, largest or self.simulated)) not in sizes:
                sizes.append(size)
            if len(sizes) == count:
                break
        return sizes

    def at(self, size: Any, seed: int = 0) -> SizedCall:
        """Return the call of a size with random inputs."""
        return SizedCall(*self.programs(size), *self.call(self.problem(size), seed))

    def programs(self, size: Any) -> tuple[Any, Callable[[], list[Any]]]:
        """Return the first two attributes of the call of a size."""
        problem = self.problem(size)
        steps, *_ = self._programs("compiled_programs", problem)
        return steps, partial(self._programs, "similar_programs", problem)

    def _programs(self, name: str, problem: Any) -> list[Any]:
        with self._replaced_constants():
            return getattr(OPERATORS[self.op], name)(problem, self.choice)

    def _replaced_constants(self) -> contextlib.AbstractContextManager:
        return mock.patch.object(*self.constants) if self.constants else contextlib.nullcontext()


def number(rng: random.Random, most: int) -> int:
    """Draw a number up to ``most``: small and large ones, often multiples of powers of two."""
    n = round(most ** rng.random())
    unit = rng.choice([1, 1, 4, 16, 64, 256])
    return min(max(n // unit, 1) * unit, most)


def collective(
    op: str, transport: str, unit: int = 1, most_rows: int = 70, columns: int = 256,
    options: tuple[int, ...] = (), ranks: int = 2, most: int = 5, **constants: Any,
) -> SizedOperator:  # fmt: skip
    """Return calls of a collective.

    Args:
        unit: number that divides all numbers of rows.
        most_rows: maximum number of units of rows that are simulated.
        columns: elements of a row.
    """

    def problem(rows: int) -> Any:
        x = torch.empty((rows, columns), dtype=torch.float32, device="meta")
        return checked_problem(op, x, None, ranks, options)

    def draw(rng: random.Random, largest: int) -> int:
        return unit * number(rng, largest)

    largest = OPERATORS[op].ll_bytes // (4 * columns * unit) if transport == "ll" else 1 << 17
    return SizedOperator(
        op, transport, problem, partial(exchange, transport), draw, most_rows, most, largest,
        **constants,
    )  # fmt: skip


def exchange(transport: str, problem: Any, seed: int) -> tuple[list[dict[str, Any]], Callable]:
    """Exchange small integers, so that all sums are exact."""
    rng, operator = np.random.default_rng(seed), OPERATORS[problem.op]
    x = rng.integers(-8, 9, (problem.ranks, *problem.shape)).astype(np.float32)
    steps = operator.steps(problem, transport)
    (parameter, *_) = getattr(steps, "parameters", None) or parameters_of(steps)
    shape = tuple(map(int, parameter.extents))

    def check(outputs: Outputs) -> None:
        for rank, output in enumerate(outputs):
            right = operator.expected(torch.from_numpy(x), rank, *problem.options)
            actual = output["out"].view(np.float32).reshape(right.shape)
            np.testing.assert_array_equal(actual, right.numpy(), err_msg=f"rank {rank}")

    return [{"x": given.view(parameter.dtype).reshape(shape)} for given in x], check


def collectives() -> Iterator[tuple[str, SizedOperator]]:
    """Yield calls of the collectives, with tiles of 16 rows, or by ``ll`` of 2."""
    for transport, most_rows in (("ldst", 70), ("ll", 9), ("copy_engine", 70)):
        for op, unit, options in (
            ("all_gather", 1, ()), ("reduce_scatter", 2, ()), ("all_reduce", 2, ()),
            ("all_to_all", 1, (1, 0)), ("all_to_all", 2, (0, 1)), ("ring_shift", 1, (1,)),
            ("broadcast", 1, (1,)),
        ):  # fmt: skip
            if transport not in OPERATORS[op].transports():
                continue
            name = " ".join([op, transport, *(["back"] if options == (0, 1) else [])])
            yield name, collective(op, transport, unit, most_rows, options=options)
    two_shot = all_reduce, "ONE_SHOT_BYTES", 0
    for transport, most_rows in (("ldst", 70), ("ll", 9)):
        call = collective("all_reduce", transport, 1, most_rows, ranks=3, constants=two_shot)
        yield f"all_reduce {transport} two_shot", call


def norm_of(strategy: str, quant: str | None) -> SizedOperator:
    """Return calls of the all-reduce with RMSNorm of rows of three groups."""

    def problem(tokens: int) -> NormProblem:
        return NormProblem("all_reduce_rms_norm", tokens, 264, 3, torch.bfloat16, 1e-6, quant=quant)

    def call(problem: NormProblem, seed: int) -> tuple[list[dict[str, Any]], Callable]:
        shape = norm.Shape(problem.ranks, problem.tokens, problem.hidden, quant)
        inputs = norm.inputs_of(shape, seed)
        return inputs, lambda outputs: norm.check_results(outputs, shape, seed)

    return SizedOperator("all_reduce_rms_norm", strategy, problem, call, number, 11, 1, 1 << 9)


def rows_of(op: str, choices: int) -> SizedOperator:
    """Return calls of dispatch or combine. With four choices, ranks store what they exchange on
    other ranks; else these load it."""
    dtype = {"dispatch": torch.int32, "combine": torch.bfloat16}[op]
    columns = moe.VECTORS * moe.WIDTHS[moe.TYPES[op]]

    def shape(tokens: int) -> moe.Shape:
        return moe.Shape(3, tokens, choices)

    def problem(tokens: int) -> RowProblem:
        return RowProblem(op, tokens, choices, shape(tokens).rows, columns, 3, dtype)

    def call(problem: RowProblem, seed: int) -> tuple[list[dict[str, Any]], Callable]:
        inputs = moe.inputs_of(shape(problem.tokens), op, seed)
        right = moe.expected(shape(problem.tokens), op, inputs)

        def check(outputs: Outputs) -> None:
            for output, rows in zip(outputs, right, strict=True):
                np.testing.assert_array_equal(output["out"].reshape(rows.shape), rows)

        return inputs, check

    # 16 blocks run at the same time, so blocks have several tokens, and chunks few blocks.
    constants = row_layout, "_THREADS_PER_SM", 8
    return SizedOperator(op, "ldst", problem, call, number, 24, 5, 1 << 9, constants)


def decode_of(ranks: int) -> SizedOperator:
    """Return calls of decode attention, with several splits of the keys of short sequences."""

    def problem(size: tuple[int, int]) -> DecodeProblem:
        batch, table = size
        return DecodeProblem(
            "decode_attention", batch, 2, 1, 64, 64, batch * table, 16, table, ranks,
            torch.bfloat16, torch.bfloat16, 0.125, "interleaved", latent=False, returns_lse=True,
        )  # fmt: skip

    def call(problem: DecodeProblem, seed: int) -> tuple[list[dict[str, Any]], Callable]:
        most = problem.table * problem.page_size * ranks
        rng = random.Random(seed)
        lengths = [rng.randint(0, most) for _ in range(problem.batch)]
        sequences = decode.Sequences.of(problem.config, lengths, seed)
        inputs = [sequences.inputs(rank) for rank in range(ranks)]
        return inputs, lambda outputs: decode.check(outputs, sequences, 1e-2)

    def draw(rng: random.Random, largest: int) -> tuple[int, int]:
        return number(rng, largest), number(rng, 8 * largest)

    return SizedOperator("decode_attention", "fused", problem, call, draw, 4, 4, 1 << 6)


def attention_of(layout: str) -> SizedOperator:
    """Return calls of causal attention over a sequence of all ranks."""

    def problem(rows: int) -> Any:
        return attention.asked(2, layout, rows, dim=64, v_dim=64, dtype=torch.float16)

    def call(problem: Any, seed: int) -> tuple[list[dict[str, Any]], Callable]:
        each, inputs = attention.inputs_of(problem, seed)
        ks, vs = [k for _, k, _ in each], [v for _, _, v in each]

        def check(outputs: Outputs) -> None:
            for rank, (output, (q, _, _)) in enumerate(zip(outputs, each, strict=True)):
                for name, right in zip(
                    ("Out", "LSE"), reference_attention(problem, rank, q, ks, vs), strict=True
                ):
                    actual = output[name].reshape(right.shape)
                    np.testing.assert_allclose(actual, right, atol=2e-3)

        return inputs, check

    simulated = 150 // PARTS[layout]
    tiles = FlashTiles(64, 64, 2, 128)
    return SizedOperator("sp_attention", tiles, problem, call, number, simulated, 5, 1 << 13)


def gemms() -> Iterator[tuple[str, SizedOperator]]:
    """Yield calls of the programs of GEMM operators, with small tiles."""
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for name in OPERATORS[op].programs:
            yield f"{op} {name}", gemm(op, name)


def gemm(op: str, name: str, ranks: int = 2) -> SizedOperator:
    """Return calls of a program of a GEMM operator. Small integers make all sums exact."""
    operator, choice = OPERATORS[op], Choice(name, Tiles(16, 16, 16, 2, 32))
    unit = ranks if operator.scatters else 1

    def problem(rows: int) -> Problem:
        return Problem(op, rows, 32, 32, ranks, torch.float16, True)

    def call(problem: Problem, seed: int) -> tuple[list[dict[str, Any]], Callable]:
        rng, (N, K) = np.random.default_rng(seed), (problem.N, problem.K)
        a = rng.integers(-2, 3, (ranks, problem.rows, K)).astype(np.float16)
        b = rng.integers(-2, 3, (ranks, N, K)).astype(np.float16)
        steps = operator.program(problem, choice)
        parameters = getattr(steps, "parameters", ())
        identity = {
            p.name: np.eye(*p.extents, dtype=p.dtype) for p in parameters if p.name == "identity"
        }
        if operator.gathers:
            right = [np.concatenate(a) @ of_rank.T for of_rank in b]
        else:
            total = sum(x.astype(np.float32) @ y.T for x, y in zip(a, b, strict=True))
            right = np.split(total, ranks) if operator.scatters else [total] * ranks

        def check(outputs: Outputs) -> None:
            for output, c in zip(outputs, right, strict=True):
                np.testing.assert_array_equal(output["C"].reshape(c.shape), c.astype(np.float16))

        return [{"A": x, "B": y, **identity} for x, y in zip(a, b, strict=True)], check

    def draw(rng: random.Random, largest: int) -> int:
        return unit * number(rng, largest)

    # Blocks of one_shot wait for each other, so all have to be resident.
    largest = 1 << 9 if name == "one_shot" else 1 << 13
    return SizedOperator(op, choice, problem, call, draw, 120, 10, largest)


OPERATORS_OF_SIZES = {
    **dict(collectives()),
    **dict(gemms()),
    **{
        f"all_reduce_rms_norm {strategy}{' ' + quant if quant else ''}": norm_of(strategy, quant)
        for strategy in norm.OWN
        for quant in (None, "fp8_1x128")
    },
    **{f"{op} {choices}": rows_of(op, choices) for op in moe.TYPES for choices in (2, 4)},
    **{f"decode_attention {ranks}": decode_of(ranks) for ranks in (1, 2)},
    **{f"sp_attention {layout}": attention_of(layout) for layout in PARTS},
}
