"""Breaks and continues that TileLang compiles wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tilelang import tvm
from tvm import tirx

from ...builtins.errors import LanguageError
from .pipelined_loops import is_pipelined, uses_tma
from .uniformity import BREAKS, CONTINUE, RETURN, Divergence, ThreadControl, jumps_in
from .walk import children_of, is_parallel, location, op_name

_TILE, _PIPELINED = "tile", "pipelined"
_CONDITION = "expected a condition around the statements"
Event = tuple[str, tirx.Stmt]


def verify_jumps(func: tirx.PrimFunc, has_producer: bool) -> None:
    """Refuse breaks and continues that TileLang compiles wrongly.

    - In a pipelined loop, TileLang loads for iterations that are then not computed.
    - It removes loops of one iteration and divides those of ``T.Parallel``; a jump in them then
      leaves the loop around them.
    - If some threads leave an iteration, or return, a tile statement after the jump leaves out the
      elements that TileLang gives to these threads. The tile program does not say which ones.
    - A break after a pipelined loop does not end the loop around it for the producer warps. Nor do
      these know a condition on the index of the thread around a pipelined loop.

    Args:
        has_producer: whether TileLang may let producer warps load tiles.

    Raises:
        LanguageError: names the loop or the tile statement, and its line.
    """
    analyzer = tvm.arith.Analyzer()
    control = cache(lambda: ThreadControl(func))  # most programs need none

    def visit(stmt: tirx.Stmt, conditions: tuple[tirx.PrimExpr, ...], in_parallel: bool) -> None:
        if isinstance(stmt, tirx.For):
            _verify_removed(stmt, analyzer)
            analyzer.bind(stmt.loop_var, tvm.ir.Range.from_min_extent(stmt.min, stmt.extent))
            divergences = (control().divergence_of(condition) for condition in conditions)
            has_producers = has_producer and is_pipelined(stmt) and uses_tma(stmt)
            if has_producers and Divergence.DIVERGENT in divergences:
                raise LanguageError(
                    "T.Pipelined: a condition around it differs between threads, and the producer "
                    f"warps would not know it; expected T.serial, or num_stages=0{location(stmt)}"
                )
            in_parallel |= is_parallel(stmt)
        if isinstance(stmt, tirx.For | tirx.While) and not in_parallel:
            is_kernel = getattr(stmt, "thread_binding", None) is not None
            if not is_kernel and next(jumps_in(stmt.body), None) is not None:
                _verify_loop(stmt, control(), has_producer)
        if isinstance(stmt, tirx.IfThenElse):
            conditions = *conditions, stmt.condition
        for child in children_of(stmt):
            visit(child, conditions, in_parallel)

    visit(func.body, (), False)
    events = list(_events(func.body))
    first = next((n for n, (kind, _) in enumerate(events) if kind in RETURN), None)
    if first is not None and control().after(func.body):
        _require_all_threads(events[first:])


def _verify_loop(loop: tirx.For | tirx.While, control: ThreadControl, has_producer: bool) -> None:
    """Verify a loop with a break or continue."""
    if isinstance(loop, tirx.For) and is_pipelined(loop):
        raise LanguageError(
            "T.Pipelined: the loop has a break, continue or return, and loads of later iterations "
            f"are in flight; expected T.serial, num_stages=0, or a condition around the statements"
            f"{location(loop)}"
        )
    events = list(_events(loop.body))
    lacking: list[Event] = []
    if control.of_breaks(loop):
        lacking = events
    elif control.after(loop.body):
        lacking = events[next(n for n, (kind, _) in enumerate(events) if kind in CONTINUE) :]
    _require_all_threads(lacking)
    is_after = False
    for kind, stmt in events:
        is_after |= has_producer and kind == _PIPELINED and uses_tma(stmt)
        if is_after and kind in BREAKS | RETURN:
            raise LanguageError(
                "T.Pipelined: a break or return follows it in the loop around it, which its "
                f"producer warps do not leave; {_CONDITION}, or a jump before T.Pipelined"
                f"{location(stmt)}"
            )


def _require_all_threads(events: list[Event]) -> None:
    """Refuse tile statements after threads have left."""
    for kind, stmt in events:
        if kind in (_TILE, _PIPELINED):
            raise LanguageError(
                "T.Parallel, T.copy or T.gemm: some threads left the iteration, loop or kernel by "
                "a break, continue or T.thread_return; "
                f"{_CONDITION} of single threads{location(stmt)}"
            )


def _verify_removed(loop: tirx.For, analyzer: tvm.arith.Analyzer) -> None:
    """Refuse a break or continue in a loop that TileLang removes or divides between threads."""
    names = BREAKS | CONTINUE | (RETURN if is_parallel(loop) else frozenset())
    jump, _ = next(jumps_in(loop.body, names), (None, ()))
    if jump is None:
        return
    if is_parallel(loop):
        raise _left(jump, "T.Parallel, which TileLang divides between threads")
    if not is_pipelined(loop) and analyzer.can_prove_equal(loop.extent, 1):
        raise _left(jump, "a loop of one iteration, which TileLang removes")


def _left(jump: tirx.Stmt, loop: str) -> LanguageError:
    return LanguageError(
        f"T.Parallel or T.serial: a break or continue in {loop}; {_CONDITION}{location(jump)}"
    )


def _events(stmt: tirx.Stmt, is_inner: bool = False) -> Iterator[Event]:
    """Yield the tile statements and pipelined loops in the body of a loop, and the jumps that leave
    its iteration, in order."""
    name = op_name(stmt.value) if isinstance(stmt, tirx.Evaluate) else ""
    if name.startswith("tl.tileop.") or is_parallel(stmt):
        yield _TILE, stmt
    if name in RETURN or (name in BREAKS | CONTINUE and not is_inner):
        yield name, stmt
    if isinstance(stmt, tirx.For) and is_pipelined(stmt):
        yield _PIPELINED, stmt
    for child in children_of(stmt):
        yield from _events(child, is_inner or isinstance(stmt, tirx.For | tirx.While))
