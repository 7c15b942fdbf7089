"""Programs of all-reduce with RMSNorm on simulated ranks, against NumPy."""

import functools
import os
import re
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave.ops.norm.all_reduce_rms_norm import ONE_SHOT, OWN, TWO_SHOT, AllReduceRmsNorm
from tileweave.ops.norm.kernels.all_reduce_rms_norm import (
    NormConfig,
    local_program,
    one_shot_program,
    two_shot_program,
)
from tileweave.ops.norm.problem import NormProblem
from tileweave.simulator.simulate import executable_at

LONG = pytest.mark.long
MANY = int(os.environ.get("TILEWEAVE_SCHEDULES", "20"))
"""Schedules of replays in turn for each number of ranks; with 200 they are 1,000."""
PROGRAMS = {"local": local_program, ONE_SHOT: one_shot_program, TWO_SHOT: two_shot_program}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
FP8 = ml_dtypes.float8_e4m3fn
SCALE = 0.02


class Shape(NamedTuple):
    """Extents of a simulated call. Of 16 threads, some hold several vectors of a row, some one
    less."""

    ranks: int = 3
    tokens: int = 4
    hidden: int = 264
    quant: str | None = None
    biased: bool = False
    dtype: str = "bfloat16"
    threads: int = 16
    valid: int | None = None

    @property
    def rows(self) -> int:
        """Number of valid rows."""
        return self.tokens if self.valid is None else min(self.valid, self.tokens)

    @property
    def config(self) -> NormConfig:
        return NormConfig(
            self.tokens, self.hidden, self.ranks, self.dtype, 1e-6, self.biased, self.quant,
            self.threads, self.valid is not None,
        )  # fmt: skip

    def program(self, name: str) -> Any:
        return PROGRAMS["local" if self.ranks == 1 else name](self.config)


