"""Refuse reductions whose shuffles include threads that do not execute them."""

from __future__ import annotations

import re

import numpy as np
from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.thread_sets import Block, ThreadSet, follow_threads
from ..ir.walk import calls_in, children_of, location, op_name

_REDUCTION = re.compile(r"tl::AllReduce<tl::\w+, (\d+), (\d+), (\d+)(?:, tl::NamedBarrier<(\d+)>)?")
_WARP = 32


def verify_reductions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse reductions by a part of a group of threads, or by several rows of a block.

    The threads of a group exchange values by shuffles, so all of them must execute the reduction.
    TileLang excludes some of them in the reduction of a tile whose size does not divide evenly
    among the threads.

    Warps exchange values in shared memory, between named barriers. TileLang lets the barriers count
    the threads of the first axis. In a block of 128 x 2 threads, 256 threads meet at a barrier of
    128, so a warp may read a value before another one has written it. A reduction within warps has
    no barrier.

    Before: ``T.reduce_sum(x, total)`` with ``threads=(128, 2)``, where each thread has a part of
    ``x``
    After:  LanguageError; legal programs stay unchanged
    """

    def visit(stmt: tirx.Stmt, threads: ThreadSet, block: Block | None) -> tirx.Stmt:
        if block is None or children_of(stmt) or not threads.is_exact:
            return stmt
        for call in calls_in(stmt, lambda c: op_name(c) == "tirx.call_extern"):
            match = _REDUCTION.match(call.args[0].value)
            if match is None:
                continue
            count, scale, first, counted = (int(number or 0) for number in match.groups())
            if not _has_whole_groups(threads, first, count, scale):
                raise LanguageError(
                    f"T.reduce: TileLang lets {threads.size} threads reduce among {count // scale} "
                    "threads each, and a part of them is missing; expected a tile whose size is a "
                    f"multiple or a divisor of the number of threads{location(stmt)}"
                )
            if count // 2 >= max(_WARP, scale) and threads.size > counted > 0:
                raise LanguageError(
                    f"T.reduce or T.finalize_reducer: {threads.size} threads meet at barriers that "
                    f"count {counted} threads, because TileLang divides work among the threads of "
                    f"the first axis only; expected threads={threads.size}{location(stmt)}"
                )
        return stmt

    return func.with_body(follow_threads(func.body, visit))


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
