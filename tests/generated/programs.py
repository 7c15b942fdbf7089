"""Ordinary programs at random, in families: each contains a class of faults of TileLang."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from .reference import Unsuitable, inputs_of, results_of
from .statements import (
    DEFINITIONS,
    change,
    clear,
    defined,
    exchange,
    hand_over,
    iterate,
    leave_by_elements,
    leave_by_threads,
    move,
    pipeline,
    product,
    receive,
    reduce,
    retire,
    reuse,
    store,
    stream,
    tail,
    words,
)
from .writer import FLOATS, Box, Writer


class Program(NamedTuple):
    """A program, the number of ranks that it is for, and the text of one that computes the same."""

    text: str
    ranks: int
    reference: str


def finish(w: Writer) -> None:
    """Store the tiles that no result has received, after the exchange."""
    if not w.exchanged:
        exchange(w)
    tiles = [t for t in w.tiles if (t.shape, t.dtype) == (w.shape, w.dtype)]
    if tiles and w.chance(0.7):
        receive(w, w.choice(tiles))
    for tile in w.tiles:
        store(w, tile)


def halos(w: Writer) -> None:
    """Tiles whose parts are written several times, and tiles that share memory."""
    for _ in range(w.choice((1, 2, 2, 3))):
        tile = defined(w)
        for _ in range(w.choice((1, 1, 2))):
            change(w, tile)
        if w.chance(0.5):
            w.choice((reuse, retire, iterate))(w, tile)
    finish(w)


def producers(w: Writer) -> None:
    """Statements of tiles and of single threads before and after pipelined loops."""
    tile = defined(w)
    for _ in range(w.choice((1, 2, 3))):
        kind = w.choice(("words", "words", "change", "move", "move"))
        if kind == "words":
            words(w)
        elif kind == "move":
            tile = w.shared()
            move(w, tile)
            w.tiles.append(tile)
        else:
            change(w, tile)
    for _ in range(w.choice((1, 1, 2))):
        w.choice((pipeline, pipeline, product))(w)
        if w.chance(0.3):
            change(w, defined(w))
    finish(w)


def operands(w: Writer) -> None:
    """Products with an operand in registers, which other statements store, too."""
    w.threads, w.dtype = w.choice((128, 128, 256)), w.choice(("float16", "bfloat16"))
    m = w.choice((64, 128)) if w.threads == 256 else 64
    k, n = w.choice((32, 64)), w.choice((32, 64))
    w.shape = (m, k)
    x, y = w.tensor("X"), w.tensor("X", (n, k))
    a, b, af = w.shared(), w.shared((n, k)), w.fragment()
    second = n >= 64 and w.chance(0.3)
    c = w.fragment((n, m) if second else (m, n), "float32")
    order = f"{b.name}, {af.name}" if second else f"{af.name}, {b.name}"
    out = w.result(c.shape, "float32")
    w.add(
        f"T.copy({x.whole()}, {a.name})", f"T.copy({y.whole()}, {b.name})", f"T.clear({c.name})",
        f"T.copy({a.name}, {af.name})", f"T.gemm({order}, {c.name}, transpose_B=True)",
        f"T.copy({c.name}, {out.whole()})",
    )  # fmt: skip
    if w.chance(0.4):
        w.parallel(w.shape, f"{af.at('i', 'j')} = {af.at('i', 'j')} + 1")
    target = w.choice((a, w.shared()))
    w.tiles.append(target)
    if w.chance(0.5):
        w.add(f"T.copy({af.name}, {target.name})")
    else:
        w.parallel(w.shape, f"{target.at('i', 'j')} = {af.at('i', 'j')}")
    if w.chance(0.3):
        change(w, target)
    exchange(w)
    finish(w)


def columns(w: Writer) -> None:
    """Columns or rows of a larger tile, stored to a result and to a peer."""
    rows, width = w.shape
    wide = w.shared((rows + w.choice((0, 0, 0, 2)), width + w.choice((4, 8, 16, 16, 32, 64))))
    first = w.choice((0, 0, 0, wide.shape[1] - width, 4))
    box, is_cleared = Box(wide.shape[0] - rows, rows, first, width), w.chance(0.4)
    if is_cleared:
        clear(w, wide)
    x, (i, j) = w.tensor("X"), box.index()
    if w.chance(0.5):
        w.add(f"T.copy({x.whole()}, {box.of(wide)})")
    else:
        w.parallel(w.shape, f"{wide.at(i, j)} = {x.at('i', 'j')}")
    if is_cleared and w.chance(0.5):
        change(w, wide)
    w.add(f"T.copy({box.of(wide)}, {w.symmetric(f'(me + 1) % {w.ranks}').whole()})")
    w.exchanged = True
    if w.chance(0.6):
        part = w.choice((box, Box(0, rows, 0, width)))
        w.add(f"T.copy({part.of(wide)}, {w.result(w.shape, w.dtype).whole()})")
    if w.chance(0.4):
        tile = w.shared()
        w.add(f"T.copy({box.of(wide)}, {tile.name})")
        store(w, tile)
    out, own = w.result(w.shape, w.dtype), w.symmetric("me")
    w.parallel(w.shape, f"{out.at('i', 'j')} = {own.at('i', 'j')}")


def fragments(w: Writer) -> None:
    """Parallel loops over rows and columns of a fragment, from an offset."""
    tile = defined(w)
    exchange(w)
    f, own = w.fragment(), w.symmetric("me")
    w.add(f"T.copy({w.choice((own.whole(), tile.name))}, {f.name})")
    for _ in range(w.choice((1, 1, 1, 2))):
        box, (rows, width) = w.box(f), f.shape
        row = w.rng.randrange(rows - 1)
        even = [h for h in range(1, rows - row + 1) if h * width % w.threads == 0]
        if even and w.chance(0.9):  # other heights have no layout, or a part of the registers
            box = Box(row, w.choice(even), 0, width)
        is_whole = w.chance(0.25)
        i, j = ("i", "j") if is_whole else box.index()
        value = w.choice((w.value(), w.value(), f"{f.at(i, j)} + 1", tile.at(i, j)))
        if is_whole:
            write = f"    {f.at(i, j)} = {value}"
            w.parallel(f.shape, f"if i >= {box.row} and i < {box.row + box.height}:", write)
        else:
            w.parallel((box.height, box.width), f"{f.at(i, j)} = {value}")
    w.add(f"T.copy({f.name}, {w.result(w.shape, w.dtype).whole()})")


def mixed(w: Writer) -> None:
    """All kinds of statements."""
    statements = (
        defined, lambda w: change(w, defined(w)), lambda w: store(w, defined(w)), words,
        lambda w: reduce(w, defined(w)), pipeline, product, tail, lambda w: iterate(w, defined(w)),
        lambda w: w.choice(DEFINITIONS)(w, defined(w)),
    )  # fmt: skip
    for _ in range(w.choice((2, 3, 3, 4))):
        w.choice(statements)(w)
    finish(w)


def jumps(w: Writer) -> None:
    """Serial loops that all or some threads leave by a break or a continue."""
    w.threads, w.shape = w.choice((128, 128, 256)), (16, w.choice((32, 64)))
    statements = (
        lambda w: iterate(w, defined(w)), leave_by_threads, leave_by_threads,
        lambda w: leave_by_elements(w, defined(w)), pipeline,
    )  # fmt: skip
    while not any(line.endswith(("break", "continue")) for line in w.lines):
        w.choice(statements)(w)
    finish(w)


def roles(w: Writer) -> None:
    """Producers and consumers of tiles, which wait for each other at mbarriers."""
    w.dtype, w.shape = w.choice(FLOATS), (w.choice((32, 64)), 64)
    hand_over(w)
    exchange(w)
    finish(w)


def streams(w: Writer) -> None:
    """Pipelined loops over tiles of the neighbor, with waits that the compiler inserts."""
    w.threads, w.dtype = w.choice((128, 128, 256)), w.choice((*FLOATS, "float16", "int8"))
    w.shape = (w.choice((16, 32)), w.choice((32, 64)))
    for _ in range(w.choice((1, 1, 2))):
        stream(w)
    if w.chance(0.3):
        w.choice((pipeline, product))(w)
    finish(w)


FAMILIES: dict[str, Callable[[Writer], None]] = {
    f.__name__: f
    for f in (halos, producers, operands, columns, fragments, mixed, jumps, roles, streams)
}


NEED_SM_90 = ("roles",)
"""Families of programs that sm_80 does not run."""


def random_program(family: str, seed: int) -> Program:
    """Return the program of a family and a seed. Its results are exact and defined."""
    rng = random.Random(f"{family} {seed}")
    while True:
        w = Writer(rng)
        FAMILIES[family](w)
        text, reference = w.text(), w.reference()
        try:
            results_of(reference, w.ranks, inputs_of(reference, w.ranks))
        except Unsuitable:
            continue
        return Program(text, w.ranks, reference)
