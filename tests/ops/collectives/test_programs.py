"""Programs and plans of the collectives on simulated ranks, against NumPy."""

from __future__ import annotations

import itertools
import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave.ops.collectives.all_gather import all_gather_plan, all_gather_program
from tileweave.ops.collectives.all_reduce import (
    all_reduce_plan,
    is_one_shot,
    one_shot_program,
    two_shot_program,
)
from tileweave.ops.collectives.all_to_all import (
    AllToAll,
    Parts,
    all_to_all_program,
)
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.reduce_scatter import reduce_scatter_plan, reduce_scatter_program
from tileweave.ops.collectives.transport import auto_transports
from tileweave.ops.collectives.vectors import TiledView, copies_to
from tileweave.ops.core.collective_problem import CollectiveProblem
from tileweave.ops.core.registry import OPERATORS

TRANSPORTS = ["copy_engine", "ldst"]
PERSISTENT_TILES = "copy_engine, blocks that walk"
BY_ENGINES = {"copy_engine": None, PERSISTENT_TILES: 2}
"""How many blocks collect what copy engines bring; None for one a tile."""
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def view_of(count, dtype):
    """Return a view in rows of at most 16 elements, two in a tile, of 4 bytes each."""
    return TiledView.of(count, dtype, 16, 128)


def simulated(program, x, schedules=2):
    """Return the result of each rank; a fault raises."""
    inputs = [{"x": given} for given in x]
    return [
        actual["out"]
        for actual in tw.simulate(program, len(x), inputs, schedules=schedules, epochs=3)
    ]


