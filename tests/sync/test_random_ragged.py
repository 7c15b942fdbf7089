"""Random programs that exchange rows of ragged tensors. The compiler infers their synchronization,
and the simulator compares them with NumPy, each launch with another routing.

In a mutant of each program, an inserted signal or wait is wrong. The simulator must find the fault.
``TILEWEAVE_PROGRAMS=1000`` tests 1,000 programs instead of a few.
"""

import os
import random
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tileweave as tw
from tests.corpus.programs.case import integers
from tests.corpus.programs.ragged import route
from tests.modules import load_module
from tileweave.passes import with_options
from tileweave.passes.ir.releases import upgrade_ir
from tileweave.simulator import Executable
from tileweave.simulator.mutation.kernels import Kernels, TileKernel

PROGRAMS = int(os.environ.get("TILEWEAVE_PROGRAMS", 40))
FEW = 7, 8, 21
"""Seeds of ``make test``: rows that return, rows in own memory, and bulk stores."""
LAUNCHES = 3
HEAD = """\
import tilelang.language as T
from tileweave import language as W

DTYPE, I32 = "{dtype}", "int32"


@T.prim_func
def program(
    launch: T.int32, X: T.Tensor(({messages} * {run}, {N}), DTYPE),
    dst: T.Tensor(({launches}, {messages}), I32), part: T.Tensor(({launches}, {messages}), I32),
    slot: T.Tensor(({launches}, {messages}), I32),
    counts: T.Tensor(({launches}, {ranks}, {parts}), I32),
    Y: T.Tensor(({launches}, {parts}, {ranks}, {capacity}, {N}), DTYPE),
):
    with T.Kernel({blocks}, threads={threads}) as block:
        me = W.rank()
"""


AMOUNTS = {"signal drop", "signal value+1"}
ORDERS = {"signal sem=relaxed", "wait_reached drop", "wait_reached sem=relaxed",
          "wait_reached read before"}  # fmt: skip
"""Mutations that are faults: those of amounts always, those of orders unless other synchronization
orders the accesses."""
MAX_SCHEDULES = 10
"""Limit of schedules until a mutant has a fault or a wrong result."""


class Shape(NamedTuple):
    """Extents of a program, and what it does.

    Attributes:
        ranks: number of ranks.
        parts: number of segments for each source; they have ``axes`` axes.
        messages: messages of each rank, of ``run`` rows each.
        capacity: rows of a segment, a multiple of ``run``.
        height: rows of a tile that is read at once.
        N: elements of a row.
        writers, readers, blocks: numbers of blocks that send and receive, and of all blocks. Some
            may do both.
        threads: threads of a block.
        own: whether rows stay in the memory of their rank, where all ranks read them.
        back: whether receivers return the doubled rows.
        early, returns_early: whether rows are announced before they are stored.
    """

    ranks: int
    parts: int
    axes: int
    messages: int
    run: int
    capacity: int
    height: int
    N: int
    dtype: str
    writers: int
    readers: int
    blocks: int
    threads: int
    own: bool
    back: bool
    early: bool
    returns_early: bool

    @staticmethod
    def random(rng: random.Random) -> "Shape":
        ranks, run = rng.randrange(1, 5), rng.choice([1, 1, 2])
        axes = rng.randrange(3)
        parts = [1, rng.randrange(1, 4), 2 * rng.randrange(1, 3)][axes]
        writers, readers = rng.randrange(1, 4), rng.randrange(1, 4)
        blocks = rng.choice([max(writers, readers), writers + readers, writers + readers + 1])
        own, capacity = rng.random() < 0.2, run * rng.randrange(1, 5)
        return Shape(
            ranks, parts, axes, rng.randrange(1, 9), run, capacity,
            rng.randrange(1, capacity + 1), rng.choice([8, 16]),
            rng.choice(["float32", "float16"]), writers, readers, blocks,
            rng.choice([32, 64, 128]), own, not own and rng.random() < 0.4,
            rng.random() < 0.6, rng.random() < 0.7,
        )  # fmt: skip

    def segment(self, part: str) -> str:
        """Return the indices of a segment, given its number."""
        return ["", f"{part}, ", f"{part} // 2, {part} % 2, "][self.axes]

    @property
    def segments(self) -> str:
        return ["()", str(self.parts), f"({self.parts // 2}, 2)"][self.axes]


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def under(head: str, lines: list[str]) -> list[str]:
    return [head, *indented(lines)]


