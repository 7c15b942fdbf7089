"""Random programs full of conditions: each rank writes what a neighbor reads, in two random ways.

Their results are right, or the compiler refuses them. ``TILEWEAVE_PROGRAMS=1000`` tests that many
programs instead of a few.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import tileweave as tw
from tests.modules import load_module

pytestmark = pytest.mark.long

PROGRAMS = int(os.environ.get("TILEWEAVE_PROGRAMS", 60))
HEAD = """\
import tilelang.language as T
from tileweave import language as W

F32 = "float32"


@T.prim_func
def program(X: T.Tensor(({rows}, {columns}), F32), S: W.Symmetric(({held}, {columns}), F32),
            Y: T.Tensor(({rows}, {columns}), F32)):
    with T.Kernel({blocks}, threads=32) as block:
        me = W.rank()
"""


class Move(NamedTuple):
    """``height`` rows from ``base`` on, which a block moves.

    Attributes:
        to, source: row, column -> the element.
        rows, columns: extents of the tensor.
        wide: number of columns of a loop, which may exceed ``columns``.
    """

    to: Callable[[str, str], str]
    source: Callable[[str, str], str]
    rows: int
    columns: int
    wide: int
    base: str
    height: int

    def part(self, offset: str, height: int) -> "Move":
        return self._replace(base=f"{self.base} + {offset}", height=height)


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def row_of(rng: random.Random, move: Move) -> str:
    """Return the row of iteration ``i``, forwards or backwards."""
    return f"{move.base} + i" if rng.random() < 0.7 else f"{move.base} + {move.height - 1} - i"


def in_parallel(rng: random.Random, move: Move) -> list[str]:
    return guarded(move, row_of(rng, move))


def guarded(move: Move, row: str, requested: str = "") -> list[str]:
    return [
        f"for i, j in T.Parallel({move.height}, {move.wide}):",
        f"    if {requested}{row} < {move.rows} and j < {move.columns}:",
        f"        {move.to(row, 'j')} = {move.source(row, 'j')}",
    ]


def split(rng: random.Random, move: Move) -> list[str]:
    axis, extent = rng.choice([("i", move.height), ("j", move.wide)])
    at, row = rng.randrange(extent + 1), row_of(rng, move)
    sides = [f"{axis} < {at} and ", f"{axis} >= {at} and "]
    rng.shuffle(sides)
    return [line for side in sides for line in guarded(move, row, side)]


def in_parts(rng: random.Random, move: Move) -> list[str]:
    parts = rng.choice([n for n in (1, 2, 4) if move.height % n == 0])
    height = move.height // parts
    number = rng.choice(["s", f"({parts - 1} - s)"])
    loop = f"for s in T.{rng.choice(['serial', 'unroll'])}({parts}):"
    inner = rng.choice([in_parallel, by_tile])
    return [loop, *indented(inner(rng, move.part(f"{number} * {height}", height)))]


def by_branch(rng: random.Random, move: Move) -> list[str]:
    sides = [rng.choice([in_parallel, split])(rng, move) for _ in range(2)]
    condition = rng.choice([f"block < {rng.randrange(5)}", f"{move.base} < {move.rows}"])
    return [f"if {condition}:", *indented(sides[0]), "else:", *indented(sides[1])]


def row_by_row(rng: random.Random, move: Move) -> list[str]:
    row = f"{move.base} + s"
    return [
        f"for s in T.serial({move.height}):",
        f"    if {row} < {move.rows}:",
        f"        for j in T.Parallel({move.columns}):",
        f"            {move.to(row, 'j')} = {move.source(row, 'j')}",
    ]


def by_tile(rng: random.Random, move: Move) -> list[str]:
    name = f"tile_{rng.randrange(10**6)}"
    copies = [
        f"{name} = T.alloc_shared(({move.height}, {move.columns}), F32)",
        f"T.copy({move.source(move.base, '0')}, {name})",
        f"T.copy({name}, {move.to(move.base, '0')})",
    ]
    guard = [f"if {move.base} < {move.rows}:", *indented(copies)]
    return guard if rng.random() < 0.5 else copies


def random_program(rng: random.Random) -> tuple[str, int, int, int]:
    """Return the text, its rows and columns, and the distance to the rank whose rows each rank
    reads."""
    rows, columns = rng.randrange(3, 40), rng.choice([4, 8, 12])
    held = rows + rng.choice([0, 0, rng.randrange(9)])
    wide = columns + rng.choice([0, 0, rng.randrange(1, 5)])
    heights = [rng.choice([2, 4, 6, 8]) for _ in range(2)]
    blocks = -(-rows // min(heights)) + rng.randrange(3)
    to, source, shift = rng.choice(
        [("(me + 1) % {ranks}", "me", -1), ("me", "(me + 1) % {ranks}", 1)]
    )
    lines = []
    for height, (a, b) in zip(heights, ((f"S[{to}, ", "X["), ("Y[", f"S[{source}, ")), strict=True):
        move = Move(
            lambda row, column, a=a: f"{a}{row}, {column}]",
            lambda row, column, b=b: f"{b}{row}, {column}]",
            rows, columns, wide, f"block * {height}", height,
        )  # fmt: skip
        lines += rng.choice(WAYS)(rng, move)
    head = HEAD.format(rows=rows, columns=columns, held=held, blocks=blocks)
    return head + "\n".join(indented(indented(lines))) + "\n", rows, columns, shift


WAYS = (in_parallel, split, in_parts, by_branch, row_by_row, by_tile)


def outcome(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3])
    text, rows, columns, shift = random_program(rng)
    path = folder / f"program_{seed}.py"
    path.write_text(text.replace("{ranks}", str(ranks)))
    module = load_module(path)
    numbers = np.random.default_rng(seed)
    inputs = [{"X": numbers.standard_normal((rows, columns), np.float32)} for _ in range(ranks)]
    try:
        actual = tw.simulate(
            module.program, ranks, inputs, schedules=2, epochs=2, resident_blocks=64
        )
    except tw.LanguageError:
        return "refused"
    for rank in range(ranks):
        right = inputs[(rank + shift) % ranks]["X"]
        assert np.array_equal(actual[rank]["Y"], right), path.read_text()
    return "right"


@pytest.mark.filterwarnings("ignore::tileweave.SimulationWarning")
def test_random_programs(tmp_path):
    results = [outcome(seed, tmp_path) for seed in range(PROGRAMS)]
    assert results.count("right") > 0.8 * PROGRAMS
