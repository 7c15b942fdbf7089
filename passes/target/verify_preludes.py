"""Refuse uses of a tile before a pipelined loop that TileLang moves beside or before its load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tvm import tirx
from tvm.target import Target

from ...builtins.errors import LanguageError
from ..ir.accesses import accesses_of, is_private, name_of
from ..ir.pipelined_loops import is_pipelined, may_use_tma, tiles_loaded_in, uses_tma
from ..ir.tma import may_have_producer
from ..ir.walk import arrows, children_of, line_of, op_name, statements_of, variables_in


def verify_preludes(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Refuse a use of a tile before the first loop with producer warps, if TileLang reorders it.

    TileLang moves statements that write registers which the loop needs to the consumer warps, where
    they run beside the producer, which may already load the tile. It also loads a tile that the
    loop reads by a TMA load whose wait it moves into the loop. A use between this load and the
    loop precedes the wait, and a load of the tile in the loop may overtake it. TileLang moves no
    wait if the loop is in another loop.

    Raises:
        LanguageError: names the tile, and the lines of the use and of the loop.

    Before: ``T.copy(A[0], tile); T.copy(tile, B); for k in T.Pipelined(n, num_stages=1):
    T.copy(A[k], tile); T.gemm(tile, ...)``
    After:  LanguageError; legal programs stay unchanged
    """
    prelude = _Prelude()
    if not may_have_producer(target) or not prelude.find(func.body):
        return func
    loop = prelude.loop
    loaded, read = tiles_loaded_in(loop), accesses_of(loop.body).reads.keys()
    moved = prelude.moved_to_consumers()
    awaited_in_loop: set[tirx.Var] = set()
    for stmt in prelude.stmts:
        accesses = accesses_of(stmt)
        tiles = {
            data: buffer
            for data, buffer in (accesses.reads | accesses.writes).items()
            if buffer.scope().startswith("shared")
        }
        is_early = not prelude.is_in_loop and _is_tma_load(stmt)
        early = {data for data in accesses.writes if is_early and data in tiles and data in read}
        overtaken = loaded if stmt in moved else loaded & early
        for data in tiles:
            if data in overtaken or data in awaited_in_loop:
                raise _error(stmt, tiles[data], loop)
        awaited_in_loop |= early
    return func


@dataclass
class _Prelude:
    """Statements before and after the first loop with producer warps, on its path.

    Attributes:
        stmts: statements before the loop, in order.
        later: statements after it.
        is_in_loop: whether the loop is in another loop.
    """

    loop: tirx.For | None = None
    stmts: list[tirx.Stmt] = field(default_factory=list)
    later: list[tirx.Stmt] = field(default_factory=list)
    is_in_loop: bool = False

    def find(self, stmt: tirx.Stmt) -> bool:
        """Find the loop in ``stmt``; return whether there is one."""
        if isinstance(stmt, tirx.For) and is_pipelined(stmt) and uses_tma(stmt):
            self.loop = stmt
            return True
        children = statements_of(stmt) if isinstance(stmt, tirx.SeqStmt) else children_of(stmt)
        for index, child in enumerate(children):
            if not self.find(child):
                continue
            if isinstance(stmt, tirx.SeqStmt):
                self.stmts[:0] = children[:index]
                self.later += children[index + 1 :]
            is_loop = isinstance(stmt, tirx.For) and stmt.kind != tirx.ForKind.THREAD_BINDING
            self.is_in_loop = self.is_in_loop or is_loop or isinstance(stmt, tirx.While)
            return True
        return False

    def moved_to_consumers(self) -> set[tirx.Stmt]:
        """Return the statements before the loop that TileLang moves to the consumers: those that
        define what only the loop, later statements or moved statements use."""
        moved: set[tirx.Stmt] = set()
        needed = _uses([self.loop, *self.later])
        kept: set[tirx.Var] = set()
        for stmt in reversed(self.stmts):
            defined = {data for data, b in accesses_of(stmt).writes.items() if is_private(b)}
            defined |= {stmt.var} if isinstance(stmt, tirx.Bind) else set()
            if defined & needed and not defined & kept:
                moved.add(stmt)
                needed |= _uses([stmt])
            else:
                kept |= _uses([stmt])
        return moved


def _uses(stmts: Iterable[tirx.Stmt]) -> set[tirx.Var]:
    """Return the registers that ``stmts`` read, and the variables in them."""
    used: set[tirx.Var] = set()
    for stmt in stmts:
        used |= {data for data, b in accesses_of(stmt).reads.items() if is_private(b)}
        used |= set(variables_in(stmt))
    return used


def _is_tma_load(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` itself is a copy that may use the TMA."""
    return (
        isinstance(stmt, tirx.Evaluate)
        and op_name(stmt.value) == "tl.tileop.copy"
        and may_use_tma(stmt.value)
    )


def _error(stmt: tirx.Stmt, tile: tirx.Buffer, loop: tirx.For) -> LanguageError:
    return LanguageError(
        f"{name_of(stmt)}: uses {tile.name} before T.Pipelined, whose producer warps may load "
        f"{tile.name} at the same time; expected another tile, or T.serial"
        f"{arrows([('use', line_of(stmt)), ('T.Pipelined', line_of(loop))])}"
    )
