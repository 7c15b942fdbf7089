"""Refuse uses of tiles of pipelined loops that TileLang orders or indexes wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tvm import tirx
from tvm.target import Target

from ...builtins.errors import LanguageError
from ..ir.accesses import accesses_of, is_private, name_of
from ..ir.pipelined_loops import is_pipelined, iteration_of, may_use_tma, tiles_loaded_in, uses_tma
from ..ir.tma import TMA_SM, may_have_producer, sm_of
from ..ir.walk import (
    arrows,
    children_of,
    headers_of,
    line_of,
    nodes_in,
    op_name,
    variables_in,
)


def verify_loop_tiles(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Refuse four uses of a tile that ``T.Pipelined`` loads.

    - A use of a multi-buffered tile outside of its loop. A tile that one stage of the loop loads
      and a later stage reads has a version for each stage. TileLang gives it an axis for the
      versions, but no index on this axis where the program uses the tile outside of the loop. Most
      of these programs end in an InternalError. Others read memory after the tile. Several
      pipelined loops may load one tile if they have the same number of versions, or, with producer
      warps, if the later loop has one version.
    - A use before the first loop with producer warps, if TileLang reorders it. TileLang moves
      statements that write registers which the loop needs to the consumer warps, where they run
      beside the producer, which may already load the tile. It also loads a tile that the loop reads
      by a TMA load whose wait it moves into the loop. A use between this load and the loop precedes
      the wait, and a load of the tile in the loop may overtake it. TileLang moves no wait if the
      loop is in another loop.
    - A statement of the loop that writes the tile after its load and does not read it, unless a
      statement between them reads the tile. TileLang waits for loads before the first statement
      that reads one of their tiles. A statement that only writes a tile runs before this wait, or
      in the producer warps, and the load may overwrite what it stores.
    - A load of the tile that reads a fragment which the loop, or a statement after it in a loop
      around it, changes. The producer warps have their own copy, which these statements do not
      change.

    Raises:
        LanguageError: names the tile, and the lines of the use and of the loop or load.

    Before: ``for k in T.Pipelined(n, num_stages=2): T.copy(A[k], tile); T.gemm(tile, ...)``, then
    ``T.copy(tile, B)``
    After:  LanguageError; legal programs stay unchanged
    """
    program = _Program()
    program.visit(func.body, None, [])
    has_producer = may_have_producer(target)
    _verify_versions(program, sm_of(target), has_producer)
    if has_producer and program.prelude is not None:
        _verify_prelude(program.prelude)
        _verify_fragments(program.prelude)
    for loop in filter(is_pipelined, nodes_in(func.body, tirx.For)):
        _verify_overwrites(loop)
    return func


class _Use(NamedTuple):
    """A use of a tile in shared memory, in the pipelined loop with this number."""

    tile: tirx.Buffer
    stmt: tirx.Stmt
    loop: int | None


class _Program:
    """Pipelined loops and uses of tiles, in program order.

    Attributes:
        prelude: statements around the first loop with producer warps.
    """

    def __init__(self) -> None:
        self.loops: list[tirx.For] = []
        self.uses: list[_Use] = []
        self.prelude: _Prelude | None = None

    def visit(self, stmt: tirx.Stmt, loop: int | None, path: list[tirx.Stmt]) -> None:
        """Record the loops and uses in ``stmt``.

        Args:
            loop: number of the pipelined loop that contains ``stmt``.
            path: the statements that contain ``stmt``, outermost first.
        """
        if isinstance(stmt, tirx.For) and is_pipelined(stmt):
            if self.prelude is None and uses_tma(stmt):
                self.prelude = _prelude_of(stmt, path)
            if loop is None:
                loop = len(self.loops)
                self.loops.append(stmt)
        children = children_of(stmt)
        accesses = accesses_of(*(headers_of(stmt) if children else [stmt]))
        for buffer in (accesses.reads | accesses.writes).values():
            if buffer.scope().startswith("shared"):
                self.uses.append(_Use(buffer, stmt, loop))
        for child in children:
            self.visit(child, loop, [*path, stmt])


@dataclass
class _Prelude:
    """Statements before and after the first loop with producer warps, on its path.

    Attributes:
        stmts: statements before the loop, in order.
        later: statements after it.
        is_in_loop: whether the loop is in another loop.
    """

    loop: tirx.For
    stmts: list[tirx.Stmt] = field(default_factory=list)
    later: list[tirx.Stmt] = field(default_factory=list)
    is_in_loop: bool = False

    def moved_to_consumers(self) -> set[tirx.Stmt]:
        """Return the statements before the loop that TileLang moves to the consumers: those that
        define what only the loop, later statements or moved statements use."""
        moved: set[tirx.Stmt] = set()
        needed = _registers_in([self.loop, *self.later])
        kept: set[tirx.Var] = set()
        for stmt in reversed(self.stmts):
            defined = {data for data, b in accesses_of(stmt).writes.items() if is_private(b)}
            defined |= {stmt.var} if isinstance(stmt, tirx.Bind) else set()
            if defined & needed and not defined & kept:
                moved.add(stmt)
                needed |= _registers_in([stmt])
            else:
                kept |= _registers_in([stmt])
        return moved