def in_chunks(count, height):
    """Split tiles: half of them in the first piece, then one at a time."""
    tiles = -(-count // height)
    starts = [0, *(tile * height for tile in range(max(1, tiles // 2), tiles))]
    return [slice(*ends) for ends in itertools.pairwise([*starts, count])]


@pytest.mark.parametrize("transport", [*TRANSPORTS, PERSISTENT_TILES])
@pytest.mark.parametrize(("ranks", "count"), [(1, 64), (2, 96), (3, 112), (5, 12)])
def test_all_gather(ranks, count, transport):
    view = view_of(count, "int32")
    if transport in BY_ENGINES:
        chunks = in_chunks(view.rows, view.height)
        program = all_gather_plan(view, ranks, chunks, BY_ENGINES[transport])
    else:
        program = all_gather_program(view, ranks)
    rng = np.random.default_rng(ranks)
    x = [rng.integers(0, 1 << 30, count).astype(np.int32) for _ in range(ranks)]
    for actual in simulated(program, [given.reshape(view.shape) for given in x]):
        assert np.array_equal(actual.reshape(ranks, count), np.stack(x))


def numbers(ranks, shape, dtype):
    """Return integers whose sums are exact in any order, and their sum."""
    rng = np.random.default_rng(ranks)
    x = [rng.integers(-8, 9, shape).astype(DTYPES[dtype]) for _ in range(ranks)]
    return x, sum(given.astype(np.float32) for given in x).astype(DTYPES[dtype])


CASES = [(1, "float32", 100), (2, "bfloat16", 256), (3, "float16", 328), (5, "float32", 8)]
"""Whole tiles, tails, less than a tile; tiles that ranks cannot share evenly."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("ranks", "dtype", "count"), CASES)
def test_reduce_scatter(ranks, dtype, count, transport):
    view = view_of(count, dtype)
    if transport == "copy_engine":
        program = reduce_scatter_plan(view, ranks, in_chunks(view.rows, view.height))
    else:
        program = reduce_scatter_program(view, ranks)
    x, total = numbers(ranks, (ranks, *view.shape), dtype)
    for rank, actual in enumerate(simulated(program, x)):
        assert np.array_equal(actual, total[rank]), rank


@pytest.mark.parametrize("make", [one_shot_program, two_shot_program])
@pytest.mark.parametrize(("ranks", "dtype", "count"), CASES)
def test_all_reduce(make, ranks, dtype, count):
    view = view_of(count, dtype)
    x, total = numbers(ranks, view.shape, dtype)
    for actual in simulated(make(view, ranks), x):
        assert np.array_equal(actual, total)


@pytest.mark.parametrize(("ranks", "dtype", "count"), CASES)
def test_all_reduce_by_copy_engines(ranks, dtype, count):
    view = view_of(count, dtype)
    x, total = numbers(ranks, (ranks, *view.shape), dtype)
    program = all_reduce_plan(view, ranks, in_chunks(view.rows, view.height))
    for actual in simulated(program, x):
        assert np.array_equal(actual, total)


@pytest.mark.parametrize("make", [one_shot_program, two_shot_program])
def test_all_ranks_get_the_same_bits(make):
    """The sum of these numbers depends on the order."""
    rng, ranks, view = np.random.default_rng(0), 4, view_of(320, "bfloat16")
    x = [rng.normal(size=view.shape).astype(DTYPES["bfloat16"]) for _ in range(ranks)]
    first, *others = simulated(make(view, ranks), x, schedules=1)
    assert all(np.array_equal(first, other) for other in others)
    right = sum(given.astype(np.float32) for given in x)
    assert np.linalg.norm(first.astype(np.float32) - right) < 1e-2 * np.linalg.norm(right)


def parts_of(shape, scatter, gather, ranks, dtype=torch.float32, tile=None):
    x = torch.empty(shape, device="meta")
    result, axes = AllToAll.result(x, ranks, scatter, gather)
    return Parts.of(
        CollectiveProblem("all_to_all", shape, result, axes, ranks, dtype), tile
    ), result


def expected_all_to_all(x, scatter, gather):
    parts = [np.split(given, len(x), scatter) for given in x]
    return [np.concatenate([p[rank] for p in parts], gather) for rank in range(len(x))]


AXES = [((6, 6, 8), 1, 0), ((6, 4, 8), 0, 1), ((12, 2, 4), 0, 0), ((2, 3, 6, 4), 2, 1),
        ((2, 6, 3, 4), 1, 2), ((2, 6, 3), 1, 1), ((2, 3, 4, 6), -1, 0)]  # fmt: skip
"""Of heads to sequence and back; parts without gaps; axes before, between and behind."""


@pytest.mark.parametrize(("shape", "scatter", "gather"), AXES)
def test_all_to_all(shape, scatter, gather):
    ranks = 2 + scatter % 2
    parts, result = parts_of(shape, scatter, gather, ranks, tile=64)
    rng = np.random.default_rng(ranks)
    x = [rng.integers(0, 1 << 30, shape).astype(np.int32) for _ in range(ranks)]
    arguments = [given.reshape(parts.shape(parts.x_ranks_last)) for given in x]
    actual = simulated(all_to_all_program(parts), arguments)
    for out, right in zip(actual, expected_all_to_all(x, scatter, gather), strict=True):
        assert np.array_equal(out.reshape(result), right)


@pytest.mark.parametrize(
    ("shape", "scatter", "gather", "rows", "width"),
    [
        ((2, 8), 0, 0, 1, 4),
        ((2, 6), 0, 0, 3, 1),
        ((6, 64), 0, 0, 3, 32),
        ((4, 2, 1040), 1, 0, 4, 520),
    ],
)
def test_parts_are_words_where_they_can_be(shape, scatter, gather, rows, width):
    """bf16 on two ranks; words have 4 bytes."""
    parts, _ = parts_of(shape, scatter, gather, 2, torch.bfloat16)
    assert (parts.rows, parts.width) == (rows, width)


ANY_SHAPES = [
    pytest.param("all_to_all", (2, 1), (1, 512, 4, 192), torch.bfloat16, marks=pytest.mark.long),
    ("all_to_all", (2, 1), (2, 250, 4, 80), torch.float16),
    pytest.param("all_to_all", (1, 2), (1, 1016, 1, 80), torch.bfloat16, marks=pytest.mark.long),
    pytest.param("all_to_all", (0, 1), (6, 1, 251), torch.float32, marks=pytest.mark.long),
    ("all_to_all", (1, 1), (70_000, 6, 5), torch.uint8),
    pytest.param("all_to_all", (0, 0), (2, 999_999), torch.bool, marks=pytest.mark.long),
    ("all_gather", (), (37, 99), torch.complex64),
    ("reduce_scatter", (), (6, 1001), torch.bfloat16),
    ("all_reduce", (), (1,), torch.float32),
    pytest.param("all_reduce", (), (3_000_003,), torch.float16, marks=pytest.mark.long),
    pytest.param("all_reduce", (), (1 << 32,), torch.bfloat16, marks=pytest.mark.long),
]
"""Rows and widths that are no powers of two; more of what lies before them than a grid's second
axis has blocks; more than 32 bits can count."""


@pytest.mark.parametrize(("op", "axes", "shape", "dtype"), ANY_SHAPES)
def test_any_shape_compiles(op, axes, shape, dtype):
    """With the choice of ``auto``, and with copy engines."""
    problem = checked_problem(op, torch.empty(shape, dtype=dtype, device="meta"), None, 2, axes)
    collective = OPERATORS[op]
    programs = [collective.steps(problem, auto_transports(problem, collective)[-1])]
    if collective.obstacle(problem, "copy_engine") is None:
        programs += collective.steps(problem, "copy_engine").kernels(2)
    for program in programs:
        assert not re.search(r"blockIdx\.[yz]", tw.emit(program, world_size=2))


@pytest.mark.parametrize("moved", [2, 3, 5, 9])
@pytest.mark.parametrize("rows", [100, 40_000, (1 << 18) + 1, 1 << 24])
def test_chunks_become_smaller(rows, moved):
    view = TiledView.of(rows * 256, "bfloat16")
    chunks = view.chunks(moved)
    assert chunks[0].start == 0 and chunks[-1].stop == rows
    assert all(one.stop == other.start for one, other in itertools.pairwise(chunks))
    *before, last = [p.stop - p.start for p in chunks]
    assert before == sorted(before, reverse=True) and (not before or last <= before[-1])
    flag = math.gcd(*(p.start for p in chunks)) or rows  # rows of one
    assert last <= flag and (not before or flag % view.height == 0)


def test_as_many_chunks_as_pay():
    views = [TiledView.of(mib << 19, "bfloat16") for mib in (8, 64, 256, 4096)]
    assert [len(of.chunks()) for of in views] == [1, 2, 3, 4]
    assert [len(of.chunks(moved=5)) for of in views] == [2, 4, 4, 4]


def test_the_last_peer_gets_chunks():
    chunks = [slice(0, 6), slice(6, 8)]
    assert [*copies_to([2, 0, 1], chunks)] == [
        (2, slice(0, 8)), (0, slice(0, 8)), (1, slice(0, 6)), (1, slice(6, 8)),
    ]  # fmt: skip
    assert not [*copies_to([], chunks)]


@pytest.mark.parametrize(
    ("count", "dtype", "shape", "tile"),
    [
        (1 << 20, "bfloat16", (4096, 256), (32, 256)),
        (1000, "float32", (125, 8), (256, 8)),
        (7, "uint8", (7, 1), (256, 1)),
    ],
)
def test_lines(count, dtype, shape, tile):
    view = TiledView.of(count, dtype)
    assert (view.shape, view.tile) == (shape, tile)


@pytest.mark.parametrize(("ranks", "count", "one_shot"), [(2, 1 << 18, True), (3, 1 << 18, False)])
def test_small_tensors_are_exchanged_once(ranks, count, one_shot):
    problem = CollectiveProblem("all_reduce", (count,), (count,), (), ranks, torch.bfloat16)
    assert is_one_shot(problem) == one_shot
