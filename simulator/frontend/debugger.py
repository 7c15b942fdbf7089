"""Debugger of tile programs: a prompt before a statement, and values after the statements that
change them."""

from __future__ import annotations

import os
from bdb import BdbQuit
from collections.abc import Iterable, Sequence
from functools import partial
from pdb import Pdb
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from tvm import tirx

from ...builtins.errors import TileWeaveError
from ..machine.block import Block, Frame, Tile
from ..machine.steps import Step, sequence
from ..memory.values import equal_bits
from .debug_ops import print_line
from .statements import Statements

_CONTAINERS = tirx.SeqStmt, tirx.AttrStmt, tirx.SBlockRealize, tirx.DeclBuffer, tirx.AllocBuffer


class Debugger:
    """Show values of a run at the tile level, as ``debugger=`` of ``tw.simulate`` and
    ``tw.interpret``. The run does not change.

    Tiles are NumPy arrays, whose uninitialized elements are masked. If the values of registers
    differ between threads, their first axis is the thread. A condition is a Python expression of
    the tiles and variables of a block, and of ``rank``, ``block`` and ``launch``, its numbers. The
    default is ``rank == 0 and block == 0``.

    Args:
        watch: names of tiles and variables, each maybe with ``, CONDITION``. Their values are
            printed after each statement that changes them.
        breakpoint: ``LINE`` or ``FILE:LINE``, maybe with ``, CONDITION``. Before the statements of
            the line, ``pdb`` opens. In it, ``next`` runs one statement of the block, ``continue``
            runs up to the line, and ``quit`` raises ``bdb.BdbQuit``.

    Raises:
        TileWeaveError: a condition is no Python expression.
    """

    def __init__(self, watch: Sequence[str] = (), breakpoint: str | None = None) -> None:
        self._watched = [_Point(text) for text in watch]
        self._stop = None if breakpoint is None else _Point(breakpoint)
        self._names = {"rank", "block", "launch"}
        """Names of tiles and variables."""
        self._lines: dict[str, bool] = {}
        """Lines with statements -> whether a block has reached them."""
        self._before: WeakKeyDictionary[Block, dict[str, Any]] = WeakKeyDictionary()
        """Values of each block before its next statement."""
        self._stepping: Block | None = None
        """Block that stops before its next statement."""

    def unreached(self) -> list[str]:
        """Return why a watch or the breakpoint showed nothing, and lines that no block has
        reached."""
        points = [("watch", p) for p in self._watched]
        points += [("break", self._stop)] if self._stop is not None else []
        texts = [f"{kind} {p.text}: {self._reason(p)}" for kind, p in points if not p.hits]
        lines = [f" --> {line}" for line, is_reached in self._lines.items() if not is_reached]
        return texts + (["\n".join(["no block reached", *lines])] if lines else [])

    def _reason(self, point: _Point) -> str:
        """Return why a watch or the breakpoint showed nothing."""
        is_line = point is self._stop
        if is_line and not any(map(point.is_at, self._lines)):
            return f"no statement at this line; expected {_text_of_lines(self._lines)}"
        name = point.missing if is_line or point.what in self._names else point.what
        if name is not None and name not in self._names:
            return f"no tile or variable {name}; expected {', '.join(sorted(self._names))}"
        return f"{'not reached' if is_line else 'no change'} where {point.condition}"

    def register(self, c: Statements) -> None:
        """Observe the statements of a program."""
        c.observe = partial(self._observe, c)

    def _observe(self, c: Statements, stmt: tirx.Stmt, step: Step, loc: str) -> Step:
        line = loc.rpartition(":")[2]
        self._names.update(var.name for var in c.slots)
        if isinstance(stmt, tirx.SBlockRealize):
            self._names.update(b.name for b in stmt.block.alloc_buffers if b.data in c.tiles)
        if isinstance(stmt, _CONTAINERS) or not line.isdecimal():
            return step
        self._lines.setdefault(loc, False)
        stops = self._stop is not None and self._stop.is_at(loc)
        slots = {var.name: slot for var, slot in c.slots.items()}

        def before(frame: Frame):
            if frame.block is None or (frame.active is not None and not frame.active.any()):
                return
            self._lines[loc] = True
            is_next = frame.block is self._stepping
            if is_next or (stops and self._stop.applies(_values(frame, slots))):
                self._stepping = frame.block if _prompt(frame, _values(frame, slots), loc) else None

        def after(frame: Frame):
            if frame.block is not None and self._watched:
                self._show(frame, _values(frame, slots), loc)

        return sequence([Step(before), step, Step(after)])

    def _show(self, frame: Frame, values: dict[str, Any], loc: str) -> None:
        before = self._before.get(frame.block, {})
        after = dict(before)
        for point in self._watched:
            name, value = point.what, values.get(point.what, np.ma.masked)
            if np.ma.getmaskarray(value).all() or (name in before and _equal(value, before[name])):
                continue
            after[name] = np.ma.copy(value)
            if point.applies(values):
                print_line(frame, [f"{name} = {np.ma.asarray(value)}"], loc)
        self._before[frame.block] = after