def inputs_of(shape: Shape, seed: int) -> list[dict[str, np.ndarray]]:
    """Return the inputs of all ranks. Rows have different sizes, and a part of one is zero. Rows of
    padding are NaN."""
    rng, dtype = np.random.default_rng(seed), DTYPES[shape.dtype]

    def numbers(rows: int) -> np.ndarray:
        return rng.standard_normal((rows, shape.hidden // 8, 8))

    sizes = np.exp2(np.arange(shape.tokens) % 7 - 3)[:, None, None]
    residual = (numbers(shape.tokens) * sizes).astype(dtype)
    residual[0, :16] = 0
    common: dict[str, np.ndarray] = {"residual": residual, "weight": numbers(1)[0].astype(dtype)}
    if shape.biased:
        common["bias"] = numbers(1)[0].astype(dtype)
    if shape.quant == "fp8":
        common["scale"] = np.array([SCALE], np.float32)
    rows = [(numbers(shape.tokens) * sizes).astype(dtype) for _ in range(shape.ranks)]
    if shape.valid is not None:
        common["num_tokens"] = np.array([shape.valid], np.int32)
    for x in rows:
        x[0, :16] = 0
    for padded in (residual, *rows):
        padded[shape.rows :] = np.nan
    return [{"x": x, **common} for x in rows]


def expected(shape: Shape, inputs: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the results by definition."""
    dtype, given = DTYPES[shape.dtype], inputs[0]
    total = given["residual"].astype(np.float32)
    for rank in inputs:
        total = total + rank["x"].astype(np.float32)
    results = {"residual_out": total.astype(dtype)}
    total = results["residual_out"].astype(np.float32).reshape(shape.tokens, -1)
    mean = np.square(total).mean(-1, keepdims=True, dtype=np.float32)
    y = total / np.sqrt(mean + np.float32(1e-6)) * given["weight"].astype(np.float32).reshape(-1)
    if shape.biased:
        y = y + given["bias"].astype(np.float32).reshape(-1)
    y = y.astype(dtype).astype(np.float32)
    if shape.quant == "fp8_1x128":
        groups = np.pad(y, ((0, 0), (0, -shape.hidden % 128))).reshape(shape.tokens, -1, 128)
        scales = np.maximum(np.abs(groups).max(-1), np.float32(1e-10)) / np.float32(448)
        y = (groups / scales[..., None]).reshape(shape.tokens, -1)[:, : shape.hidden]
        results["scales"] = scales
    elif shape.quant is not None:
        y = y / np.float32(SCALE)
    if shape.quant is not None:
        dtype, y = FP8, np.clip(y, -448, 448)
    return results | {"out": y.astype(dtype)}


def executable(shape: Shape, name: str, level: str = "tile") -> Any:
    """Return the program of a shape, for any number of valid rows."""
    return _executable(shape if shape.valid is None else shape._replace(valid=0), name, level)


@functools.cache
def _executable(shape: Shape, name: str, level: str) -> Any:
    return executable_at(shape.program(name), shape.ranks, level, "sm_90a")


def run(shape: Shape, name: str, seed: int = 0, schedules: int = 1) -> list[dict[str, np.ndarray]]:
    """Return the results of all ranks after three launches; a fault raises."""
    inputs = inputs_of(shape, seed)
    return tw.simulate(executable(shape, name), shape.ranks, inputs, schedules, seed, epochs=3)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def check(shape: Shape, name: str, seed: int = 0, schedules: int = 1) -> None:
    """Run the program, and compare its results with the definition."""
    check_results(run(shape, name, seed, schedules), shape, seed)


def check_results(results: list[dict[str, np.ndarray]], shape: Shape, seed: int) -> None:
    """Compare results with the definition. The mean is added in another order there, which changes
    the last bit of a few elements; the residual has the same bits."""
    results = [{key: value[: shape.rows] for key, value in r.items()} for r in results]
    right = expected(shape, inputs_of(shape, seed))
    right = {key: value[: shape.rows] for key, value in right.items()}
    for actual in results:
        for key in right:
            assert bits(actual[key]) == bits(results[0][key]), key
    assert bits(results[0]["residual_out"]) == bits(right["residual_out"])
    for key in right.keys() - {"residual_out"}:
        actual, wanted = (
            np.asarray(values).astype(np.float32).ravel()
            for values in (results[0][key], right[key])
        )
        step = 0.07 if right[key].dtype == FP8 else 2**-7
        assert np.allclose(actual, wanted, rtol=step, atol=1e-6), key
        assert not actual.size or np.mean(actual != wanted) < 0.02, key


SHAPES = [
    Shape(1),
    Shape(1, quant="fp8_1x128", biased=True),
    Shape(2, tokens=3, quant="fp8"),
    Shape(3, tokens=5, quant="fp8_1x128", dtype="float16"),
    Shape(4, tokens=2, hidden=8, biased=True),
    Shape(5, tokens=1, hidden=128, quant="fp8", dtype="float16"),
]
"""Rows of several groups, one group and one vector; less tokens than ranks."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OWN)
def test_results(name, shape):
    check(shape, name)


@LONG
@pytest.mark.parametrize("quant", [None, "fp8", "fp8_1x128"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", OWN)
def test_many_shapes(name, ranks, quant):
    for tokens, hidden, threads in [(1, 136, 16), (4, 1032, 32), (7, 64, 32), (3, 520, 64)]:
        for dtype in DTYPES:
            shape = Shape(ranks, tokens, hidden, quant, tokens == 4, dtype, threads)
            check(shape, name, seed=tokens)


def test_parts_of_many_ranks_are_loaded_in_several_steps():
    shape = Shape(5, tokens=1, hidden=16 * 128, threads=16)
    assert (shape.config.held, shape.config.ranks) == (1, 5)
    shape = shape._replace(hidden=4 * 128)
    assert shape.config.held == 4
    check(shape, ONE_SHOT)


def test_programs_and_numbers_of_tokens_yield_the_same_bits():
    """Row 1 of two tokens, alone, and by the other program."""
    shape = Shape(3, tokens=2, hidden=200, quant="fp8_1x128")
    single = shape._replace(tokens=1)
    inputs, keys = inputs_of(shape, 0), ("out", "scales", "residual_out")
    row = [given | {n: given[n][1:2] for n in ("x", "residual")} for given in inputs]
    by_program = [run(shape, name)[0] for name in OWN]
    alone = tw.simulate(executable(single, ONE_SHOT), 3, row, epochs=1)[0]
    for key in keys:
        assert bits(by_program[0][key]) == bits(by_program[1][key])
        assert bits(by_program[0][key][1]) == bits(alone[key])


def decoded(first: Shape, second: Shape) -> Any:
    """Return a plan of four launches, as graphs of two sizes replayed in turn launch them."""
    small, large = first.program(ONE_SHOT), second.program(TWO_SHOT)
    rows = [shape.config.rows for shape in (first, second)]
    columns = first.config.columns

    @tw.plan
    def layers(
        p: tw.PlanBuilder,
        x: rows[0],
        residual: rows[0],
        weight: columns,
        many_x: rows[1],
        many_residual: rows[1],
        sum0: rows[0],
        sum1: rows[0],
        out: rows[0],
        many_sum0: rows[1],
        many_sum1: rows[1],
        many_out: rows[1],
    ):
        p.launch(small, x, residual, weight, sum0, out)
        p.launch(large, many_x, many_residual, weight, many_sum0, many_out)
        p.launch(large, many_x, many_sum0, weight, many_sum1, many_out)
        p.launch(small, x, sum0, weight, sum1, out)

    return layers


@pytest.mark.parametrize(
    ("ranks", "schedules"), [(2, 2), *(pytest.param(r, MANY, marks=LONG) for r in (1, 2, 3, 4, 5))]
)
def test_interleaved_replays(ranks, schedules):
    """Graphs of two sizes, with two programs, replayed in turn, three times."""
    first, second = Shape(ranks, 1, 64), Shape(ranks, 3, 64)
    both = [inputs_of(shape, 1) for shape in (first, second)]
    given = [
        a | {f"many_{name}": b[name] for name in ("x", "residual")}
        for a, b in zip(*both, strict=True)
    ]
    actual = tw.simulate(decoded(first, second), ranks, given, schedules=schedules, epochs=3)
    for prefix, shape, inputs in (("", first, both[0]), ("many_", second, both[1])):
        once = expected(shape, inputs)["residual_out"]
        twice = expected(shape, [i | {"residual": once} for i in inputs])["residual_out"]
        for result in actual:
            assert bits(result[f"{prefix}sum0"]) == bits(once)
            assert bits(result[f"{prefix}sum1"]) == bits(twice)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(ONE_SHOT, 2), *(pytest.param(n, r, marks=LONG) for n in OWN for r in (1, 3, 5))],
)
@pytest.mark.filterwarnings("ignore:.*never waited for or read")
def test_numbers_of_valid_rows(name, ranks):
    """Padding is NaN: no valid row depends on it. A number may exceed the rows."""
    for valid in (0, 1, 3, 4, 9):
        shape = Shape(ranks, 4, 64, "fp8_1x128" if ranks == 2 else None, valid=valid)
        check(shape, name, schedules=2 if ranks < 5 else 1)


def replayed(shape: Shape, name: str) -> Any:
    """Return a plan of five launches with a number of rows each, as replays A, B, A, A, B of two
    graphs make them."""
    first, second = (s.program(name) for s in (shape, shape._replace(threads=32)))
    rows, columns, one = shape.config.rows, shape.config.columns, shape.config.num_tokens

    @tw.plan
    def replays(
        p: tw.PlanBuilder,
        x: rows,
        residual: rows,
        weight: columns,
        n0: one,
        n1: one,
        n2: one,
        n3: one,
        n4: one,
        sum0: rows,
        sum1: rows,
        sum2: rows,
        sum3: rows,
        sum4: rows,
        out: rows,
    ):
        p.launch(first, x, residual, weight, n0, sum0, out)
        p.launch(second, x, residual, weight, n1, sum1, out)
        p.launch(first, x, residual, weight, n2, sum2, out)
        p.launch(first, x, residual, weight, n3, sum3, out)
        p.launch(second, x, residual, weight, n4, sum4, out)

    return replays


@pytest.mark.parametrize(
    ("name", "ranks", "numbers", "schedules"),
    [
        (ONE_SHOT, 2, (3, 0, 0, 3, 1), 2),
        (TWO_SHOT, 2, (1, 3, 3, 0, 2), 2),
        *(
            pytest.param(name, ranks, numbers, 20, marks=LONG)
            for name in OWN
            for ranks, numbers in [(2, (3, 0, 0, 3, 1)), (3, (1, 3, 3, 0, 2))]
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*never waited for or read")
def test_replays_with_other_numbers(name, ranks, numbers, schedules):
    shape = Shape(ranks, 3, 64, valid=3)
    of_launches = {f"n{k}": np.array([n], np.int32) for k, n in enumerate(numbers)}
    inputs = inputs_of(shape, 2)
    right = expected(shape, inputs)["residual_out"]
    given = [{k: v for k, v in i.items() if k != "num_tokens"} | of_launches for i in inputs]
    for result in tw.simulate(replayed(shape, name), ranks, given, schedules=schedules, epochs=3):
        for k, n in enumerate(numbers):
            assert bits(result[f"sum{k}"][:n]) == bits(right[:n]), k


@LONG
@pytest.mark.parametrize(("name", "ranks"), [(ONE_SHOT, 2), (TWO_SHOT, 3)])
def test_every_mutant_of_valid_rows_is_accounted_for(name, ranks):
    shape = Shape(ranks, tokens=3, hidden=64, valid=2)
    mutants = tw.mutate(shape.program(name), ranks, inputs_of(shape, 0), schedules=5)
    # Counters are cleared, so a surplus of the only signal of a row has no effect.
    survivors = [m for m in mutants if not m.is_accounted_for and m.name != "signal value+1"]
    assert survivors == []
    assert [m.verdict for m in mutants].count("killed") >= 26


@LONG
@pytest.mark.parametrize(
    ("name", "ranks", "killed"), [(ONE_SHOT, 2, 26), (ONE_SHOT, 3, 26), (TWO_SHOT, 3, 44)]
)
def test_every_mutant_is_accounted_for(name, ranks, killed):
    shape = Shape(ranks, tokens=2, hidden=64)
    mutants = tw.mutate(shape.program(name), ranks, inputs_of(shape, 0), schedules=5)
    assert [(m.line, m.name, m.verdict, m.why) for m in mutants if not m.is_accounted_for] == []
    assert [m.verdict for m in mutants].count("killed") == killed


@LONG
@pytest.mark.parametrize("name", OWN)
def test_device_functions_of_valid_rows(name):
    shape = Shape(2, 3, 64, valid=2, threads=32)
    tw.validate(shape.program(name), 2, inputs_of(shape, 0), arch="sm_90a")


@LONG
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", [*OWN, "local"])
def test_device_functions(name, arch):
    shape = Shape(1 if name == "local" else 2, 2, 136, "fp8_1x128", name == "local", threads=32)
    tw.validate(shape.program(name), shape.ranks, inputs_of(shape, 0), arch=arch)


SIZES = [
    (6, 6144, 8, None),
    pytest.param(2, 16384, 8, "fp8_1x128", marks=LONG),
    pytest.param(300, 2880, 3, "fp8", marks=LONG),
    pytest.param(1, 8, 2, "fp8_1x128", marks=LONG),
    pytest.param(16384, 8192, 4, "fp8_1x128", marks=LONG),
]
"""The issue's size, the longest rows, rows that are no multiple of 128, the shortest, many."""


@LONG
@pytest.mark.parametrize(("tokens", "hidden", "ranks", "quant"), SIZES)
@pytest.mark.parametrize("name", OWN)
def test_sizes_compile(name, tokens, hidden, ranks, quant):
    """Threads move 16 bytes at a time, and one wait serves the parts of several ranks."""
    problem = NormProblem("", tokens, hidden, ranks, torch.bfloat16, 1e-6, True, quant)
    assert problem.obstacle() is None
    source = tw.emit(AllReduceRmsNorm.program(problem, name), world_size=ranks)
    partials = "arrived" if name == ONE_SHOT else "partials"
    assert re.search(rf"\*\(uint4\*\)\({partials} \+ .*\) = ", source)
    assert re.search(rf"= \*\(uint4\*\)\({partials} ", source)
    assert source.count("tw::wait_reached") == (1 if name == ONE_SHOT else 2)
    assert source.count("tw::signal<") == (1 if name == ONE_SHOT else 2)


@LONG
@pytest.mark.parametrize("name", OWN)
def test_registers_suffice_for_the_longest_rows(ptxas, name):
    problem = NormProblem("", 64, 16384, 8, torch.bfloat16, 1e-6, True, "fp8_1x128")
    program = AllReduceRmsNorm.program(problem, name)
    said = ptxas(tw.emit(program, stage="ptx", world_size=8))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert set(spills) == {("0", "0")}


def test_no_program():
    problem = NormProblem("", 1, 8, 2, torch.bfloat16, 1e-6)
    for changed, message in [
        (
            {"dtype": torch.float32},
            "x is of torch.float32; expected torch.bfloat16 or torch.float1",
        ),
        ({"hidden": 12}, "rows have 12 elements; expected a multiple of 8, at most 16384"),
        ({"hidden": 16392}, "rows have 16392 elements; expected a multiple of 8, at most 16384"),
        ({"tokens": 1 << 28}, "x has 2147483648 elements; expected less than 2**31"),
    ]:
        assert str(replace(problem, **changed).obstacle()).startswith(message)


@pytest.mark.parametrize(
    ("ranks", "tokens", "name"),
    [(1, 9999, ONE_SHOT), (2, 9999, ONE_SHOT), (4, 85, ONE_SHOT), (4, 86, TWO_SHOT),
     (8, 36, ONE_SHOT), (8, 37, TWO_SHOT)],
)  # fmt: skip
def test_few_rows_are_sent_once(ranks, tokens, name):
    problem = NormProblem("", tokens, 8192, ranks, torch.bfloat16, 1e-6)
    assert AllReduceRmsNorm.fastest(problem) == name