def loop(rng: random.Random, name: str, extent: Any) -> tuple[str, str]:
    """Return a loop and the number of its iteration, forwards or backwards."""
    kind = rng.choice(["serial", "serial", "unroll"]) if isinstance(extent, int) else "serial"
    number = name if rng.random() < 0.7 else f"({extent} - 1 - {name})"
    return f"for {name} in T.{kind}({extent}):", number


# Announcements


def announcements(rng: random.Random, shape: Shape, first: int) -> list[str]:
    """Announce all segments of a rank: by one block, or by the writers in turn."""
    peers, peer = loop(rng, "peer", shape.ranks)
    parts, part = loop(rng, "p", shape.parts)
    if shape.own:
        peers, peer = "for peer in T.serial(1):", "me"
    segment = f"there[{peer}, {shape.segment(part)}me, 0, 0]"
    lines = [f"W.announce({segment}, counts[launch, {peer}, {part}])"]
    index = rng.choice(["", "peer", "p"])
    if index and shape.writers > 1:
        lines = under(f"if {index} % {shape.writers} == block - {first}:", lines)
        index = ""
    else:
        index = f"if block == {rng.randrange(first, first + shape.writers)}:"
    lines = (
        under(peers, under(parts, lines))
        if rng.random() < 0.5
        else (under(parts, under(peers, lines)))
    )
    return under(index, lines) if index else lines


# Stores of ``run`` rows from ``source`` (tensor, row) to ``target`` (tensor with its indices, row)


def by_tile(rng: random.Random, shape: Shape, source: str, target: str) -> list[str]:
    return [f"T.copy({source.format(i='0', j='0')}, row)",
            f"T.copy(row, {target.format(i='0', j='0')})"]  # fmt: skip


def by_threads(rng: random.Random, shape: Shape, source: str, target: str) -> list[str]:
    store = f"{target.format(i='i', j='j')} = {source.format(i='i', j='j')}"
    return [f"for i, j in T.Parallel({shape.run}, {shape.N}):", f"    {store}"]


def by_rows(rng: random.Random, shape: Shape, source: str, target: str) -> list[str]:
    i = "i" if rng.random() < 0.5 else f"{shape.run - 1} - i"
    store = f"{target.format(i=i, j='j')} = {source.format(i=i, j='j')}"
    return [f"for i in T.serial({shape.run}):", f"    for j in T.Parallel({shape.N}):",
            f"        {store}"]  # fmt: skip


def by_halves(rng: random.Random, shape: Shape, source: str, target: str) -> list[str]:
    half = shape.N // 2
    parts, part = loop(rng, "h", 2)
    column = f"{part} * {half} + j"
    store = f"{target.format(i='i', j=column)} = {source.format(i='i', j=column)}"
    return under(parts, [f"for i, j in T.Parallel({shape.run}, {half}):", f"    {store}"])


def by_bulk(rng: random.Random, shape: Shape, source: str, target: str) -> list[str]:
    return [
        f"T.copy({source.format(i='0', j='0')}, row)",
        f"W.bulk_store({target.format(i='0', j='0')}, row, {shape.run * shape.N})",
        "W.bulk_commit()",
        "W.bulk_wait(0, read=True)",
    ]


def by_put(rng: random.Random, shape: Shape, source: str, target: str) -> list[str]:
    source, target = (x.format(i="0", j="0") for x in (source, target))
    return [f"W.put_block({source}, {target}, {shape.run * shape.N})"]


STORES = (by_tile, by_threads, by_rows, by_halves, by_bulk, by_put)


