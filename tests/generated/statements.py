"""Statements of generated programs, as programmers write them."""

from __future__ import annotations

from collections.abc import Callable

from .writer import FLOATS, Box, Buffer, Writer, cast

# Jumps out of serial loops.


def jump(w: Writer, loop: str, *conditions: str) -> None:
    """Leave a loop or its iteration under one of ``conditions``, or one that all threads share."""
    shared = (f"{loop} == 1", f"{loop} > {w.count_of('2')}", f"{w.count_of('3')} > {loop}")
    condition = w.choice(conditions) if conditions and w.chance(0.7) else w.choice(shared)
    name = w.choice(("break", "continue"))
    if w.chance(0.2):
        w.nest(f"if {w.condition()}:", lambda: w.add(f"if {condition}:", f"    {name}"))
    else:
        w.add(f"if {condition}:", f"    {name}")


def maybe_jump(w: Writer, loop: str, *conditions: str) -> None:
    if w.chance(0.25):
        jump(w, loop, *conditions)


# Statements that define a whole tile.


def load(w: Writer, tile: Buffer) -> None:
    """Load the tile from a tensor of the same shape, or of another type."""
    dtype = w.choice((tile.dtype, tile.dtype, tile.dtype, "float32"))
    source, (rows, columns) = w.tensor("X", tile.shape, dtype), tile.shape
    kind = w.choice(("copy", "copy", "copy", "fragment", "rows", "reversed", "columns"))
    if kind == "copy":
        w.add(f"T.copy({source.whole()}, {tile.name})")
    elif kind == "fragment":
        f = w.fragment(tile.shape, dtype)
        w.add(f"T.copy({source.whole()}, {f.name})", f"T.copy({f.name}, {tile.name})")
    else:
        row, column = (f"{rows - 1} - i" if kind == "reversed" else "i"), "j"
        column = f"{columns - 1} - j" if kind == "columns" else column
        value = cast(source.at(row, column), dtype, tile.dtype)
        w.parallel(tile.shape, f"{tile.at('i', 'j')} = {value}")


def clear(w: Writer, tile: Buffer) -> None:
    w.add(w.choice((f"T.clear({tile.name})", f"T.fill({tile.name}, {w.value()})")))


def receive(w: Writer, tile: Buffer) -> None:
    """Copy the neighbor's tile, after an exchange."""
    if tile.dtype != w.dtype or tile.shape != w.shape:
        return load(w, tile)
    if not w.exchanged:
        exchange(w)
    s = w.symmetric("me")
    if w.chance(0.6):
        w.add(f"T.copy({s.whole()}, {tile.name})")
    else:
        w.parallel(tile.shape, f"{tile.at('i', 'j')} = {s.at('i', 'j')}")


def move(w: Writer, tile: Buffer) -> None:
    """Copy another tile: whole, in halves that change places, reversed, or a sum."""
    others, (rows, columns) = w.others(tile), tile.shape
    if not others:
        return load(w, tile)
    other = w.choice(others)
    kind = w.choice(("copy", "halves", "reversed", "sum"))
    if kind == "copy":
        w.add(f"T.copy({other.name}, {tile.name})")
    elif kind == "halves":
        half = rows // 2
        w.add(
            f"T.copy({other.name}[0:{half}, :], {tile.name}[{half}:{rows}, :])",
            f"T.copy({other.name}[{half}:{rows}, :], {tile.name}[0:{half}, :])",
        )
    elif kind == "reversed":
        w.parallel(tile.shape, f"{tile.at('i', 'j')} = {other.at(f'{rows - 1} - i', 'j')}")
    else:
        value = f"{other.at('i', 'j')} + {w.source(tile.shape).at('i', 'j')}"
        w.parallel((rows, columns), f"{tile.at('i', 'j')} = {value}")


DEFINITIONS = (load, load, clear, receive, move)


def defined(w: Writer, tile: Buffer | None = None) -> Buffer:
    """Return a tile that is defined: the given one, a former one or a new one."""
    if tile is None and w.tiles and (len(w.tiles) > 2 or w.chance(0.6)):
        return w.choice(w.tiles)
    tile = tile or w.shared()
    w.choice(DEFINITIONS)(w, tile)
    if tile not in w.tiles:
        w.tiles.append(tile)
    return tile


