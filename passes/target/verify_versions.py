"""Refuse uses of a pipelined tile outside of its loop, which TileLang compiles to wrong indices."""

from __future__ import annotations

from typing import NamedTuple

from tvm import tirx
from tvm.target import Target

from ...builtins.errors import LanguageError
from ..ir.accesses import accesses_of, name_of
from ..ir.pipelined_loops import is_pipelined, iteration_of, tiles_loaded_in, uses_tma
from ..ir.tma import TMA_SM, may_have_producer, sm_of
from ..ir.walk import arrows, children_of, headers_of, line_of


def verify_versions(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Refuse a use outside of ``T.Pipelined`` of a multi-buffered tile of the loop.

    A tile that one stage of the loop loads and a later stage reads has a version for each stage.
    TileLang gives it an axis for the versions, but no index on this axis where the program uses the
    tile outside of the loop. Most of these programs end in an InternalError. Others read memory
    after the tile. Several pipelined loops may load one tile if they have the same number of
    versions, or, with producer warps, if the later loop has one version.

    Raises:
        LanguageError: names the tile, and the lines of the loop and of the other use.

    Before: ``for k in T.Pipelined(n, num_stages=2): T.copy(A[k], tile); T.gemm(tile, ...)``, then
    ``T.copy(tile, B)``
    After:  LanguageError; legal programs stay unchanged
    """
    program = _Program()
    program.visit(func.body, None)
    versions = [_versions_of(loop, sm_of(target)) for loop in program.loops]
    has_producer = may_have_producer(target) and any(map(uses_tma, program.loops))
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
                raise _error(use, loop)
    return func


class _Use(NamedTuple):
    """A use of a tile in shared memory, in the pipelined loop with this number."""

    tile: tirx.Buffer
    stmt: tirx.Stmt
    loop: int | None


class _Program:
    """Pipelined loops and uses of tiles, in program order."""

    def __init__(self) -> None:
        self.loops: list[tirx.For] = []
        self.uses: list[_Use] = []

    def visit(self, stmt: tirx.Stmt, loop: int | None) -> None:
        """Record the loops and uses in ``stmt``, which is in the pipelined loop ``loop``."""
        if loop is None and isinstance(stmt, tirx.For) and is_pipelined(stmt):
            loop = len(self.loops)
            self.loops.append(stmt)
        children = children_of(stmt)
        accesses = accesses_of(*(headers_of(stmt) if children else [stmt]))
        for buffer in (accesses.reads | accesses.writes).values():
            if buffer.scope().startswith("shared"):
                self.uses.append(_Use(buffer, stmt, loop))
        for child in children:
            self.visit(child, loop)


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


def _error(use: _Use, loop: tirx.For) -> LanguageError:
    tile = use.tile.name
    return LanguageError(
        f"{name_of(use.stmt)}: uses {tile}, of which T.Pipelined has a version for each stage, "
        "outside of this loop; expected another tile, or T.serial"
        f"{arrows([('use', line_of(use.stmt)), ('T.Pipelined', line_of(loop))])}"
    )
