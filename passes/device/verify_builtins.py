"""Verify that no builtin of a program is lost, and that each runs in its intended threads."""

from __future__ import annotations

import numpy as np
import tilelang
from tvm import IRModule, tirx

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.memory_order import releases, writes
from ..ir.thread_sets import Block, ThreadSet, follow_threads
from ..ir.walk import calls_in
from ..tile.number_builtins import Mark, NumberedCall, calls_of, mark_of, with_calls, without_mark


class _Runs:
    """Threads in which one builtin of the tile program runs on the device.

    Attributes:
        threads: the program's threads that run it; all if any does, where others may do so.
        strangers: whether threads run it that are none of the program's.
        twice: whether two threads of the block run it as the same thread of the program.
        is_exact: whether each of ``threads`` runs it when one does.
        must_cover: whether every thread that reaches it at tile level has to run it.
        writes: whether it changes memory.
    """

    def __init__(self, shape: tuple[int, ...], call: tirx.Call) -> None:
        self.threads = np.zeros(shape, bool)
        self.strangers = self.twice = False
        self.is_exact = True
        self.writes = writes(call)
        spec = builtin_of(call)
        self.must_cover = self.writes or releases(call) or spec.level != "thread"
        self._places = np.full(shape, -1)

    def add(self, here: ThreadSet, mark: Mark, block: Block) -> None:
        """Record that the threads ``here`` of ``block`` run the call with ``mark``."""
        if not self.must_cover:
            self.threads |= here.size > 0
            return
        index = block.value(mark.thread).values
        if index is None or not here.is_exact:
            self.is_exact = False
        if index is None:
            self.threads |= here.size > 0
            return
        place, y, z = np.nonzero(here.members)
        x = np.broadcast_to(index, here.members.shape)[here.members]
        own = (x >= 0) & (x < self.threads.shape[0])
        self.strangers |= not own.all()
        place, x, y, z = place[own], x[own], y[own], z[own]
        before = self._places[x, y, z]
        self._places[x, y, z] = place
        self.threads[x, y, z] = True
        moved = (before >= 0) & (before != place)
        self.twice |= bool(moved.any()) or bool((self._places[x, y, z] != place).any())


def verify_builtins(lowered: IRModule, calls: dict[int, NumberedCall], tile: IRModule) -> IRModule:
    """Return ``lowered`` without the marks of ``number_builtins`` if every builtin is in its place.

    A builtin of the tile program must occur in a device function under a condition that some thread
    of the block meets. One that writes runs in the threads of the program that reach it at tile
    level: one leader, one warp, those of a condition, or all. A wait may run in fewer, since it
    moves to the producer. What TileLang itself proves dead at tile level may vanish.

    Args:
        lowered: after the device passes.
        calls: the builtins of ``tile``, by number.
        tile: what TileLang was given.

    Raises:
        LanguageError: a builtin is lost, or runs in other threads.
    """
    runs: dict[int, _Runs] = {}
    functions = {}
    for name, func in lowered.functions.items():
        if isinstance(func, tirx.PrimFunc):
            body = follow_threads(func.body, lambda *place: _record(*place, calls, runs))
            func = func.with_body(body)
        functions[name] = func
    lost = [
        number
        for number, call in calls.items()
        if call.threads.size and (number not in runs or not runs[number].threads.any())
    ]
    alive = _alive(tile) if lost else set()
    for number in lost:
        if number in alive:
            raise _error(calls[number], "no thread runs it")
    for number, run in runs.items():
        if number not in lost:
            _require_threads(calls[number], run)
    return IRModule(functions, attrs=lowered.attrs)


def _record(
    stmt: tirx.Stmt,
    here: ThreadSet,
    block: Block | None,
    calls: dict[int, NumberedCall],
    runs: dict[int, _Runs],
) -> tirx.Stmt:
    """Record the threads of the builtins that ``stmt`` itself calls; return it without their
    marks."""
    marks = [(call, mark) for call in calls_of(stmt) if (mark := mark_of(call)) is not None]
    for call, mark in marks:
        shape = calls[mark.number].threads.members.shape
        run = runs.setdefault(mark.number, _Runs(shape, call))
        if block is not None:
            run.add(here, mark, block)
    return with_calls(stmt, without_mark) if marks else stmt


def _alive(tile: IRModule) -> set[int]:
    """Return the numbers of the builtins that TileLang's own simplification leaves in ``tile``."""
    simplified = tilelang.transform.Simplify()(tile)
    marks = [
        mark_of(call)
        for func in simplified.functions.values()
        for call in calls_in(func.body, lambda c: mark_of(c) is not None)
    ]
    return {mark.number for mark in marks if mark is not None}


def _require_threads(call: NumberedCall, run: _Runs) -> None:
    """Refuse a builtin that runs in other threads than those that reach it at tile level."""
    if run.writes and run.strangers:
        raise _error(call, "threads run it that are none of the program's")
    if run.writes and run.twice:
        raise _error(call, "two threads of the block run it for one thread of the program")
    if not (run.must_cover and call.threads.is_exact):
        return
    meant = call.threads.members
    if (run.is_exact and (meant & ~run.threads).any()) or (run.threads & ~meant).any():
        raise _error(call, f"{ThreadSet(run.threads).names} of the program run it")


def _error(call: NumberedCall, what: str) -> LanguageError:
    where = f"\n --> {call.line}" if call.line else ""
    return LanguageError(
        f"{call.name}: after TileLang's lowering {what}; expected "
        f"{call.threads.names} of the program, as with tl.disable_warp_specialized{where}"
    )
