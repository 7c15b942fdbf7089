"""Small collectives by words with flags on simulated ranks, against NumPy."""

import os
import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tileweave.ops.collectives.all_gather import all_gather_ll_program, all_gather_program
from tileweave.ops.collectives.all_reduce import (
    one_shot_ll_program,
    one_shot_program,
    two_shot_ll_program,
    two_shot_program,
)
from tileweave.ops.collectives.all_to_all import (
    AllToAll,
    Parts,
    all_to_all_ll_program,
    all_to_all_program,
)
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.transport import auto_transports
from tileweave.ops.collectives.vectors import TiledView
from tileweave.ops.core.collective_problem import CollectiveProblem
from tileweave.ops.core.registry import OPERATORS

LONG = pytest.mark.long
SCHEDULES = int(os.environ.get("TILEWEAVE_SCHEDULES", "10"))
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
TILE = 64
"""Bytes of a tile in these tests."""


class Small(NamedTuple):
    """A program with the inputs and the results of all ranks."""

    program: Any
    inputs: list[np.ndarray]
    results: list[np.ndarray]


def reduced(name: str, ranks: int, count: int, dtype: str = "bfloat16") -> Small:
    view = TiledView.of(count, dtype, 16, TILE)
    rng = np.random.default_rng(count)
    x = [rng.normal(size=view.shape).astype(DTYPES[dtype]) for _ in range(ranks)]
    total = x[0].astype(np.float32)
    for given in x[1:]:
        total = total + given.astype(np.float32)
    if ranks == 1:
        make = {"one_shot": one_shot_program, "two_shot": two_shot_program}[name]
        return Small(make(view, ranks), x, x)
    make = {"one_shot": one_shot_ll_program, "two_shot": two_shot_ll_program}[name]
    return Small(make(view, ranks), x, [total.astype(DTYPES[dtype])] * ranks)


def gathered(ranks: int, count: int, dtype: str = "int32") -> Small:
    view = TiledView.of(count, dtype, 16, TILE)
    rng = np.random.default_rng(count)
    x = [rng.integers(0, 128, view.shape).astype(dtype) for _ in range(ranks)]
    by_threads = all_gather_program(view, ranks)
    program = by_threads if ranks == 1 else all_gather_ll_program(view, ranks)
    return Small(program, x, [np.stack(x)] * ranks)


def exchanged(
    ranks: int, shape: tuple[int, ...], scatter: int = 0, gather: int = 0, dtype=torch.float32
) -> Small:
    result, axes = AllToAll.result(torch.empty(shape, device="meta"), ranks, scatter, gather)
    parts = Parts.of(CollectiveProblem("all_to_all", shape, result, axes, ranks, dtype), TILE)
    rng = np.random.default_rng(ranks)
    x = [rng.integers(0, 128, shape).astype(parts.dtype) for _ in range(ranks)]
    split = [np.split(given, ranks, scatter) for given in x]
    results = [np.concatenate([p[rank] for p in split], gather) for rank in range(ranks)]
    by_threads = all_to_all_program(parts)
    program = by_threads if ranks == 1 else all_to_all_ll_program(parts)
    given, got = parts.shape(parts.x_ranks_last), parts.shape(parts.out_ranks_last)
    return Small(program, [a.reshape(given) for a in x], [a.reshape(got) for a in results])


def check(small: Small, schedules: int = 2) -> None:
    """Three launches have the bits of the definition; a fault raises."""
    inputs = [{"x": x} for x in small.inputs]
    actual = tw.simulate(small.program, len(inputs), inputs, schedules=schedules, epochs=3)
    for result, right in zip(actual, small.results, strict=True):
        np.testing.assert_array_equal(result["out"], right)


@pytest.mark.parametrize(
    ("ranks", "dtype", "count"),
    [
        (3, "bfloat16", 72),
        (2, "float32", 7),
        *(
            pytest.param(*case, marks=LONG)
            for case in [(2, "bfloat16", 256), (3, "float16", 328), (4, "bfloat16", 70)]
        ),
    ],
)
@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_all_reduce(name, ranks, dtype, count):
    """Whole tiles, tails, less than a tile; rows that do not fill words. Both programs add in the
    order of the ranks, so their results have equal bits."""
    check(reduced(name, ranks, count, dtype))


@pytest.mark.parametrize(
    ("ranks", "count", "dtype"),
    [
        (3, 36, "int32"),
        (2, 7, "uint8"),
        pytest.param(2, 96, "int32", marks=LONG),
        pytest.param(4, 40, "uint8", marks=LONG),
    ],
)
def test_all_gather(ranks, count, dtype):
    check(gathered(ranks, count, dtype))


AXES = [
    ((3, 6, 4), 1, 0),
    ((4, 3, 2), 0, 1),
    *(
        pytest.param(*case, marks=LONG)
        for case in [((2, 3, 6, 4), 2, 1), ((2, 6, 3, 4), 1, 2), ((2, 6, 3), 1, 1)]
    ),
]


@pytest.mark.parametrize(("shape", "scatter", "gather"), AXES)
def test_all_to_all(shape, scatter, gather):
    check(exchanged(2 + scatter % 2, shape, scatter, gather))


