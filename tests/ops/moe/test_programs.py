"""Tile programs of dispatch and combine on simulated ranks, against NumPy."""

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.ops.moe.by_definition import random_ids
from tileweave.ops.moe.combine import Combine
from tileweave.ops.moe.dispatch import Dispatch
from tileweave.ops.moe.kernels.combine import CombineBlocks, combine_program
from tileweave.ops.moe.kernels.dispatch import DispatchBlocks, dispatch_program
from tileweave.ops.moe.kernels.row_layout import RowLayout
from tileweave.ops.moe.routing import default_capacity, masked_tables, routing_of
from tileweave.ops.moe.row_problem import RowProblem
from tileweave.simulator.simulate import executable_at

pytestmark = pytest.mark.filterwarnings("ignore:.*never waited for or read")

LONG = pytest.mark.long
LAUNCHES = 3
VECTORS, WIDTHS = 5, {"int32": 4, "bfloat16": 8, "float32": 4}
DTYPES = {"int32": np.int32, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
TYPES = {"dispatch": "int32", "combine": "bfloat16"}
SIDECARS = Path(__file__).with_name("equivalent")


class Shape(NamedTuple):
    """Extents of a simulated exchange.

    Attributes:
        is_masked: whether rows are in the masked layout.
    """

    ranks: int = 3
    tokens: int = 4
    choices: int = 2
    per_rank: int = 2
    capacity: int | None = None
    blocks: int = 3
    is_masked: bool = False

    @property
    def rows(self) -> int:
        if self.is_masked:
            return self.per_rank * self.ranks * self.tokens
        return self.capacity or default_capacity(
            self.tokens, self.ranks, self.choices, self.per_rank
        )

    def program(self, name: str, threads: int = 4) -> Any:
        """Return the program. Its blocks have several tokens. One of four threads holds two vectors
        of a row."""
        dtype = TYPES[name]
        layout = RowLayout(VECTORS, WIDTHS[dtype], dtype, threads, self.blocks)
        extents = self.tokens, self.choices, self.rows, self.ranks, layout
        if name == "combine":
            return combine_program(CombineBlocks(*extents))
        return dispatch_program(DispatchBlocks(*extents))

    def tables(self, seed: int) -> list[dict[str, np.ndarray]]:
        """Return a random routing, as tables of each rank."""
        num_experts = self.ranks * self.per_rank
        generator = torch.Generator().manual_seed(seed)
        ids = random_ids(self.ranks, self.tokens, self.choices, num_experts, generator)
        if self.is_masked:
            every = [masked_tables(ids, r, num_experts)[0] for r in range(self.ranks)]
        else:
            every = [routing_of(ids, r, num_experts, self.rows)[0] for r in range(self.ranks)]
        return [{n: t.numpy() for n, t in tables._asdict().items()} for tables in every]


def rows_of(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    shape = count * VECTORS, WIDTHS[dtype]
    if dtype == "int32":
        return rng.integers(1, 1 << 30, shape).astype(np.int32)
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def inputs_of(shape: Shape, name: str, seed: int) -> list[dict[str, np.ndarray]]:
    """Return the inputs of all ranks, for a random routing."""
    rng = np.random.default_rng(seed)
    inputs = []
    for tables in shape.tables(seed):
        if name == "dispatch":
            x = rows_of(rng, shape.tokens, "int32")
            inputs.append({"x": x, "source": tables["source"], "slots": tables["slots"]})
        else:
            y = rows_of(rng, shape.rows, "bfloat16")
            weights = rng.random(shape.tokens * shape.choices).astype(np.float32)
            tables["place"] = tables["place"].ravel()
            inputs.append({"y": y, "topk_weights": weights, **tables})
    return inputs


def expected(shape: Shape, name: str, inputs: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Return the results of all ranks, by definition."""
    if name == "dispatch":
        x = np.concatenate([i["x"].reshape(shape.tokens, -1) for i in inputs])
        sources = [i["source"][:, None] for i in inputs]
        return [np.where(s >= 0, x[s[:, 0].clip(0) // shape.choices], 0) for s in sources]
    rows = [i["y"].reshape(shape.rows, -1).astype(np.float32) for i in inputs]
    return [combined(shape, rows, given["place"], given["topk_weights"]) for given in inputs]


def combined(
    shape: Shape, rows: list[np.ndarray], place: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return the sums of the tokens of a rank: of the rounded sums of each rank's rows."""
    results = np.zeros((shape.tokens, VECTORS * WIDTHS["bfloat16"]), np.float32)
    of_tokens = (a.reshape(shape.tokens, shape.choices) for a in (place, weights))
    for total, places, factors in zip(results, *of_tokens, strict=True):
        for rank, y in enumerate(rows):
            own = np.zeros_like(total)
            for number in sorted({p for p in places if p // shape.rows == rank}, reverse=True):
                weight = np.float32(0)
                for factor in factors[places == number]:
                    weight += factor
                own += weight * y[number % shape.rows]
            total += own.astype(ml_dtypes.bfloat16).astype(np.float32)
    return results.astype(ml_dtypes.bfloat16)


@functools.cache
def executable(shape: Shape, name: str) -> Any:
    return executable_at(shape.program(name), shape.ranks, "tile", "sm_90a")


def check(shape: Shape, name: str, seed: int, schedules: int = 1) -> None:
    inputs = inputs_of(shape, name, seed)
    actual = tw.simulate(
        executable(shape, name), shape.ranks, inputs, schedules, seed, epochs=LAUNCHES
    )
    for out, right in zip(actual, expected(shape, name, inputs), strict=True):
        assert np.array_equal(out["out"].reshape(right.shape), right)


SHAPES = [
    Shape(1),
    Shape(2, tokens=5, choices=3),
    Shape(3, capacity=3),
    Shape(4, tokens=3, choices=4, per_rank=1),
    Shape(2, tokens=5, blocks=24),
    Shape(2, tokens=3, is_masked=True),
    pytest.param(Shape(2, tokens=40, choices=4, per_rank=3, blocks=24), marks=LONG),
]
"""With few blocks, those of ``combine`` have several tokens and chunks have few blocks."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TYPES)
def test_results(name, shape):
    for seed in range(4):
        check(shape, name, seed)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", TYPES)
def test_many_routings(name, ranks):
    """500 for each program, with ``LAUNCHES`` launches each."""
    for tokens, choices, per_rank, capacity in [
        (1, 1, 1, None), (3, 2, 2, None), (3, 4, 3, None), (4, 3, 2, 4), (2, 5, 4, 1),
    ]:  # fmt: skip
        shape = Shape(ranks, tokens, choices, per_rank, capacity)
        for seed in range(20):
            check(shape, name, 100 + seed)


def test_rest_of_dispatch_is_not_written():
    shape = Shape(2, tokens=3, choices=2, per_rank=4)
    layout = RowLayout(VECTORS, WIDTHS["int32"], "int32", 4, blocks=3)
    program = dispatch_program(DispatchBlocks(3, 2, shape.rows, 2, layout, clear_rest=False))
    inputs, before = inputs_of(shape, "dispatch", 0), rows_of(np.random.default_rng(0), 1, "int32")
    right = expected(shape, "dispatch", inputs)
    given = [i | {"out": np.tile(before, (shape.rows, 1))} for i in inputs]
    actual = tw.simulate(program, 2, given, epochs=LAUNCHES)
    for out, rows, i in zip(actual, right, inputs, strict=True):
        is_used = i["source"][:, None] >= 0
        assert not is_used.all()
        rows = np.where(is_used, rows, before.reshape(1, -1))
        assert np.array_equal(out["out"].reshape(rows.shape), rows)


@pytest.mark.parametrize("choices", [3, 4])
def test_a_token_crosses_nvlink_once_for_a_rank(choices, tmp_path):
    """Also if it goes to several experts of a rank. With four choices, owners store all tokens on
    all other ranks; else these ranks load those that they need."""
    shape, timeline = Shape(3, tokens=4, choices=choices, per_rank=4), tmp_path / "timeline.json"
    inputs = inputs_of(shape, "dispatch", 5)
    tw.simulate(shape.program("dispatch"), 3, inputs, epochs=1, timeline=timeline)
    events = json.loads(timeline.read_text())["traceEvents"]
    texts = "\n".join(e["args"]["text"] for e in events if e.get("cat") == "transfer")
    is_stored = choices == 4
    pattern = (
        r"store of rows\[(\d), (\d), " if is_stored else r"load of rows\[(\d)\.\.\d, (0)\.\.0, "
    )
    moved = [tuple(map(int, m)) for m in re.findall(pattern + r"(\d+)\.\..* by rank (\d)", texts)]
    every, needed, padded = [], [], 8
    for rank, given in enumerate(inputs):
        tokens = [divmod(int(n), shape.tokens) for n in given["source"] // choices if n >= 0]
        needed += [(owner, 0, token * padded, rank) for owner, token in tokens if owner != rank]
        others = [r for r in range(shape.ranks) if r != rank]
        every += [(r, rank, t * padded, rank) for r in others for t in range(shape.tokens)]
    assert len(needed) > len(set(needed))
    assert sorted(moved) == sorted(every if is_stored else set(needed))


@pytest.mark.parametrize("operator", [Dispatch, Combine])
def test_padding_does_not_cross_nvlink(operator):
    """If some tokens may be padding, ranks store in own memory, and signal to all others."""
    for is_padded in (False, True):
        problem = RowProblem("", 8, 8, 64, 64, 2, torch.bfloat16, is_padded=is_padded)
        text = str(tw.explain(operator.program(problem), world_size=2))
        assert ("a store writes it for every rank" in text) == is_padded, text


def dispatched_twice(shape: Shape) -> Any:
    """Return a plan that dispatches twice, with other tokens and another routing."""
    kernel, width = shape.program("dispatch"), WIDTHS["int32"]
    tokens, rows = (count * VECTORS for count in (shape.tokens, shape.rows))

    @tw.plan
    def dispatches(
        p: tw.PlanBuilder,
        x0: T.Tensor((tokens, width), "int32"),
        x1: T.Tensor((tokens, width), "int32"),
        source0: T.Tensor((shape.rows,), "int32"),
        source1: T.Tensor((shape.rows,), "int32"),
        slots0: T.Tensor((shape.ranks * shape.tokens, shape.choices), "int32"),
        slots1: T.Tensor((shape.ranks * shape.tokens, shape.choices), "int32"),
        out0: T.Tensor((rows, width), "int32"),
        out1: T.Tensor((rows, width), "int32"),
    ):
        for x, source, slots, out in ((x0, source0, slots0, out0), (x1, source1, slots1, out1)):
            p.launch(kernel, x, source, slots, out)

    return dispatches


def test_another_routing_in_each_launch():
    """Four launches back to back: the rows of one are not read in the next."""
    shape = Shape(3)
    first, second = (inputs_of(shape, "dispatch", seed) for seed in (4, 0))
    both = [
        {f"{n}{i}": v for i, given in enumerate((first, second)) for n, v in given[r].items()}
        for r in range(shape.ranks)
    ]
    actual = tw.simulate(dispatched_twice(shape), shape.ranks, both, schedules=4, epochs=2)
    for number, given in enumerate((first, second)):
        for out, right in zip(actual, expected(shape, "dispatch", given), strict=True):
            assert np.array_equal(out[f"out{number}"].reshape(right.shape), right)


@pytest.mark.parametrize(
    ("name", "choices", "blocks", "counts"),
    [
        ("dispatch", 2, 32, (37, 9)),
        pytest.param("dispatch", 4, 32, (37, 9), marks=LONG),
        pytest.param("combine", 2, 32, (40, 11), marks=LONG),
        pytest.param("combine", 4, 32, (42, 9), marks=LONG),
    ],
)
def test_every_mutant_is_accounted_for(name, choices, blocks, counts):
    """With four choices, ranks store what they exchange on other ranks; else these load it."""
    shape = Shape(3, tokens=3, choices=choices, capacity=5, blocks=blocks)
    sidecar = SIDECARS / f"{name}_{choices}.json"
    mutants = tw.mutate(
        shape.program(name), 3, inputs_of(shape, name, 4), schedules=5,
        equivalent=sidecar if sidecar.exists() else None,
    )  # fmt: skip
    assert [(m.line, m.name, m.verdict, m.why) for m in mutants if not m.is_accounted_for] == []
    verdicts = [m.verdict for m in mutants]
    assert (verdicts.count("killed"), verdicts.count("explained")) == counts


@pytest.mark.parametrize("name", TYPES)
def test_device_functions(name):
    shape = Shape(2, tokens=3, capacity=4)
    tw.validate(shape.program(name, threads=32), 2, inputs_of(shape, name, 4))


SIZES = [
    RowProblem("", 128, 8, 1024, 7168, 8, torch.bfloat16),
    RowProblem("", 64, 4, 512, 2880, 2, torch.bfloat16),
    pytest.param(RowProblem("", 8192, 8, 8192 * 64, 7168, 8, torch.bfloat16), marks=LONG),
    pytest.param(RowProblem("", 64, 2, 128, 20000, 3, torch.float32), marks=LONG),
    pytest.param(RowProblem("", 5, 2, 7, 7, 2, torch.float16), marks=LONG),
    pytest.param(RowProblem("", 1, 1, 2, 1, 2, torch.bfloat16), marks=LONG),
]
"""Few tokens; rows that threads cannot share evenly; many rows; long, short and shortest rows."""


@pytest.mark.parametrize("problem", SIZES)
@pytest.mark.parametrize(
    ("operator", "exchanged"), [(Dispatch, ["rows"]), (Combine, ["weights", "sums"])]
)
def test_sizes_compile(operator, exchanged, problem):
    """Threads move 16 bytes at a time, where a row is a multiple of that."""
    assert operator.obstacle(problem) is None
    source = tw.emit(operator.program(problem), world_size=problem.ranks)
    is_multiple = problem.columns * problem.dtype.itemsize % 16 == 0
    for rows in (exchanged[-1], *("y" for _ in exchanged[1:])):
        loads = re.findall(rf"= \*\(u?(?:int|float)4\*\)\({rows}", source)
        assert bool(loads) == is_multiple
    assert all(f"{tensor}_arrived" in source for tensor in exchanged)


def test_numbers_that_kernels_do_not_have():
    problem = RowProblem("", 1 << 18, 8, 1 << 22, 7168, 8, torch.bfloat16)
    for operator in (Dispatch, Combine):
        assert "rows have numbers up to 3758096384; expected less" in operator.obstacle(problem)


def test_types_that_are_not_added():
    problem = RowProblem("", 8, 2, 16, 64, 2, torch.float64)
    assert "y is of torch.float64; expected torch.bfloat16" in Combine.obstacle(problem)
    assert Dispatch.obstacle(problem) is None


def test_registers_suffice(ptxas):
    """Four blocks of 128 threads fit on an SM, and threads hold a row and its sum in registers."""
    program = Combine.program(RowProblem("", 4096, 8, 32768, 7168, 2, torch.bfloat16))
    ptx = tw.emit(program, stage="ptx", world_size=2)
    messages = ptxas(ptx)
    assert "ld.global.nc" not in ptx
    assert all(int(count) == 0 for count in re.findall(r"(\d+) bytes spill", messages))
    assert max(map(int, re.findall(r"Used (\d+) registers", messages))) <= 128
