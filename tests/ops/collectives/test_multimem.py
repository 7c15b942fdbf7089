"""Collectives by multimem operations on simulated ranks, against NumPy."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.collectives.test_words import DTYPES, SCHEDULES, Small, check, check_in_turn
from tileweave.ops.collectives.all_gather import all_gather_by_multimem
from tileweave.ops.collectives.all_reduce import one_shot_by_multimem, two_shot_by_multimem
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.reduce_scatter import reduce_scatter_by_multimem
from tileweave.ops.collectives.transport import auto_transports
from tileweave.ops.collectives.vectors import Lines
from tileweave.ops.core.registry import OPERATORS

LONG = pytest.mark.long


def lines_of(count: int, dtype: str) -> Lines:
    """Return lines of at most 16 elements, in tiles of 128 bytes."""
    return Lines.of(count, dtype, 16, 128)


def numbers(ranks: int, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """Return numbers whose sum depends on the order."""
    rng = np.random.default_rng(ranks)
    return [rng.normal(size=shape).astype(DTYPES[dtype]) for _ in range(ranks)]


def sum_in_order(x: list[np.ndarray]) -> np.ndarray:
    """Return the sum in the order of the ranks, in float32, rounded once."""
    total = x[0].astype(np.float32)
    for part in x[1:]:
        total = total + part.astype(np.float32)
    return total.astype(x[0].dtype)


def reduced(make, ranks: int, count: int, dtype: str = "bfloat16") -> Small:
    lines = lines_of(count, dtype)
    x = numbers(ranks, lines.shape, dtype)
    return Small(make(lines, ranks), x, [sum_in_order(x)] * ranks)


def scattered(ranks: int, count: int, dtype: str = "bfloat16") -> Small:
    lines = lines_of(count, dtype)
    x = numbers(ranks, (ranks, *lines.shape), dtype)
    return Small(reduce_scatter_by_multimem(lines, ranks), x, [*sum_in_order(x)])


def gathered(ranks: int, count: int, dtype: str = "float32") -> Small:
    lines = lines_of(count, dtype)
    x = numbers(ranks, lines.shape, dtype)
    return Small(all_gather_by_multimem(lines, ranks), x, [np.stack(x)] * ranks)


OPERATIONS = {
    "all_reduce one-shot": lambda *case: reduced(one_shot_by_multimem, *case),
    "all_reduce two-shot": lambda *case: reduced(two_shot_by_multimem, *case),
    "reduce_scatter": scattered,
    "all_gather": gathered,
}


@pytest.mark.parametrize(
    ("ranks", "count", "dtype"),
    [
        (1, 100, "float32"),
        (2, 256, "bfloat16"),
        (3, 328, "float16"),
        (3, 7, "float32"),
        *(
            pytest.param(*case, marks=LONG)
            for case in [(2, 6, "bfloat16"), (4, 8, "float32"), (5, 84, "float16")]
        ),
    ],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results(name, ranks, count, dtype):
    """Whole tiles, tails, less than a tile, vectors of 1 to 8 elements. Sums have the bits of the
    order of the ranks, on all ranks."""
    check(OPERATIONS[name](ranks, count, dtype))


def cases_of(name: str, ranks: int) -> list[Small]:
    return [OPERATIONS[name](ranks, 32 * n) for n in (1, 3)]


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


PULLED = {"signal rank+1": 1, "wait_reached rank+1": 3}
"""Mutants without effect on 3 ranks: counters are equal, because blocks signal to all ranks."""
AT_ONCE = {"wait_reached target-1": 3}
"""A block adds the units of all parts by one signal."""
STORED = {
    "wait_reached rank+1": 1,  # all stores precede the first signal
    "sync_threads drop": 3,  # there is a barrier before the signal to each rank
    **dict.fromkeys(
        ("signal sem=relaxed", "signal scope=gpu", "signal scope=cta", "signal write after"), 1
    ),
}
"""The signal to the own rank: only the same block reads the data, after another barrier."""


@LONG
@pytest.mark.parametrize(
    ("name", "survivors"),
    [
        ("all_reduce one-shot", [PULLED]),
        ("all_reduce two-shot", [PULLED, AT_ONCE, STORED]),
        ("reduce_scatter", [PULLED, AT_ONCE]),
        ("all_gather", [STORED]),
    ],
)
def test_every_mutant_is_accounted_for(name, survivors):
    small = OPERATIONS[name](3, 96)
    mutants = tw.mutate(small.program, 3, [{"x": x} for x in small.inputs], schedules=5)
    expected = sum(map(Counter, survivors), Counter())
    assert Counter(m.name for m in mutants if not m.is_accounted_for) == expected
    assert [m.verdict for m in mutants].count("killed") >= 25


@LONG
@pytest.mark.parametrize("name", OPERATIONS)
def test_device_functions(name):
    small = OPERATIONS[name](2, 96)
    tw.validate(small.program, 2, [{"x": x} for x in small.inputs], arch="sm_90a")


def program_of(op: str, shape: tuple[int, ...], dtype: torch.dtype, ranks: int):
    problem = checked_problem(op, torch.empty(shape, dtype=dtype, device="meta"), None, ranks, ())
    assert OPERATORS[op].obstacle(problem, "multicast") is None
    return OPERATORS[op].steps(problem, "multicast")


@LONG
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("all_reduce", (16 << 10,)),
        ("all_reduce", (1 << 20,)),
        ("reduce_scatter", (8, 1 << 17)),
        ("all_gather", (1 << 17,)),
    ],
)
def test_registers_suffice(ptxas, op, shape):
    """Programs of 8 ranks have no spills."""
    said = ptxas(tw.emit(program_of(op, shape, torch.bfloat16, 8), stage="ptx", world_size=8))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and set(spills) == {("0", "0")}


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        ("all_reduce", (3, 14), torch.float16),
        ("reduce_scatter", (2, 7), torch.float32),
        ("all_gather", (12,), torch.uint8),
        pytest.param("all_reduce", (1 << 32,), torch.bfloat16, marks=LONG),
    ],
)
def test_any_shape_compiles(op, shape, dtype):
    source = tw.emit(program_of(op, shape, dtype, 2), world_size=2)
    assert "multimem_" not in source.split('extern "C"', 1)[1].replace("_multimem_kernel", "")


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "obstacle"),
    [
        ("all_reduce", (3,), torch.bfloat16, "a part has 6 bytes without a gap; expected a mult"),
        ("reduce_scatter", (2, 3), torch.float16, "a part has 6 bytes without a gap; expected a"),
        ("all_gather", (5,), torch.uint8, "a part has 5 bytes without a gap; expected a multiple"),
        ("all_reduce", (4,), torch.int32, "x is of torch.int32; expected torch.bfloat16"),
        ("all_to_all", (4,), torch.float32, "all_to_all has no program by multimem operations"),
        ("broadcast", (4,), torch.float32, "broadcast has no program by multimem operations"),
    ],
)
def test_obstacles(op, shape, dtype, obstacle):
    options = [0] * len(OPERATORS[op].options)
    problem = checked_problem(op, torch.empty(shape, dtype=dtype, device="meta"), None, 2, options)
    assert str(OPERATORS[op].obstacle(problem, "multicast")).startswith(obstacle)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("elements", [8, 1 << 20, 1 << 29])
def test_auto_never_selects_it(op, elements):
    x = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    assert "multicast" not in auto_transports(checked_problem(op, x, None, 4, ()), OPERATORS[op])