class _Point:
    """A name or a line, and the blocks that it concerns."""

    def __init__(self, text: str) -> None:
        self.text, self.hits = text, 0
        self.missing: str | None = None
        """Name in the condition that had no value."""
        what, _, condition = text.partition(",")
        self.what = what.strip()
        self.condition = condition.strip() or "rank == 0 and block == 0"
        try:
            self._code = compile(self.condition, text, "eval")
        except SyntaxError:
            raise TileWeaveError(
                f"debugger: {text!r}; expected a name or a line, and a Python expression"
            ) from None

    def is_at(self, loc: str) -> bool:
        """Return whether a location is this line."""
        return f"/{loc}".endswith((f":{self.what}", f"/{self.what}"))

    def applies(self, values: dict[str, Any]) -> bool:
        """Return whether the condition is true. It is not before all of its names have values."""
        try:
            holds = bool(np.all(eval(self._code, {"np": np, **values})))
        except NameError as error:
            self.missing = error.name
            return False
        self.hits += holds
        return holds


class _Prompt(Pdb):
    """A prompt at one statement of a kernel."""

    steps = quits = False

    def do_next(self, arg: str) -> Any:
        """Run one statement of the block."""
        self.steps = True
        return self.do_continue(arg)

    do_n = do_step = do_s = do_next

    def set_quit(self) -> None:
        self.quits = True
        super().set_quit()


def _prompt(frame: Frame, values: dict[str, Any], loc: str) -> bool:
    """Open pdb at a line; return whether the block stops before its next statement."""
    path, _, line = loc.rpartition(":")
    prompt = _Prompt(nosigint=True)
    print(frame.block.place)
    prompt.run(compile("\n" * (int(line) - 1) + "pass", path, "exec"), {"np": np, **values})
    if prompt.quits:
        raise BdbQuit
    return prompt.steps


def _text_of_lines(locs: Iterable[str]) -> str:
    """Return ``FILE:LINE, LINE, ...`` of each file."""
    lines: dict[str, set[int]] = {}
    for path, _, line in (loc.rpartition(":") for loc in locs):
        lines.setdefault(os.path.basename(path), set()).add(int(line))
    return "; ".join(f"{file}:{', '.join(map(str, sorted(n)))}" for file, n in lines.items())


def _values(frame: Frame, slots: dict[str, int]) -> dict[str, Any]:
    """Return the tiles and variables of a block, and its numbers, by name."""
    block = frame.block
    values = {name: frame.env[slot] for name, slot in slots.items()}
    values |= {tile.name: _array(tile, frame) for tile in block.tiles.values()}
    values = {name: value for name, value in values.items() if value is not None}
    return values | {"rank": block.rank, "block": block.number, "launch": block.epoch}


def _array(tile: Tile, frame: Frame) -> np.ndarray:
    data, poison = tile.data, tile.poison
    if tile.by_thread and all(
        equal_bits(row, rows[0]) for rows in (data, poison) if rows is not None for row in rows
    ):
        data, poison = data[0], None if poison is None else poison[0]
    if tile.scope == "local.var":
        data, poison = data[..., 0], None if poison is None else poison[..., 0]
    return data if poison is None else np.ma.masked_array(data, poison)


def _equal(a: Any, b: Any) -> bool:
    return equal_bits(np.ma.getdata(a), np.ma.getdata(b)) and equal_bits(
        np.ma.getmaskarray(a), np.ma.getmaskarray(b)
    )