def _prelude_of(loop: tirx.For, path: list[tirx.Stmt]) -> _Prelude:
    """Return the statements around ``loop``, which the statements of ``path`` contain."""
    prelude = _Prelude(loop)
    for stmt, child in zip(path, [*path[1:], loop], strict=True):
        if isinstance(stmt, tirx.SeqStmt):
            index = next(i for i, s in enumerate(stmt.seq) if s.same_as(child))
            prelude.stmts += stmt.seq[:index]
            prelude.later += stmt.seq[index + 1 :]
        is_loop = isinstance(stmt, tirx.For) and stmt.kind != tirx.ForKind.THREAD_BINDING
        prelude.is_in_loop |= is_loop or isinstance(stmt, tirx.While)
    return prelude


def _registers_in(stmts: Iterable[tirx.Stmt]) -> set[tirx.Var]:
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


def _verify_versions(program: _Program, sm: int, may_have_producer: bool) -> None:
    """Refuse uses of multi-buffered tiles outside of their loops."""
    versions = [_versions_of(loop, sm) for loop in program.loops]
    has_producer = may_have_producer and any(map(uses_tma, program.loops))
    for use in program.uses:
        for number, loop in enumerate(program.loops):
            count = versions[number].get(use.tile.data)
            if count is None or use.loop == number:
                continue
            other = None if use.loop is None else versions[use.loop].get(use.tile.data)
            if other is None:
                is_legal = count == 1
            elif has_producer:
                is_legal = (other if use.loop > number else count) == 1
            else:
                is_legal = other == count
            if not is_legal:
                problem = (
                    f"uses {use.tile.name}, of which T.Pipelined has a version for each stage, "
                    "outside of this loop; expected another tile, or T.serial"
                )
                raise _error(use.stmt, problem, ("use", use.stmt), ("T.Pipelined", loop))


def _versions_of(loop: tirx.For, sm: int) -> dict[tirx.Var, int]:
    """Return the number of versions of each tile that ``loop`` loads and another statement of an
    iteration reads, by the pointer of the tile."""
    stmts = [s for s in iteration_of(loop) if not isinstance(s, tirx.Bind)]
    versions: dict[tirx.Var, int] = {}
    stages = loop.annotations.get("tl_pipeline_stage")
    if stages is not None and len(stages) != len(stmts):
        return versions
    for i, load in enumerate(stmts):
        if sm >= TMA_SM and _is_serial(load):
            continue
        for tile in tiles_loaded_in(load):
            readers = [j for j, s in enumerate(stmts) if j != i and tile in accesses_of(s).reads]
            if not readers:
                continue
            if stages is None:
                versions[tile] = int(loop.annotations["num_stages"])
            else:
                versions[tile] = 1 + max(int(stages[j]) - int(stages[i]) for j in readers)
    return versions


def _is_serial(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is an inner loop, which TileLang does not pipeline with the TMA."""
    return isinstance(stmt, tirx.For) and stmt.kind != tirx.ForKind.PARALLEL


def _verify_prelude(prelude: _Prelude) -> None:
    """Refuse uses of tiles before the loop that TileLang moves beside or before a load."""
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
        for data, tile in tiles.items():
            if data in overtaken or data in awaited_in_loop:
                problem = (
                    f"uses {tile.name} before T.Pipelined, whose producer warps may load "
                    f"{tile.name} at the same time; expected another tile, or T.serial"
                )
                raise _error(stmt, problem, ("use", stmt), ("T.Pipelined", loop))
        awaited_in_loop |= early


def _verify_fragments(prelude: _Prelude) -> None:
    """Refuse loads of producer warps that read a fragment which the consumers change."""
    iteration = iteration_of(prelude.loop)
    changes = [*iteration, *(prelude.later if prelude.is_in_loop else [])]
    for load in filter(_is_load_by_threads, iteration):
        for data, fragment in accesses_of(load).reads.items():
            change = next((s for s in changes if data in accesses_of(s).writes), None)
            if fragment.scope() == "local.fragment" and change is not None:
                problem = (
                    f"reads {fragment.name} in producer warps of T.Pipelined, and consumer warps "
                    f"change it; expected {fragment.name} in shared memory, or T.serial"
                )
                raise _error(load, problem, ("load", load), ("change", change))


def _is_load_by_threads(stmt: tirx.Stmt) -> bool:
    """Return whether TileLang gives ``stmt``, a load without a copy, to the producer warps."""
    buffers = accesses_of(stmt).reads.values()
    is_read_by_consumers = any(b.scope() in ("local", "local.var") for b in buffers)
    return isinstance(stmt, tirx.For) and bool(tiles_loaded_in(stmt)) and not is_read_by_consumers


def _verify_overwrites(loop: tirx.For) -> None:
    """Refuse statements of ``loop`` that overwrite a tile before TileLang waits for its load."""
    loads: dict[tirx.Var, tirx.Stmt] = {}
    for stmt in iteration_of(loop):
        accesses, loaded = accesses_of(stmt), tiles_loaded_in(stmt)
        for data, tile in accesses.writes.items():
            if data in loads and data not in accesses.reads and data not in loaded:
                problem = (
                    f"overwrites {tile.name}, whose load may arrive later; expected a statement "
                    f"that reads {tile.name}, too, such as {tile.name}[i] = "
                    f"T.if_then_else(condition, {tile.name}[i], value), or another tile"
                )
                raise _error(stmt, problem, ("overwrite", stmt), ("load", loads[data]))
        loads = {data: load for data, load in loads.items() if data not in accesses.reads}
        loads |= {data: stmt for data in loaded if data not in accesses.reads}


def _error(stmt: tirx.Stmt, problem: str, *places: tuple[str, tirx.Stmt]) -> LanguageError:
    lines = arrows([(name, line_of(place)) for name, place in places])
    return LanguageError(f"{name_of(stmt)}: {problem}{lines}")