def exchange(w: Writer) -> None:
    """Send a tile to the next rank, from shared memory, from registers or by elements."""
    tile = next((t for t in w.tiles if (t.shape, t.dtype) == (w.shape, w.dtype)), None)
    if tile is None:
        tile = w.shared()
        load(w, tile)
        w.tiles.append(tile)
    s = w.symmetric(f"(me + 1) % {w.ranks}")
    kind = w.choice(("copy", "copy", "copy", "elements", "fragment"))
    if kind == "copy":
        w.add(f"T.copy({tile.name}, {s.whole()})")
    elif kind == "elements":
        w.parallel(w.shape, f"{s.at('i', 'j')} = {tile.at('i', 'j')}")
    else:
        f = w.fragment()
        w.add(f"T.copy({tile.name}, {f.name})", f"T.copy({f.name}, {s.whole()})")
    w.exchanged = True


# Statements that change a part of a tile.


def fill_part(w: Writer, tile: Buffer) -> None:
    part = w.box(tile).of(tile)
    w.add(w.choice((f"T.fill({part}, {w.value()})", f"T.clear({part})")))


def copy_part(w: Writer, tile: Buffer) -> None:
    """Copy a box from a tensor or another tile, from the same place or another one."""
    box, others = w.box(tile), w.others(tile)
    source = w.choice(others) if others and w.chance(0.4) else w.source(tile.shape)
    row = w.choice((box.row, 0, source.shape[0] - box.height))
    other = Box(row, box.height, w.choice((box.column, 0)), box.width)
    w.add(f"T.copy({other.of(source)}, {box.of(tile)})")


def write_part(w: Writer, tile: Buffer) -> None:
    """Write a box by a parallel loop: rows first or columns first, or with a guard."""
    box, source = w.box(tile), w.source(tile.shape)
    rows, columns = tile.shape
    kind = w.choice(("rows", "columns", "guard", "diagonal", "flat"))
    i, j = ("i", "j") if kind == "guard" else box.index()
    value = w.choice((
        w.value(), f'T.cast(({i} + {j}) % 4, "{tile.dtype}")', source.at("0", "0"),
        source.at(i, j), source.at(i, j), source.at(f"{rows - 1} - ({i})", j),
    ))  # fmt: skip
    value = value if value.isdigit() or "cast" in value else cast(value, source.dtype, tile.dtype)
    write = f"{tile.at(i, j)} = {value}"
    if kind == "rows":
        w.parallel((box.height, box.width), write)
    elif kind == "columns":
        w.parallel((box.width, box.height), write, names="j, i")
    elif kind == "guard":
        tests = [f"i >= {box.row}", f"i < {box.row + box.height}"]
        tests += [f"j < {box.column + box.width}"] if box.width < columns else []
        w.parallel(tile.shape, f"if {' and '.join(tests)}:", f"    {write}")
    elif kind == "diagonal":
        w.parallel((min(tile.shape),), f"{tile.at('i', 'i')} = {w.value()}")
    else:
        row = f"{box.row} + i // {columns}"
        w.parallel((box.height * columns,), f"{tile.at(row, f'i % {columns}')} = {w.value()}")


def write_by_threads(w: Writer, tile: Buffer) -> None:
    """Write a row by single threads, or a column by the threads of some warps."""
    tx, (rows, columns) = w.thread(), tile.shape
    row, value = str(w.rng.randrange(rows)), f'T.cast(tx % 4, "{tile.dtype}")'
    first = w.threads - 32
    w.nest(*w.choice((
        (f"if {tx} < {min(columns, w.threads)}:", lambda: w.add(f"{tile.at(row, tx)} = {value}")),
        (f"if {tx} < {rows}:", lambda: w.add(f"{tile.at(tx, '0')} = {value}")),
        (f"if {tx} >= {first}:", lambda: w.add(f"{tile.at(row, f'{tx} - {first}')} = {value}")),
        (f"if {tx} == 0:", lambda: w.add(f"{tile.at(row, '1')} = {w.value()}")),
    )))  # fmt: skip