def in_turn(first: Small, second: Small) -> Any:
    """Return a plan of six launches, as replays of two captured graphs make them."""
    shapes = [(s.inputs[0].shape, s.results[0].shape) for s in (first, second)]
    (x0, out0), (x1, out1) = shapes
    dtype = str(first.inputs[0].dtype)

    @tw.plan
    def replays(
        p: tw.PlanBuilder,
        x: T.Tensor(x0, dtype),
        large_x: T.Tensor(x1, dtype),
        out: T.Tensor(out0, dtype),
        again: T.Tensor(out0, dtype),
        large_out: T.Tensor(out1, dtype),
        large_again: T.Tensor(out1, dtype),
    ):
        p.launch(first.program, x, out)
        p.launch(second.program, large_x, large_out)
        p.launch(second.program, large_x, large_again)
        p.launch(first.program, x, again)

    return replays


OPERATIONS = {
    "all_reduce one-shot": lambda ranks, n: reduced("one_shot", ranks, 8 * n),
    "all_reduce two-shot": lambda ranks, n: reduced("two_shot", ranks, 8 * n),
    "all_gather": lambda ranks, n: gathered(ranks, 4 * n),
    "all_to_all": lambda ranks, n: exchanged(ranks, (ranks, 4 * n)),
}


def cases_of(name: str, ranks: int) -> list[Small]:
    return [OPERATIONS[name](ranks, n) for n in (1, 2)]


def check_in_turn(small: Small, large: Small, schedules: int) -> None:
    ranks = len(small.inputs)
    inputs = [{"x": x, "large_x": y} for x, y in zip(small.inputs, large.inputs, strict=True)]
    actual = tw.simulate(in_turn(small, large), ranks, inputs, schedules=schedules, epochs=3)
    for rank, result in enumerate(actual):
        for prefix, case in (("", small), ("large_", large)):
            for out in (f"{prefix}out", f"{prefix}again"):
                np.testing.assert_array_equal(result[out], case.results[rank])


@pytest.mark.parametrize("name", OPERATIONS)
def test_interleaved_replays(name):
    check_in_turn(*cases_of(name, 2), 1)


@LONG
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_schedules(name, ranks):
    """A schedule has three replays of four launches. With ``TILEWEAVE_SCHEDULES=200`` an operator
    has 1,000."""
    check_in_turn(*cases_of(name, ranks), SCHEDULES)


SAME = "ll_st rank+1", "ll_ld rank+1"
"""Mutants without effect: every rank stores the same words to all ranks."""


@LONG
@pytest.mark.parametrize(
    ("name", "survivors"),
    [
        ("all_reduce one-shot", SAME),
        ("all_reduce two-shot", SAME),
        ("all_gather", SAME),
        ("all_to_all", ()),
    ],
)
def test_every_mutant_is_accounted_for(name, survivors):
    small = OPERATIONS[name](3, 1)
    mutants = tw.mutate(small.program, 3, [{"x": x} for x in small.inputs], schedules=5)
    assert [m for m in mutants if not m.is_accounted_for and m.name not in survivors] == []
    assert [m.verdict for m in mutants].count("killed") >= 12


@LONG
@pytest.mark.parametrize("name", OPERATIONS)
def test_device_functions(name):
    small = OPERATIONS[name](2, 2)
    tw.validate(small.program, 2, [{"x": x} for x in small.inputs], arch="sm_90a")


@LONG
@pytest.mark.parametrize(
    ("op", "shape", "axes"),
    [
        ("all_reduce", (64 << 10,), ()),
        ("all_reduce", (1 << 19,), ()),
        ("all_gather", (32 << 10,), ()),
        ("all_to_all", (8, 64, 64), (1, 0)),
    ],
)
def test_registers_suffice(ptxas, op, shape, axes):
    """Programs of 8 ranks have no spills."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    program = OPERATORS[op].steps(checked_problem(op, x, None, 8, axes), "ll")
    said = ptxas(tw.emit(program, stage="ptx", world_size=8))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and set(spills) == {("0", "0")}


@pytest.mark.parametrize(
    ("op", "elements", "ranks", "obstacle"),
    [
        ("all_gather", 1 << 15, 4, None),
        ("all_gather", (1 << 15) + 1, 4, "x has 65538 bytes; expected at most 65536"),
        ("all_gather", 4, 1, "there is one rank, which exchanges nothing; expected 2 or more"),
        ("all_to_all", 1 << 15, 4, None),
        ("all_reduce", 1 << 19, 4, None),
        ("all_reduce", (1 << 19) + 1, 4, "x has 1048578 bytes; expected at most 1048576"),
        (
            "reduce_scatter",
            8,
            4,
            "reduce_scatter has no program by words with flags; expected 'copy_engine', 'ldst', ",
        ),
    ],
)
def test_small_tensors_are_words(op, elements, ranks, obstacle):
    """``auto`` tries words for these first, and stores with signals next."""
    axes = (0, 0) if op == "all_to_all" else ()
    x = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    problem, collective = checked_problem(op, x, None, ranks, axes), OPERATORS[op]
    found = collective.obstacle(problem, "ll")
    assert found == obstacle if obstacle is None else str(found).startswith(obstacle)
    assert obstacle is not None or auto_transports(problem, collective) == ("ll", "ldst")
    assert auto_transports(problem, collective)[-1] == "ldst"


def test_the_gradient_of_gathered_words_is_a_sum_by_any_transport(monkeypatch):
    requests = []
    monkeypatch.setattr(
        torch.ops.tileweave, "reduce_scatter", lambda *given: requests.append(given)
    )
    grad = torch.ones(4)
    OPERATORS["all_gather"].gradient(grad, "", "ll")
    assert requests == [(grad, "", "auto")]
