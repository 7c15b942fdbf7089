"""Refuse statements of pipelined loops that overwrite a tile before TileLang waits for its load."""

from __future__ import annotations

from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.accesses import accesses_of, name_of
from ..ir.pipelined_loops import is_pipelined, iteration_of, tiles_loaded_in
from ..ir.walk import arrows, line_of, nodes_in


def verify_overwrites(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse a statement that writes a tile after its load in a pipelined loop, and does not read
    it, unless a statement between them reads the tile.

    TileLang waits for loads before the first statement that reads one of their tiles. A statement
    that only writes a tile runs before this wait, or in the producer warps, and the load may
    overwrite what it stores.

    Raises:
        LanguageError: names the tile, and the lines of the statement and of the load.

    Before: ``for k in T.Pipelined(n): T.copy(A[k], tile); for i in T.Parallel(64): if i >= n:
    tile[i] = 0; T.gemm(tile, ...)``
    After:  LanguageError; legal programs stay unchanged
    """
    for loop in nodes_in(func.body, tirx.For):
        if is_pipelined(loop):
            _verify(loop)
    return func


def _verify(loop: tirx.For) -> None:
    loads: dict[tirx.Var, tirx.Stmt] = {}
    for stmt in iteration_of(loop):
        accesses, loaded = accesses_of(stmt), tiles_loaded_in(stmt)
        for data, buffer in accesses.writes.items():
            if data in loads and data not in accesses.reads and data not in loaded:
                raise _error(stmt, buffer, loads[data])
        loads = {data: load for data, load in loads.items() if data not in accesses.reads}
        loads |= {data: stmt for data in loaded if data not in accesses.reads}


def _error(stmt: tirx.Stmt, tile: tirx.Buffer, load: tirx.Stmt) -> LanguageError:
    return LanguageError(
        f"{name_of(stmt)}: overwrites {tile.name}, whose load may arrive later; expected a "
        f"statement that reads {tile.name}, too, such as {tile.name}[i] = "
        f"T.if_then_else(condition, {tile.name}[i], value), or another tile"
        f"{arrows([('overwrite', line_of(stmt)), ('load', line_of(load))])}"
    )