def copy_rows(w: Writer, tile: Buffer) -> None:
    """Copy rows in a serial loop, whose extent may be a number from memory."""
    source, (rows, columns) = w.source(tile.shape), tile.shape
    n, extent = w.choice((2, 3)), ""
    if w.chance(0.3):
        n, extent = 3, w.count_of("1")
    target = f"s + {w.choice((0, 1, rows - n))}"
    line = f"T.copy({source.at('s', f'0:{columns}')}, {tile.at(target, f'0:{columns}')})"

    def body() -> None:
        maybe_jump(w, "s")
        if w.chance(0.5):
            w.add(line)
        else:
            w.parallel((columns,), f"{tile.at(target, 'i')} = {source.at('s', 'i')}")
        maybe_jump(w, "s")

    w.nest(f"for s in T.serial({extent or n}):", body)


def update(w: Writer, tile: Buffer) -> None:
    """Change a tile in place."""
    x = tile.at("i", "j")
    zero = f'T.cast(0, "{tile.dtype}")'
    w.parallel(tile.shape, f"{x} = {w.choice((f'{x} + 1', f'T.max({x}, {zero})', f'-{x}'))}")


PARTS = (
    fill_part, copy_part, copy_part, write_part, write_part, write_by_threads, copy_rows, update,
)  # fmt: skip


def change(w: Writer, tile: Buffer) -> None:
    """Change a part, maybe under a condition of ranks or blocks, or in both branches of one."""
    kind = w.rng.random()
    if kind < 0.2:
        w.nest(f"if {w.condition()}:", lambda: w.choice(PARTS)(w, tile))
    elif kind < 0.25:
        w.nest(f"if {w.condition()}:", lambda: w.choice(PARTS)(w, tile))
        w.nest("else:", lambda: w.choice(PARTS)(w, tile))
    else:
        w.choice(PARTS)(w, tile)


# Statements that read a tile.