def sending(rng: random.Random, shape: Shape, first: int) -> list[str]:
    """Send the messages of a rank: each writer every ``writers``-th one."""
    steps, step = loop(rng, "step", -(-shape.messages // shape.writers))
    t = f"({step} * {shape.writers} + block - {first})"
    owner = "me" if shape.own else f"dst[launch, {t}]"
    target = (
        f"there[{owner}, {shape.segment(f'part[launch, {t}]')}me, "
        f"slot[launch, {t}] * {shape.run} + {{i}}, {{j}}]"
    )
    source = f"X[{t} * {shape.run} + {{i}}, {{j}}]"
    store = rng.choice(STORES)(rng, shape, source, target)
    guards = [f"{t} < {shape.messages}"] if shape.messages % shape.writers else []
    lines = under(f"if dst[launch, {t}] >= 0:", store)
    for guard in guards:
        lines = under(f"if {guard}:", lines)
    return under(steps, lines)


# Readers of ``n`` announced rows of a segment, or of the rows or tiles that satisfy ``own``


def row_by_row(rng: random.Random, shape: Shape, source: str, result: str, own: str) -> list[str]:
    rows = rng.choice(["T.serial(n)", "T.Pipelined(n, num_stages=2)"]) if not own else "T.serial(n)"
    copy = [f"T.copy({source.format(i='i', j='0')}, one)"]
    if rng.random() < 0.5 and "Pipelined" not in rows:
        copy += [f"T.copy(one, {result.format(i='i', j='0')})"]
    else:
        store = f"{result.format(i='i', j='j')} = one[0, j]"
        copy += under(f"for j in T.Parallel({shape.N}):", [store])
    return under(f"for i in {rows}:", chosen(own, "i", copy))


def by_elements(rng: random.Random, shape: Shape, source: str, result: str, own: str) -> list[str]:
    i = "i" if rng.random() < 0.7 else "(n - 1 - i)"
    load = f"{result.format(i=i, j='j')} = {source.format(i=i, j='j')}"
    loads = under(f"for j in T.Parallel({shape.N}):", [load])
    return under("for i in T.serial(n):", chosen(own, "i", loads))


def by_tiles(rng: random.Random, shape: Shape, source: str, result: str, own: str) -> list[str]:
    """Read tiles, of which the last one may have rows that were not announced."""
    tile, origin = f"tile_{rng.randrange(10**6)}", f"step * {shape.height}"
    lines = [
        f"T.copy({source.format(i=origin, j='0')}, {tile})",
        f"for i, j in T.Parallel({shape.height}, {shape.N}):",
        f"    if {origin} + i < n:",
        f"        {result.format(i=f'{origin} + i', j='j')} = {tile}[i, j]",
    ]
    tiles = f"T.ceildiv(n, {shape.height})"
    kind = rng.choice(["serial", "all", *["pipelined"] * (not own)])
    memory = "shared" if kind == "pipelined" else rng.choice(["shared", "fragment"])
    if kind == "pipelined":
        lines = under(f"for step in T.Pipelined({tiles}, num_stages=2):", lines)
    elif kind == "serial":
        lines = under(f"for step in T.serial({tiles}):", chosen(own, "step", lines))
    else:
        steps = -(-shape.capacity // shape.height)
        lines = chosen(own, "step", under(f"if {origin} < n:", lines))
        lines = under(f"for step in T.serial({steps}):", lines)
    return [f"{tile} = T.alloc_{memory}(({shape.height}, {shape.N}), DTYPE)", *lines]


def chosen(own: str, index: str, lines: list[str]) -> list[str]:
    """Put lines under the condition that this block reads a row or a tile."""
    return under(f"if {own.format(index)}:", lines) if own else lines


READS = (row_by_row, by_elements, by_tiles)


def receiving(rng: random.Random, shape: Shape) -> list[str]:
    """Receive all segments of a rank: by one block, or by the readers in turn."""
    first = shape.blocks - shape.readers
    sources, source = loop(rng, "s", shape.ranks)
    parts, part = loop(rng, "p", shape.parts)
    owner = source if shape.own else "me"
    rows = f"there[{owner}, {shape.segment(part)}{source}, {{i}}, {{j}}]"
    result = f"Y[launch, {part}, {source}, {{i}}, {{j}}]"
    lines = [f"n = W.announced({rows.format(i='0', j='0')})"]
    index = rng.choice(["s", "p", *["row"] * (not shape.back)]) if shape.readers > 1 else ""
    if shape.back:
        lines += returning(rng, shape, rows, source, part)
    else:
        own = f"{{}} % {shape.readers} == block - {first}"
        lines += rng.choice(READS)(rng, shape, rows, result, own if index == "row" else "")
    if index == "row":
        lines = under(f"if block >= {first}:", lines)
    elif index:
        lines = under(f"if {index} % {shape.readers} == block - {first}:", lines)
    nests = [(sources, parts), (parts, sources)]
    outer, inner = rng.choice(nests)
    lines = under(outer, under(inner, lines))
    return lines if index else under(f"if block == {shape.blocks - 1}:", lines)


def returning(rng: random.Random, shape: Shape, rows: str, source: str, part: str) -> list[str]:
    """Announce the rows of a segment to its source, and return them doubled."""
    target = f"back[{source}, {shape.segment(part)}me, {{i}}, {{j}}]"
    announce = [f"W.announce({target.format(i='0', j='0')}, n)"]
    copy = [
        f"T.copy({rows.format(i='i', j='0')}, one)",
        f"for j in T.Parallel({shape.N}):",
        "    doubled[0, j] = one[0, j] * 2",
        f"T.copy(doubled, {target.format(i='i', j='0')})",
    ]
    copies = under("for i in T.serial(n):", copy)
    return announce + copies if shape.returns_early else copies + announce


def collecting(rng: random.Random, shape: Shape) -> list[str]:
    """Read what peers return: the rows of each segment."""
    peers, peer = loop(rng, "peer", shape.ranks)
    parts, part = loop(rng, "p", shape.parts)
    rows = f"back[me, {shape.segment(part)}{peer}, {{i}}, {{j}}]"
    result = f"Y[launch, {part}, {peer}, {{i}}, {{j}}]"
    lines = [f"n = W.announced({rows.format(i='0', j='0')})"]
    lines += rng.choice(READS)(rng, shape, rows, result, "")
    block = rng.randrange(shape.blocks)
    return under(f"if block == {block}:", under(peers, under(parts, lines)))


def random_program(rng: random.Random) -> tuple[str, Shape]:
    """Return the text of a program, and its extents."""
    shape = Shape.random(rng)
    first = rng.randrange(shape.blocks - shape.writers + 1) if rng.random() < 0.3 else 0
    allocations = ["there", *["back"] * shape.back]
    lines = [
        f"{name} = W.alloc_ragged({shape.segments}, rows={shape.capacity}, row={shape.N}, "
        "dtype=DTYPE)"
        for name in allocations
    ]
    lines += [
        f"row = T.alloc_shared(({shape.run}, {shape.N}), DTYPE)",
        f"one = T.alloc_shared((1, {shape.N}), DTYPE)",
        f"doubled = T.alloc_shared((1, {shape.N}), DTYPE)",
    ]
    steps = [
        announcements(rng, shape, first),
        under(f"if block >= {first} and block < {first + shape.writers}:",
              sending(rng, shape, first)),
    ]  # fmt: skip
    if not shape.early:
        steps.reverse()
    steps.append(receiving(rng, shape))
    if shape.back:
        steps.append(collecting(rng, shape))
    for step in steps:
        lines += step
    head = HEAD.format(**shape._asdict(), launches=LAUNCHES)
    return head + "\n".join(indented(indented(lines))) + "\n", shape


def random_options(rng: random.Random, shape: Shape) -> dict[str, Any]:
    """Return options of the compiler: the kind of reuse, and the rows of a tile."""
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["tileweave.reuse"] = rng.choice(["credit", "barrier", "double_buffer"])
    if rng.random() < 0.3:
        options["tileweave.resident_blocks"] = 64
    if rng.random() < 0.4:
        rows = lcm(shape.run, shape.height)
        rows *= rng.randrange(1, 1 + max(1, shape.capacity // rows))
        options["tileweave.granule"] = {"there": (1,) * (shape.axes + 1) + (rows, shape.N)}
    return options


def routed(rng: np.random.Generator, shape: Shape) -> list[dict[str, Any]]:
    """Return inputs of each rank, with a routing for each launch."""
    ranks, run, result = shape.ranks, shape.run, (shape.parts, shape.ranks, shape.capacity, shape.N)
    inputs = []
    for rank in range(ranks):
        routings = [
            route(
                rng, 1 if shape.own else ranks, shape.parts, shape.messages, shape.capacity // run
            )
            for _ in range(LAUNCHES)
        ]
        dst, part, slot, counts = map(np.stack, zip(*routings, strict=True))
        if shape.own:
            dst[dst == 0] = rank
            counts = counts * (np.arange(ranks) == rank)[:, None]
        inputs.append({
            "launch": lambda epoch: epoch,
            "X": integers(rng, shape.messages * run, shape.N).astype(shape.dtype),
            "dst": dst, "part": part, "slot": slot, "counts": np.int32(run * counts),
            "Y": np.zeros((LAUNCHES, *result), shape.dtype),
        })  # fmt: skip
    return inputs


def all_to_the_next(inputs: list[dict[str, Any]], shape: Shape) -> list[dict[str, Any]]:
    """Return the inputs with another routing, in which each rank sends to one segment of the next
    rank, or of its own."""
    count = min(shape.messages, shape.capacity // shape.run)
    routed = []
    for rank, i in enumerate(inputs):
        to = rank if shape.own else (rank + 1) % shape.ranks
        is_sent = np.arange(shape.messages) < count
        counts = np.zeros_like(i["counts"])
        counts[:, to, 0] = count * shape.run
        routed.append({
            **i,
            "dst": np.where(is_sent, to, np.full_like(i["dst"], -1)),
            "part": np.zeros_like(i["part"]),
            "slot": np.where(is_sent, np.arange(shape.messages, dtype=np.int32), i["slot"] * 0),
            "counts": counts,
        })  # fmt: skip
    return routed


def expected(inputs: list[dict[str, Any]], shape: Shape) -> list[np.ndarray]:
    """Return ``Y`` of each rank."""
    sent = np.zeros((shape.ranks, shape.ranks, *inputs[0]["Y"].shape), np.float32)
    sent = sent[:, :, :, :, 0]  # source, destination, launch, part, row, element
    for source, i in enumerate(inputs):
        rows = i["X"].reshape(shape.messages, shape.run, shape.N)
        for launch, t in np.argwhere(i["dst"] >= 0):
            segment = sent[source, i["dst"][launch, t], launch, i["part"][launch, t]]
            segment.reshape(-1, *rows.shape[1:])[i["slot"][launch, t]] = rows[t]
    if shape.own:
        own = np.stack([sent[rank, rank] for rank in range(shape.ranks)], axis=2)
        return [own] * shape.ranks
    if shape.back:
        return [2 * np.moveaxis(sent[rank], 0, 2) for rank in range(shape.ranks)]
    return [np.moveaxis(sent[:, rank], 0, 2) for rank in range(shape.ranks)]


def check(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    func, shape, text = made(rng, folder / f"program_{seed}.py")
    program = Executable(func, shape.ranks)
    inputs = routed(np.random.default_rng(seed), shape)
    assert is_right(program, shape, inputs, seed), (seed, text)
    inputs = all_to_the_next(inputs, shape)
    assert is_right(program, shape, inputs, seed), (seed, text)
    name, mutant = random_mutant(rng, func, program.plan, shape)
    assert any(is_killed(mutant, shape, inputs, s) for s in range(MAX_SCHEDULES)), (name, text)


def made(rng: random.Random, file: Path) -> tuple[Any, Shape, str]:
    """Return a random program, its extents and its text."""
    text, shape = random_program(rng)
    file.write_text(text)
    configs = random_options(rng, shape)
    return with_options(load_module(file).program, configs), shape, f"{text}\n{configs}"


def is_right(program: Any, shape: Shape, inputs: list[dict[str, Any]], seed: int) -> bool:
    """Return whether the results of a schedule are those of NumPy."""
    outputs = tw.simulate(
        program, shape.ranks, inputs, seed=seed, epochs=LAUNCHES, resident_blocks=64
    )
    return all(
        np.array_equal(own["Y"], right)
        for own, right in zip(outputs, expected(inputs, shape), strict=True)
    )


def is_killed(mutant: Any, shape: Shape, inputs: list[dict[str, Any]], seed: int) -> bool:
    """Return whether a schedule of a mutant has a fault or a wrong result."""
    try:
        return not is_right(mutant, shape, inputs, seed)
    except tw.SimulationError:
        return True


def random_mutant(rng: random.Random, func: Any, plan: Any, shape: Shape) -> tuple[str, Executable]:
    """Return a program with one change of an inserted signal or wait, and its name.

    Blocks of one rank may be ordered otherwise, and so are rows that precede their announcement.
    """
    kernels = Kernels(shape.ranks, TileKernel)
    kernels.of(upgrade_ir(func))
    orders = ["there_announced_posted", "back_announced_posted"]
    orders += ["there_arrived"] * shape.early + ["back_arrived"] * shape.returns_early
    changes = {
        name: AMOUNTS | ORDERS if shape.ranks > 1 and name in orders else AMOUNTS
        for name in ("there_announced_posted", "back_announced_posted", "there_arrived",
                     "back_arrived")
    }  # fmt: skip
    mutants = [
        (f"{op.name} {change} of {flag}, line {op.line}", mutated)
        for op, flag, change, *_, mutated in kernels.changes(plan)
        if f"{op.name} {change}" in changes.get(flag, ())
    ]
    name, mutated = rng.choice(mutants)
    return name, mutated()


@pytest.mark.parametrize("seed", FEW)
def test_few_programs(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.long
def test_random_programs(tmp_path):
    for seed in range(PROGRAMS):
        check(seed, tmp_path)
