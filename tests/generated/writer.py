"""Text of a generated program: its tensors, tiles and statements."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

HEAD = """\
import tilelang.language as T
from tileweave import language as W


@T.prim_func
def program(
{parameters}
):
    with T.Kernel({grid}, threads={threads}) as {axes}:
{allocations}
        me = W.rank()
"""
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Buffer:
    """Tile or tensor; ``prefix`` is the index of the block's part of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    prefix: str = ""

    def box(self, *ranges: tuple[int, int]) -> str:
        """Return the text of a box, each axis by start and extent."""
        parts = [
            ":" if (start, extent) == (0, size) else f"{start}:{start + extent}"
            for (start, extent), size in zip(ranges, self.shape, strict=True)
        ]
        return self.at(*parts)

    def at(self, *index: str) -> str:
        return f"{self.name}[{', '.join(filter(None, (self.prefix, *index)))}]"

    def whole(self) -> str:
        return self.box(*((0, n) for n in self.shape)) if self.prefix else self.name


class Box(NamedTuple):
    """Rows and columns of a tile."""

    row: int
    height: int
    column: int
    width: int

    def of(self, buffer: Buffer) -> str:
        return buffer.box((self.row, self.height), (self.column, self.width))

    def index(self) -> tuple[str, str]:
        """Return the indices of element ``i, j`` of the box."""
        row = f"i + {self.row}" if self.row else "i"
        return row, f"j + {self.column}" if self.column else "j"


