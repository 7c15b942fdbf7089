"""Verify that lowering keeps each builtin, and executes it and reductions in the right threads."""

from __future__ import annotations

import re

import numpy as np
import tilelang
from tvm import IRModule, tirx

from ...builtins.errors import LanguageError
from ..ir.marks import (
    Mark,
    NumberedCall,
    calls_of,
    is_required_of_each_thread,
    mark_of,
    with_calls,
    without_mark,
)
from ..ir.memory_order import writes
from ..ir.thread_sets import Block, ThreadSet, follow_threads
from ..ir.walk import calls_in, children_of, location, op_name

_REDUCTION = re.compile(r"tl::AllReduce<tl::\w+, (\d+), (\d+), (\d+)")


class _Runs:
    """Threads that execute one builtin of the tile program on the device.

    Attributes:
        threads: the program's threads that execute it. If fewer threads than at tile level may
            execute it, all of them are set as soon as one does.
        has_foreign_threads: whether threads that are not the program's execute it.
        is_duplicated: whether two threads of the block execute it as one thread of the program.
        is_exact: whether all of ``threads`` execute it if one of them does.
        must_cover: whether every thread that reaches it at tile level must execute it.
        writes: whether it changes memory.
    """

    def __init__(self, shape: tuple[int, ...], call: tirx.Call) -> None:
        self.threads = np.zeros(shape, bool)
        self.has_foreign_threads = self.is_duplicated = False
        self.is_exact = True
        self.writes = writes(call)
        self.must_cover = is_required_of_each_thread(call)
        self._device_x = np.full(shape, -1)

    def add(self, thread_set: ThreadSet, mark: Mark, block: Block) -> None:
        """Record that threads of ``block`` execute the call with ``mark``."""
        if not self.must_cover or not mark.threads:
            self.threads |= thread_set.size > 0
            self.is_exact = False
            return
        index = block.value(mark.thread).values
        if index is None or not thread_set.is_exact:
            self.is_exact = False
        if index is None:
            self.threads |= thread_set.size > 0
            return
        device_x, y, z = np.nonzero(thread_set.members)
        x = np.broadcast_to(index, thread_set.members.shape)[thread_set.members]
        in_block = (x >= 0) & (x < self.threads.shape[0])
        self.has_foreign_threads |= not in_block.all()
        device_x, x, y, z = device_x[in_block], x[in_block], y[in_block], z[in_block]
        before = self._device_x[x, y, z]
        self._device_x[x, y, z] = device_x
        self.threads[x, y, z] = True
        differs = (before >= 0) & (before != device_x)
        differs |= self._device_x[x, y, z] != device_x
        self.is_duplicated |= bool(differs.any())


def verify_threads(
    lowered: IRModule, calls: dict[int, NumberedCall], program: IRModule
) -> IRModule:
    """Verify the threads of ``lowered``; return it without the marks of ``number_builtins``.

    Some thread of the block must execute each builtin of the tile program in a device function. The
    program's threads that reach a builtin that writes at tile level must execute it: one leader,
    one warp, the threads of a condition, or all threads. Fewer threads may execute a wait, because
    it moves to the producer. Builtins in code that TileLang proves dead at tile level may vanish.

    The threads of a group exchange values of a reduction by shuffles, so all of them must execute
    it. TileLang excludes some of them in the reduction of a tile whose size does not divide evenly
    among the threads.

    Args:
        lowered: the module after the device passes.
        calls: the builtins of ``program``, by number.
        program: the module before TileLang's pipeline.

    Raises:
        LanguageError: a builtin is lost, or other threads execute it or a reduction.
    """
    runs: dict[int, _Runs] = {}
    functions = {}
    for name, func in lowered.functions.items():
        if isinstance(func, tirx.PrimFunc):
            body = follow_threads(func.body, lambda *arguments: _record(*arguments, calls, runs))
            func = func.with_body(body)
        functions[name] = func
    missing = [
        number
        for number, call in calls.items()
        if call.threads.size and (number not in runs or not runs[number].threads.any())
    ]
    alive = _alive(program) if missing else set()
    for number in missing:
        if number in alive:
            raise _error(calls[number], "no thread executes it")
    for number, run in runs.items():
        if number not in missing:
            _require_threads(calls[number], run)
    return IRModule(functions, attrs=lowered.attrs)