def store(w: Writer, tile: Buffer) -> None:
    """Store the tile to a result: whole, a part, reversed, transposed, in another type."""
    rows, columns = tile.shape
    kinds = ("copy", "copy", "type", "part", "columns", "reversed", "fragment", "transposed")
    kind = w.choice(kinds)
    if kind == "part":
        box = w.box(tile)
        out = w.result((box.height, box.width), tile.dtype)
        w.add(f"T.copy({box.of(tile)}, {out.whole()})")
    elif kind == "columns":
        width = w.choice((columns // 2, columns - 8, 8))
        out = w.result((rows, width), tile.dtype)
        w.add(f"T.copy({tile.box((0, rows), (0, width))}, {out.whole()})")
    elif kind == "reversed":
        out = w.result(tile.shape, tile.dtype)
        w.parallel(tile.shape, f"{out.at('i', 'j')} = {tile.at(f'{rows - 1} - i', 'j')}")
    elif kind == "transposed":
        out = w.result((columns, rows), tile.dtype)
        w.parallel(out.shape, f"{out.at('i', 'j')} = {tile.at('j', 'i')}")
    elif kind == "fragment":
        f, out = w.fragment(tile.shape, tile.dtype), w.result(tile.shape, tile.dtype)
        w.add(f"T.copy({tile.name}, {f.name})", f"T.copy({f.name}, {out.whole()})")
    else:
        out = w.result(tile.shape, "float32" if kind == "type" else tile.dtype)
        w.add(f"T.copy({tile.name}, {out.whole()})")


def reuse(w: Writer, tile: Buffer) -> None:
    """Store a tile, and write the next one to it."""
    store(w, tile)
    w.choice(DEFINITIONS)(w, tile)


def retire(w: Writer, tile: Buffer) -> None:
    """Store a tile that no later statement uses: another one may have its memory."""
    store(w, tile)
    w.tiles.remove(tile)


def iterate(w: Writer, tile: Buffer) -> None:
    """Load and store a tile in a serial loop."""
    n = w.choice((2, 3))
    x, out = w.tensor("X", (n, *tile.shape)), w.result((n, *tile.shape), tile.dtype)
    rows, columns = tile.shape
    whole = (f"0:{rows}", f"0:{columns}")
    source, target = x.at("s", *whole), out.at("s", *whole)

    def body() -> None:
        maybe_jump(w, "s")
        w.add(f"T.copy({source}, {tile.name})")
        maybe_jump(w, "s", f"{x.at('s', '0', '1')} > 0")
        if w.chance(0.5):
            w.choice((fill_part, write_part, update, write_by_threads))(w, tile)
            maybe_jump(w, "s")
        if w.chance(0.5):
            w.add(f"T.copy({tile.name}, {target})")
        else:
            element = tile.at(f"{rows - 1} - i", "j")
            w.parallel(tile.shape, f"{out.at('s', 'i', 'j')} = {element}")
        maybe_jump(w, "s")

    w.nest(f"for s in T.serial({n}):", body)


def leave_by_threads(w: Writer) -> None:
    """Exchange words among threads in or after a serial loop that single threads leave."""
    tx, n, steps = w.thread(), w.shared((w.threads,), "int32"), w.choice((2, 3, 5))
    x, out = w.tensor("X", (steps, w.threads), "int32"), w.result((steps, w.threads), "int32")
    other = n.at(f"({tx} + {w.rng.randrange(1, w.threads)}) % {w.threads}")
    word, is_exchange = n.at(tx), w.chance(0.4)
    conditions = (
        f"{tx} < {w.choice((32, 40, 64))}", f"s > {tx}", f"{tx} >= s * 32", f"{x.at('s', tx)} > 0",
        f"{x.at('s', tx)} > s", f"{x.at('s', '0')} > 0", f"{word} > {w.value()}",
    )  # fmt: skip

    def body() -> None:
        places = w.choice(((0,), (1,), (2,), (2,), (0, 1), (1, 2)))
        lines = (
            f"{word} = {word} + {x.at('s', tx)} + s",
            f"{out.at('s', tx)} = {other if is_exchange else word}",
        )
        for place in range(3):
            if place in places:
                jump(w, "s", *conditions)
            w.add(*lines[place : place + 1])

    w.add(f"{word} = {tx} % 4")
    w.nest(f"for s in T.serial({steps}):", body)
    if not is_exchange or w.chance(0.5):
        last = w.result((w.threads,), "int32")
        w.add(f"{last.at(tx)} = {other}")


def leave_by_elements(w: Writer, tile: Buffer) -> None:
    """Add elements of each row in a serial loop that the threads of a parallel loop leave."""
    rows, steps = tile.shape[0], w.choice((2, 4, 8))
    out, element = w.result((rows,), tile.dtype), tile.at("i", "s")
    total = w.choice((out, w.shared((rows,), tile.dtype), w.fragment((rows,), tile.dtype)))
    conditions = (
        f"{element} > {w.value()}", f"{element} > 0", "s > i", f"i < {rows // 2}", "i % 2 == 0",
        f"{tile.at('0', '0')} > 0",
    )  # fmt: skip

    def loop() -> None:
        if w.chance(0.5):
            jump(w, "s", *conditions)
        w.add(f"{total.at('i')} = {total.at('i')} + {element}")
        if w.chance(0.5):
            jump(w, "s", *conditions)

    def rows_loop() -> None:
        head = f"for i in T.Parallel({rows}):"
        w.nest(head, lambda: w.nest(f"for s in T.serial({steps}):", loop))

    def loops() -> None:
        maybe_jump(w, "p")
        rows_loop()
        maybe_jump(w, "p")

    w.parallel((rows,), f"{total.at('i')} = {w.choice((0, 1))}")
    if w.chance(0.4):
        w.nest("for p in T.serial(3):", loops)
    else:
        rows_loop()
    if total is not out:
        w.parallel((rows,), f"{out.at('i')} = {total.at('i')}")


def words(w: Writer) -> None:
    """Exchange words among threads."""
    tx, n = w.thread(), w.shared((w.threads,), "int32")
    out, shift = w.result((w.threads,), "int32"), w.rng.randrange(1, w.threads)
    w.add(f"{n.at(tx)} = {tx} * 3", f"{out.at(tx)} = {n.at(f'({tx} + {shift}) % {w.threads}')}")


def reduce(w: Writer, tile: Buffer) -> None:
    """Reduce rows or columns of a tile, and store the result or use it."""
    dtype = w.choice(("float32", tile.dtype)) if tile.dtype in FLOATS else "float32"
    dim = w.choice((1, 1, 0))
    f, r = w.fragment(tile.shape, dtype), w.fragment((tile.shape[1 - dim],), dtype)
    function = w.choice(("reduce_sum", "reduce_max", "reduce_absmax"))
    w.add(f"T.copy({tile.name}, {f.name})", f"T.{function}({f.name}, {r.name}, dim={dim})")
    if w.chance(0.5):
        out = w.result(r.shape, dtype)
        w.add(f"T.copy({r.name}, {out.whole()})")
    else:
        out, x = w.result(tile.shape, dtype), f.at("i", "j")
        w.parallel(tile.shape, f"{x} = {x} + {r.at('i' if dim else 'j')}")
        w.add(f"T.copy({f.name}, {out.whole()})")


def schedule(w: Writer, loads: int) -> str:
    """Return the arguments of ``T.Pipelined`` for a body of so many loads and one use of them."""
    stages = w.choice((0, 1, 2, 2, 3))
    if stages < 2 or w.chance(0.7):
        return f"num_stages={stages}"
    explicit = f"order={list(range(loads + 1))}, stage={[0] * loads + [stages - 1]}"
    return w.choice((explicit, f"num_stages={stages}, {explicit}"))


def pipeline(w: Writer) -> None:
    """Add the tiles of a pipelined loop, maybe in a serial loop."""
    steps, outer = w.choice((2, 3)), w.choice((0, 0, 2))
    dtype = "int32" if w.dtype in ("int8", "int32") else w.choice(("float32", w.dtype))
    g, t, f = w.tensor("G", (max(outer, 1), steps, *w.shape)), w.shared(), w.fragment(None, dtype)
    rows, columns = w.shape
    tile = g.at("p" if outer else "0", "k", f"0:{rows}", f"0:{columns}")
    out = w.result(w.shape, dtype)

    def loop() -> None:
        w.add(f"T.copy({tile}, {t.name})")
        w.parallel(w.shape, f"{f.at('i', 'j')} += {cast(t.at('i', 'j'), t.dtype, dtype)}")

    def loops() -> None:
        if outer:
            maybe_jump(w, "p")
        w.nest(f"for k in T.Pipelined({steps}, {schedule(w, 1)}):", loop)
        if outer:
            maybe_jump(w, "p")

    w.add(f"T.clear({f.name})")
    if outer:
        w.nest(f"for p in T.serial({outer}):", loops)
    else:
        loops()
    w.add(f"T.copy({f.name}, {out.whole()})")


def product(w: Writer) -> None:
    """Multiply tiles of a pipelined loop, and store the product by columns or through a tile."""
    dtype, m, n, k = w.choice(("float16", "bfloat16")), w.threads // 2, w.choice((32, 64)), 32
    steps = 2
    x, y = w.tensor("X", (steps, m, k), dtype), w.tensor("X", (steps, n, k), dtype)
    a, b, c = w.shared((m, k), dtype), w.shared((n, k), dtype), w.fragment((m, n), "float32")

    def loop() -> None:
        w.add(
            f"T.copy({x.at('k', f'0:{m}', f'0:{k}')}, {a.name})",
            f"T.copy({y.at('k', f'0:{n}', f'0:{k}')}, {b.name})",
            f"T.gemm({a.name}, {b.name}, {c.name}, transpose_B=True)",
        )

    w.add(f"T.clear({c.name})")
    w.nest(f"for k in T.Pipelined({steps}, {schedule(w, 2)}):", loop)
    out, kind = w.result((m, n), "float32"), w.choice(("copy", "tile", "parts", "elements"))
    if kind == "copy":
        w.add(f"T.copy({c.name}, {out.whole()})")
    elif kind == "elements":
        w.parallel((m, n), f"{out.at('i', 'j')} = {c.at('i', 'j')} * 2")
    elif kind == "tile":
        tile = w.shared((m, n), "float32")
        w.add(f"T.copy({c.name}, {tile.name})", f"T.copy({tile.name}, {out.whole()})")
    else:
        tile, half = w.shared((m, n // 2), "float32"), n // 2
        for first in (0, half):
            w.add(
                f"T.copy({c.box((0, m), (first, half))}, {tile.name})",
                f"T.copy({tile.name}, {out.box((0, m), (first, half))})",
            )


def stream(w: Writer) -> None:
    """Send tiles to the next rank in a loop; add or multiply the neighbor's in pipelined loops."""
    multiplies = w.dtype in ("float16", "bfloat16") and w.chance(0.5)
    shape = (w.threads // 2, 32) if multiplies else w.shape
    steps, outer, dtype = w.choice((2, 3, 4)), w.choice((0, 0, 2)), w.dtype
    source, box = w.tensor("X", (steps, *shape)), w.mailbox(steps, *shape, dtype=dtype)
    sent, tile = w.shared(shape), w.shared(shape)
    sums = "float32" if dtype in FLOATS else "int32"
    total = w.fragment((shape[0], shape[0]) if multiplies else shape, sums)
    own, whole = box("me"), (f"0:{shape[0]}", f"0:{shape[1]}")
    second = w.tensor("G", (steps, *shape)) if w.chance(0.4) else None
    other = tile if second is None else w.shared(shape)

    def send() -> None:
        target = box(f"(me + 1) % {w.ranks}").at("k", *whole)
        w.add(f"T.copy({source.at('k', *whole)}, {sent.name})")
        w.add(f"T.copy({sent.name}, {target})")

    def use() -> None:
        w.add(f"T.copy({own.at(w.choice(('k', f'{steps - 1} - k')), *whole)}, {tile.name})")
        if second is not None:
            w.add(f"T.copy({second.at('k', *whole)}, {other.name})")
        if multiplies:
            w.add(f"T.gemm({tile.name}, {other.name}, {total.name}, transpose_B=True)")
        else:
            products = (
                f"{cast(tile.at('i', 'j'), dtype, sums)} * {cast(other.at('i', 'j'), dtype, sums)}"
            )
            w.parallel(shape, f"{total.at('i', 'j')} += {products}")

    def loops() -> None:
        w.nest(f"for k in T.Pipelined({steps}, num_stages={w.choice((0, 1, 2, 3))}):", use)

    is_early = w.chance(0.5)
    if is_early:
        w.add(f"T.clear({total.name})")
    kind = w.choice(("T.serial({})", "T.serial({})", "T.Pipelined({}, num_stages=2)"))
    w.nest(f"for k in {kind.format(steps)}:", send)
    if w.chance(0.3):
        change(w, defined(w))
    if not is_early:
        w.add(f"T.clear({total.name})")
    if outer:
        w.nest(f"for p in T.serial({outer}):", loops)
    elif w.chance(0.2):
        w.nest(f"if {w.condition()}:", loops)
    else:
        loops()
    w.add(f"T.copy({total.name}, {w.result(total.shape, sums).whole()})")


def tail(w: Writer) -> None:
    """Load and store rows of a tensor that ends within the last tile."""
    rows, columns = w.shape
    height = rows - w.choice((1, 2, rows // 2))
    x, out = w.tensor("X", (height, columns)), w.result((height, columns), w.dtype)
    tile = w.shared()
    whole = (f"0:{rows}", f"0:{columns}")
    kind = w.choice(("copy", "guard", "cleared"))
    if kind == "copy":
        w.add(f"T.copy({x.at(*whole)}, {tile.name})")
    elif kind == "guard":
        zero = f'T.cast(0, "{w.dtype}")'
        value = f"T.if_then_else(i < {height}, {x.at('i', 'j')}, {zero})"
        w.parallel(w.shape, f"{tile.at('i', 'j')} = {value}")
    else:
        w.add(f"T.clear({tile.name})")
        write = f"    {tile.at('i', 'j')} = {x.at('i', 'j')}"
        w.parallel(w.shape, f"if i < {height}:", write)
    if w.chance(0.3):
        change(w, tile)
    if w.chance(0.5):
        w.add(f"T.copy({tile.name}, {out.at(*whole)})")
    else:
        write = f"    {out.at('i', 'j')} = {tile.at('i', 'j')}"
        w.parallel(w.shape, f"if i < {height}:", write)
    w.tiles.append(tile)


def hand_over(w: Writer) -> None:
    """Let threads load tiles in stages, which other threads store. Phases are computed from the
    iteration or counted in a register, and either branch comes first."""
    producers, consumers = w.choice(((128, 128), (64, 128), (128, 256)))
    w.threads, tx = producers + consumers, w.thread()
    stages, steps = w.choice((1, 2, 3)), w.choice((3, 5, 8))
    x, out = w.tensor("X", (steps, *w.shape)), w.result((steps, *w.shape), w.dtype)
    tile, (rows, columns) = w.shared((stages, *w.shape)), w.shape
    whole, stage = (f"0:{rows}", f"0:{columns}"), f"k % {stages}"
    source, target, part = (b.at(n, *whole) for b, n in ((x, "k"), (out, "k"), (tile, stage)))
    load, counts, mirrors = w.choice(("tma", "cp.async", "elements")), w.chance(0.4), w.chance(0.5)

    def loop(name: str, first: int, statements: Callable[[], None]) -> None:
        parity = f"k // {stages} % 2" + " ^ 1" * first

        def body() -> None:
            w.add(f"T.barrier_wait({name}[{stage}], {f'{name}_phase' if counts else parity})")
            statements()
            if counts:
                w.add(f"if {stage} == {stages - 1}:", f"    {name}_phase = {name}_phase ^ 1")

        if counts:
            w.add(f'{name}_phase = T.alloc_var("int32", init={first})')
        w.nest(f"for k in T.serial({steps}):", body)

    def produce() -> None:
        if load == "tma":
            w.add(f"T.tma_copy({source}, {part}, barrier=ready[{stage}])")
        elif load == "cp.async":
            w.add(f"T.async_copy({source}, {part})", f"T.cp_async_barrier_noinc(ready[{stage}])")
        else:
            w.parallel(w.shape, f"{tile.at(stage, 'i', 'j')} = {x.at('k', 'i', 'j')}")
        if load != "cp.async":
            w.add(f"T.barrier_arrive(ready[{stage}])")

    def store_from(buffer: Buffer, number: str) -> None:
        if mirrors:
            element = buffer.at(number, f"{rows - 1} - i", "j")
            w.parallel(w.shape, f"{out.at('k', 'i', 'j')} = {element}")
        else:
            w.add(f"T.copy({buffer.at(number, *whole)}, {target})")

    def consume() -> None:
        store_from(tile, stage)
        w.add(f"T.barrier_arrive(free[{stage}])")

    first = w.chance(0.5)
    border, own = (producers, "<") if first else (consumers, ">=")
    branches = [
        (f"if {tx} {own} {border}:", lambda: loop("free", 1, produce)),
        (f"if {tx} {'>=' if first else '<'} {border}:", lambda: loop("ready", 0, consume)),
    ]
    if w.chance(0.5):
        branches.reverse()
    outer, w.lines = w.lines, []
    w.nest(f"for k in T.serial({steps}):", lambda: store_from(x, "k"))
    plain, w.lines = w.lines, outer
    w.add(
        f"ready = T.alloc_barrier([{producers}] * {stages})",
        f"free = T.alloc_barrier([{consumers}] * {stages})",
    )
    w.nest(*branches[0])
    w.nest(*(branches[1] if w.chance(0.5) else ("else:", branches[1][1])))
    w.plain = len(w.lines), plain