class Writer:
    """Writes one program.

    Attributes:
        tiles: shared tiles that are defined, and that no result has received yet.
        exchanged: the symmetric tensor holds the neighbor's tile.
        plain: statements without roles of threads that compute what the first lines do.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.choice = rng, rng.choice
        self.ranks = rng.choice((2, 2, 2, 3))
        self.threads = rng.choice((128, 128, 128, 192, 256, 256, 384))
        self.grid = rng.choice(((1,), (1,), (1,), (2,), (2, 1), (1, 2), (1, 2, 1)))
        self.dtype = rng.choice((*FLOATS, *FLOATS, "int8", "int32", "float8_e4m3fn"))
        self.shape = (rng.choice((16, 32, 32, 48)), rng.choice((32, 64, 64, 128)))
        self.axes = ("bx", "by", "bz")[: len(self.grid)]
        self.block = ", ".join(self.axes)
        self.tensors: dict[str, Buffer] = {}
        self.allocations: list[str] = []
        self.lines: list[str] = []
        self.plain: tuple[int, list[str]] = 0, []
        self.tiles: list[Buffer] = []
        self.count = 0
        self.needs_threads = self.exchanged = False

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def symmetric(self, owner: str) -> Buffer:
        """Return the part of the symmetric tensor that is located on rank ``owner``."""
        s = Buffer("S", self.shape, self.dtype, f"{owner}, {self.block}")
        line = f'S = W.alloc_symmetric({(*self.grid, *s.shape)}, "{s.dtype}")'
        if line not in self.allocations:
            self.allocations.append(line)
        return s

    def mailbox(self, *shape: int, dtype: str) -> Callable[[str], Buffer]:
        """Allocate another symmetric tensor. Return a function: rank -> the part of a block that is
        located on the rank."""
        self.count += 1
        name = f"R{self.count}"
        self.allocations.append(f'{name} = W.alloc_symmetric({(*self.grid, *shape)}, "{dtype}")')
        return lambda owner: Buffer(name, shape, dtype, f"{owner}, {self.block}")

    def _new(self, stem: str, shape: tuple[int, ...] | None, dtype: str) -> Buffer:
        self.count += 1
        return Buffer(f"{stem}{self.count}", shape or self.shape, dtype or self.dtype)

    def _allocated(self, tile: Buffer, function: str) -> Buffer:
        self.allocations.append(f'{tile.name} = T.{function}({tile.shape}, "{tile.dtype}")')
        return tile

    def shared(self, shape: tuple[int, ...] | None = None, dtype: str = "") -> Buffer:
        """Return a new tile, which is not defined."""
        return self._allocated(self._new("a", shape, dtype), "alloc_shared")

    def fragment(self, shape: tuple[int, ...] | None = None, dtype: str = "") -> Buffer:
        return self._allocated(self._new("f", shape, dtype), "alloc_fragment")

    def tensor(self, stem: str, shape: tuple[int, ...] | None = None, dtype: str = "") -> Buffer:
        """Return a new tensor: one part for each block."""
        buffer = self._new(stem, shape, dtype)
        buffer = Buffer(buffer.name, buffer.shape, buffer.dtype, self.block)
        self.tensors[buffer.name] = buffer
        return buffer

    def source(self, shape: tuple[int, ...] | None = None) -> Buffer:
        """Return an input of a shape, a former one if there is one."""
        former = [
            t
            for t in self.tensors.values()
            if t.name[0] == "X" and (t.shape, t.dtype) == (shape or self.shape, self.dtype)
        ]
        return self.choice(former) if former else self.tensor("X", shape)

    def others(self, tile: Buffer) -> list[Buffer]:
        """Return the other defined tiles of the same shape and type."""
        return [
            t for t in self.tiles if t != tile and (t.shape, t.dtype) == (tile.shape, tile.dtype)
        ]

    def result(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        return self.tensor("O", shape, dtype)

    def add(self, *lines: str) -> None:
        self.lines += lines

    def parallel(self, extents: tuple[int, ...], *body: str, names: str = "i, j") -> None:
        names = names if len(extents) > 1 else names.split(",")[0]
        self.add(f"for {names} in T.Parallel({', '.join(map(str, extents))}):", *indented(*body))

    def nest(self, head: str, body: Callable[[], object]) -> None:
        """Write the statements of ``body`` under ``head``."""
        outer, self.lines = self.lines, []
        body()
        self.lines = [*outer, head, *indented(*self.lines)]

    def thread(self) -> str:
        self.needs_threads = True
        return "tx"

    def count_of(self, index: str) -> str:
        """Return a number from memory."""
        self.tensors["n"] = counts = Buffer("n", (4,), "int32", self.block)
        return counts.at(index)

    def condition(self) -> str:
        """Return a condition on the rank, the block or a number from memory."""
        if self.chance(0.2):
            return f"{self.count_of('0')} > {self.choice((0, 1))}"
        return self.choice((
            "me == 0", f"me < {self.ranks - 1}", f"{self.axes[0]} == 0", f"me == {self.axes[-1]}",
            f"{self.axes[-1]} >= 1", "(me + 1) % 2 == 0",
        ))  # fmt: skip

    def value(self) -> str:
        return str(self.rng.randrange(1, 4))

    def box(self, tile: Buffer) -> Box:
        """Return a part of a tile: rows and columns at ordinary places."""
        rows, columns = tile.shape
        row = self.rng.randrange(0, rows // 2 + 1, self.choice((1, 2, 8)))
        heights = (1, 2, 8, rows // 2, rows - row, rows - row - 1)
        height = self.choice([h for h in heights if 0 < h <= rows - row])
        step = self.choice((1, 4, 8, 16))
        column = self.choice((0, 0, self.rng.randrange(0, columns // 2 + 1, step)))
        left = columns - column
        widths = (8, 16, columns // 2, left, left, left - 1)
        return Box(row, height, column, self.choice([w for w in widths if 0 < w <= left]))

    def reference(self) -> str:
        """Return the text of a program that computes the same without roles of threads."""
        count, plain = self.plain
        lines, self.lines = self.lines, plain + self.lines[count:]
        text, self.lines = self.text(), lines
        return text

    def text(self) -> str:
        self.symmetric("me")
        parameters = [
            f'    {t.name}: T.Tensor({(*self.grid, *t.shape)}, "{t.dtype}"),'
            for t in self.tensors.values()
        ]
        thread = ["tx = T.get_thread_binding()"] if self.needs_threads else []
        head = HEAD.format(
            parameters="\n".join(parameters), grid=", ".join(map(str, self.grid)),
            threads=self.threads, allocations="\n".join(indented(*indented(*self.allocations))),
            axes=self.axes[0] if len(self.axes) == 1 else f"({', '.join(self.axes)})",
        )  # fmt: skip
        return head + "\n".join(indented(*indented(*thread, *self.lines))) + "\n"


def indented(*lines: str) -> list[str]:
    return [f"    {line}" for line in lines]


def cast(text: str, source: str, target: str) -> str:
    return text if source == target else f'T.cast({text}, "{target}")'