def _record(
    stmt: tirx.Stmt,
    threads: ThreadSet,
    block: Block | None,
    calls: dict[int, NumberedCall],
    runs: dict[int, _Runs],
) -> tirx.Stmt:
    """Record the threads of the builtins that ``stmt`` itself calls, and remove their marks. Refuse
    its reductions in other threads than those of whole groups."""
    if block is not None and not children_of(stmt) and threads.is_exact:
        _verify_reductions(stmt, threads)
    marks = [(call, mark) for call in calls_of(stmt) if (mark := mark_of(call)) is not None]
    for call, mark in marks:
        shape = calls[mark.number].threads.members.shape
        run = runs.setdefault(mark.number, _Runs(shape, call))
        if block is not None:
            run.add(threads, mark, block)
    return with_calls(stmt, without_mark) if marks else stmt


def _verify_reductions(stmt: tirx.Stmt, threads: ThreadSet) -> None:
    """Refuse a reduction if a part of the threads of a shuffle is not in ``threads``."""
    for call in calls_in(stmt, lambda c: op_name(c) == "tirx.call_extern"):
        match = _REDUCTION.match(call.args[0].value)
        if match is None:
            continue
        count, scale, first = map(int, match.groups())
        if not _has_whole_groups(threads, first, count, scale):
            raise LanguageError(
                f"T.reduce: TileLang lets {threads.size} threads reduce among {count // scale} "
                "threads each, and a part of them is missing; expected a tile whose size is a "
                f"multiple or a divisor of the number of threads{location(stmt)}"
            )


def _has_whole_groups(threads: ThreadSet, first: int, count: int, scale: int) -> bool:
    """Return whether ``threads`` has all threads or no thread of each group.

    Args:
        first: first thread of the first group.
        count: number of consecutive threads that contain ``scale`` groups.
        scale: distance of the threads of a group.
    """
    lanes = threads.members.ravel(order="F")[first:]
    lanes = np.pad(lanes, (0, -lanes.size % count)).reshape(-1, count // scale, scale)
    return bool((lanes.any(axis=1) == lanes.all(axis=1)).all())


def _alive(program: IRModule) -> set[int]:
    """Return the numbers of the builtins that remain after TileLang simplifies ``program``."""
    simplified = tilelang.transform.Simplify()(program)
    marks = [
        mark_of(call)
        for func in simplified.functions.values()
        for call in calls_in(func.body, lambda c: mark_of(c) is not None)
    ]
    return {mark.number for mark in marks if mark is not None}


def _require_threads(call: NumberedCall, run: _Runs) -> None:
    """Refuse a builtin whose set of executing threads changed during lowering."""
    if run.writes and run.has_foreign_threads:
        raise _error(call, "threads that are not the program's execute it")
    if run.writes and run.is_duplicated:
        raise _error(call, "two threads of the block execute it for one thread of the program")
    if not (run.must_cover and call.threads.is_exact):
        return
    intended = call.threads.members
    if (run.is_exact and (intended & ~run.threads).any()) or (run.threads & ~intended).any():
        raise _error(call, f"{ThreadSet(run.threads).names} of the program execute it")


def _error(call: NumberedCall, problem: str) -> LanguageError:
    location = f"\n --> {call.line}" if call.line else ""
    return LanguageError(
        f"{call.name}: after TileLang's lowering {problem}; expected "
        f"{call.threads.names} of the program, as with tl.disable_warp_specialized{location}"
    )
