"""Find the statements that TileLang fails to compile, by leaving out the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tvm import IRModule, tirx

from ..passes.ir.operators import hold
from ..passes.ir.walk import (
    children_of,
    flatten,
    has_loads,
    headers_of,
    is_parallel,
    rewrite_children,
)

_NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))


@dataclass(frozen=True)
class Culprit:
    """Statements of a kernel that TileLang fails to compile.

    Attributes:
        kernel: the function that contains it.
        stmts: statements that fail together, but not without one of them, in order.
    """

    kernel: tirx.PrimFunc
    stmts: list[tirx.Stmt]


def culprit_of(mod: IRModule, fails: Callable[[IRModule], bool]) -> Culprit | None:
    """Return what is responsible for the failure of ``mod``.

    Bisection finds the last statement of the shortest prefix that fails, and then the others that
    it needs to fail. Definitions of variables are never left out.

    Args:
        fails: returns whether a module fails for the same reason as ``mod``.

    Returns:
        None if no statement is responsible: TileLang fails without any.
    """
    kernels = {v: f for v, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    paths = {path[-1]: (f, path) for f in kernels.values() for path in _paths(f.body, ())}
    stmts = list(paths)

    def fails_with(kept: Mapping[tirx.Stmt, tirx.Stmt]) -> bool:
        parts = {v: f.with_body(_part(f.body, kept) or _NOTHING) for v, f in kernels.items()}
        return fails(IRModule({**mod.functions, **parts}, attrs=mod.attrs))

    if not stmts or fails_with({}):
        return None
    last = _least(1, len(stmts), lambda n: fails_with(_identity(stmts[:n]))) - 1
    needed, first = [stmts[last]], 0
    while not fails_with(_identity(needed)):
        kept = list(needed)
        first = last - _least(
            1,
            last - first,
            lambda n, kept=kept: fails_with(_identity([*kept, *stmts[last - n : last]])),
        )
        needed.insert(-1, stmts[first])
        first += 1
    kernel, path = paths[needed[-1]]
    if fails_with({**_identity(needed), needed[-1]: hold(tirx.IntImm("int32", 0))}):
        needed[-1] = _header(path) or needed[-1]
    return Culprit(kernel, needed)


def _identity(stmts: list[tirx.Stmt]) -> dict[tirx.Stmt, tirx.Stmt]:
    return {stmt: stmt for stmt in stmts}


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return a number that ``holds`` and whose predecessor does not, or ``low``.

    ``high`` is known to hold.
    """
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def _is_whole(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is kept or left out as a whole."""
    return is_parallel(stmt) or isinstance(stmt, (tirx.Evaluate, tirx.BufferStore))


def _paths(stmt: tirx.Stmt, outer: tuple[tirx.Stmt, ...]) -> Iterator[tuple[tirx.Stmt, ...]]:
    """Yield each whole statement, after the statements around it."""
    if _is_whole(stmt):
        yield (*outer, stmt)
        return
    for child in children_of(stmt):
        yield from _paths(child, (*outer, stmt))


def _part(stmt: tirx.Stmt, kept: Mapping[tirx.Stmt, tirx.Stmt]) -> tirx.Stmt | None:
    """Return ``stmt`` with the statements of ``kept``, replaced by its values.

    Loops and branches without such a statement are left out, too.

    Returns:
        None if nothing is left.
    """
    if _is_whole(stmt):
        return kept.get(stmt)
    parts = {child: _part(child, kept) for child in children_of(stmt)}
    left = [part for part in parts.values() if part is not None]
    if isinstance(stmt, tirx.SeqStmt):
        return flatten(left) if left else None
    if headers_of(stmt) and not left:
        return None
    return rewrite_children(stmt, lambda child: parts[child] or _NOTHING)


def _header(path: tuple[tirx.Stmt, ...]) -> tirx.Stmt | None:
    """Return the innermost loop or branch, preferably one whose bounds or condition read memory."""
    headers = [s for s in reversed(path[:-1]) if headers_of(s) and not _is_thread_loop(s)]
    reading = [stmt for stmt in headers if any(map(has_loads, headers_of(stmt)))]
    return next(iter([*reading, *headers]), None)


def _is_thread_loop(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.For) and stmt.thread_binding is not None
