"""A signal in a loop over tiles may wait until the next tile has been computed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ....builtins.errors import LanguageError
from ...ir.walk import children_of
from ...tile.pin_pipelined import is_pipelined
from ..regions.accesses import Access, Branch
from ..regions.footprints import Boxes
from ..regions.granules import Counter
from ..regions.space import Loop, Space
from .context import Exchange
from .edits import anchor_of
from .residency import verify_residency
from .signals import signal_depth


@dataclass(frozen=True, eq=False)
class Sink:
    """Where the signal of one round stands in the next.

    Attributes:
        loop: over the rounds.
        stmt: the statement before which it stands.
        place: position of ``stmt`` among the statements of ``loop``.
        past: name of the loop that it sinks past.
        reached: whether the next round gets there.
        due: there, whether the round before has left a signal.
        sinks: ``reached`` in each iteration of the access.
        always: whether it holds in all of them.
    """

    loop: Loop
    stmt: tirx.Stmt
    place: int
    past: str
    reached: tirx.PrimExpr
    due: tirx.PrimExpr
    sinks: np.ndarray
    always: bool

    @property
    def text(self) -> str:
        """Where it sinks to, for its reason."""
        rounds = f"the next round of the loop over {self.loop.var.name}"
        return f"sunk past the loop over {self.past} in {rounds}"

    def of_round_before(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """``expr`` with the number of the round before."""
        return _in_round(self.loop, -1, expr)


class _Stays(Exception):
    """A signal stays behind its store, because of this."""


def choose_sinks(exchange: Exchange) -> None:
    """Let signals sink past the main loop of the next tile, with ``tileweave.sink_signals``.

    Completion of the store, which stands before its signal, sinks along: what is on its way to a
    peer drains while the next tile is computed. The signal then stands before the outermost ``if``
    around the store that holds no loop on the way to it, in the next round. Where the next round
    does not get there, or there is none, it stands behind the store as it would without. A signal
    stays where blocks would wait for what they have not told yet: the launch is played through with
    the sunk signals.

    Before: ``for i in range(n): main loop; T.copy(tile, S[dst, i, 0]); signal(dst, i)``
    After:  ``for i in range(n): main loop; if i > 0: signal(dst, i - 1);
    T.copy(tile, S[dst, i, 0]); if i + 1 == n: signal(dst, i)``
    """
    if not exchange.options.sink_signals:
        return
    for counter in exchange.counters:
        for boxes in counter.traffic.in_kernel(counter.kind):
            try:
                _choose(exchange, counter, boxes)
            except _Stays as reason:
                exchange.unsunk[counter, boxes] = str(reason)


def _choose(exchange: Exchange, counter: Counter, boxes: Boxes) -> None:
    """Let one signal sink, beside those that do already, or raise why it stays."""
    exchange.sinks[counter, boxes] = _sink_of(exchange, counter, boxes)
    try:
        verify_residency(exchange)
    except LanguageError:
        del exchange.sinks[counter, boxes]
        raise _Stays("blocks would wait for what they have not told yet") from None


def _sink_of(exchange: Exchange, counter: Counter, boxes: Boxes) -> Sink:
    """Where the signal for an access may sink to, if nobody waits for it too early."""
    access = boxes.access
    kept = signal_depth(exchange, counter, boxes)
    loop, (number, branch), past = access.loops[kept - 1], *_place_in(access, kept)

    def holds(conditions: list[tirx.PrimExpr]) -> tirx.PrimExpr:
        return exchange.symbols.simplified(functools.reduce(tirx.And, conditions), access)

    def all_of(conditions: tuple[tirx.PrimExpr, ...], rounds: int) -> list[tirx.PrimExpr]:
        return [_in_round(loop, rounds, exchange.symbols.inlined(c)) for c in conditions]

    first, end = (exchange.symbols.inlined(e) for e in (loop.min, loop.min + loop.extent))
    here = access.conditions[access.guards[kept - 1] : len(access.branches)]
    reached = holds([loop.var + 1 < end, *all_of(here[:number], 1)])
    due = holds([loop.var > first, *all_of(here, -1)])
    space = Space(exchange.world_size, [*access.loops, *access.inner], exchange.program.values)
    sinks = space.of(reached).astype(np.bool_)
    if not np.any(sinks & boxes.mask):
        raise _Stays(f"no block gets there in another round of the loop over {loop.var.name}")
    always = bool(np.all(sinks | ~boxes.mask))
    return Sink(loop, branch.stmt, branch.place, past, reached, due, sinks, always)


def _place_in(access: Access, kept: int) -> tuple[tuple[int, Branch], str]:
    """The place in the innermost of ``kept`` loops before which a signal may stand, how many of the
    branches in that loop are around it, and the loop that stands before it."""
    loop = access.around[kept - 1]
    if loop is None:
        raise _Stays("it stands in no loop")
    over = f"the loop over {loop.loop_var.name}"
    if is_pipelined(loop):
        raise _Stays(f"TileLang overlaps the rounds of {over}")
    anchor = anchor_of(access, kept)
    branches = access.branches[access.guards[kept - 1] :]
    places = [*branches, Branch(anchor, kept, access.place[kept])]
    number, branch = next(
        (n, b) for n, b in enumerate(places) if b.loops == kept and not _loop_before(b.stmt, anchor)
    )
    past = _loop_before(loop.body, branch.stmt)
    if past is None:
        raise _Stays(f"no loop comes before it in a round of {over}")
    return (number, branch), past


def _in_round(loop: Loop, offset: int, expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """The value of ``expr`` so many rounds later."""
    return substitute(expr, {loop.var: loop.var + offset})


def _loop_before(stmt: tirx.Stmt, target: tirx.Stmt) -> str | None:
    """The last loop, by the name of its variable, that runs in ``stmt`` on the way to ``target``
    inside it."""
    return _way(stmt, target)[1]


def _way(stmt: tirx.Stmt, target: tirx.Stmt) -> tuple[bool, str | None]:
    """Whether ``target`` is in ``stmt``, and the last loop on the way to it or to the end."""
    if stmt.same_as(target):
        return True, None
    found: str | None = None
    for inner in children_of(stmt):
        reached, loop = _way(inner, target)
        if reached:
            before = None if isinstance(stmt, tirx.IfThenElse) else found
            return True, loop or before
        found = loop or found
    return False, _name_of(stmt) or found


def _name_of(stmt: tirx.Stmt) -> str | None:
    """Of a loop that runs one round after the other."""
    if isinstance(stmt, tirx.While):
        return "while"
    parallel = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)
    return stmt.loop_var.name if isinstance(stmt, tirx.For) and stmt.kind not in parallel else None
