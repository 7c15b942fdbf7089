"""Iterations of a loop that stand for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from tvm import tirx

from ..integer_ops import DIVISIONS
from ..walk import nodes_in, variables_in
from .values import ThreadValues

UNKNOWN = 4
"""Iterations of a loop whose number is unknown."""
_FIRST, _LAST = 8, 4
"""Iterations at the begin and at the end of a loop; half as many for each loop around it."""
_COUNTED = 24
"""Iterations after which a few stages, and their phases, repeat that registers count."""
_CANDIDATES = 4096
"""Iterations that are searched for conditions that did not hold before."""
_CHUNK = 512
"""Iterations that are searched at once."""
_CASES, _PERIOD = 32, 512
"""Most iterations that are followed because of their conditions, and because of remainders."""


def followed_iterations(
    loops: list[tirx.For],
    first: int,
    extent: int | None,
    depth: int,
    values: ThreadValues,
    counts: bool,
) -> Iterator[int]:
    """Yield the iterations of a loop that are followed: the first and the last ones, and those in
    which conditions hold that did not hold before.

    Between them, a multiple of all divisors in index expressions is left out, so that tiles of
    several versions have the same ones.

    Args:
        loops: the loop, and those of other threads with the same number of iterations. The same
            ones are followed in all of them, because their threads wait for each other.
        depth: number of loops around it.
        counts: whether registers count phases of mbarriers.
    """
    begin, end = max(2, _FIRST >> depth), max(1, _LAST >> depth)
    period = math.lcm(*map(_period, loops))
    if period > _PERIOD:
        period = max(map(_period, loops))
    if counts:
        begin, period = max(begin, _COUNTED >> depth), math.lcm(period, _COUNTED)
    most = _CANDIDATES if extent is None else extent
    if extent is None:
        most = min(most, values.most(loops[0].extent))
        begin, end = min(UNKNOWN, most), 0
    if extent is not None and extent <= begin + end + min(period, 16):
        yield from range(first, first + extent)
        return
    yield from range(first, first + begin)
    last, stop = first + begin - 1, first + most
    cases = {n for loop in loops for n in _new_cases(loop, first, last, stop, values)}
    for target in (*sorted(cases), *range(stop - end, stop)):
        if target > last:
            yield from range(target - (target - last - 1) % period, target + 1)
            last = target


def _new_cases(stmt: tirx.For, first: int, last: int, stop: int, values: ThreadValues) -> list[int]:
    """Return the iterations after ``last`` in which the conditions inside a loop differ from those
    of all iterations before."""
    conditions = [n.condition for n in nodes_in(stmt.body, tirx.IfThenElse, tirx.Select)]
    known, found = set[bytes](), list[int]()
    stop = min(stop, first + _CANDIDATES)
    for begin in range(first, stop if conditions else first, _CHUNK):
        numbers = range(begin, min(begin + _CHUNK, stop))
        if not values.spread(stmt.loop_var, numbers):
            break
        axis = values.loops[-1]
        columns = [
            np.moveaxis(may, axis, 0).reshape(len(numbers), -1)
            for may, _ in map(values.truth, conditions)
            if may.shape[axis] == len(numbers) > 1
        ]
        values.close(stmt.loop_var)
        for row, number in enumerate(numbers if columns else ()):
            case = b"".join(column[row].tobytes() for column in columns)
            if case not in known and number > last:
                found.append(number)
            known.add(case)
    return found[:_CASES]


def _period(stmt: tirx.For) -> int:
    """Return a number of iterations after which the remainders in index expressions repeat."""
    period = 1
    for node in nodes_in(stmt.body, *DIVISIONS):
        if isinstance(node.b, tirx.IntImm):
            longer = math.lcm(period, min(int(node.b), 64) or 1)
            if period < longer <= _PERIOD and stmt.loop_var in variables_in(node.a):
                period = longer
    return period
