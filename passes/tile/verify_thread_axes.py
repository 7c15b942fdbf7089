"""Refuse what TileLang repeats in blocks of several axes, although it must run once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import structural_equal

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.accesses import accesses_of, is_private
from ..ir.accesses import name_of as statement_name
from ..ir.origin import name_of
from ..ir.pipelined_loops import is_pipelined
from ..ir.tma import requires_tma
from ..ir.uniformity import THREAD_INDICES
from ..ir.walk import (
    children_of,
    headers_of,
    is_parallel,
    location,
    nodes_in,
    op_name,
    variables_in,
)

_THREAD_INDEX = "tl.launch_thread_idx"
_TILE_ADD = "tl.tileop.atomicadd"
_SCANS = ("tl.tileop.cumsum", "tl.tileop.cummax")
_REPEATED_CHANGES = ("add", "xor")
"""Operations whose repetition changes the result."""


def verify_thread_axes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse statements that a block of several axes would execute once for each row of threads.

    A row consists of the threads that differ only in their first index. TileLang divides a tile or
    ``T.Parallel`` among the threads of the first axis, so each row executes all of it. This is
    harmless for copies, fills and matrix products, and for a row that the program selects by its
    index. But each row adds the same value again, updates a tile in place, and arrives at the
    barriers of ``T.Pipelined``, which count the threads of one row.

    Raises:
        LanguageError: names the construct, the threads and the line.

    Before: ``T.atomic_add(S[i], x[i])`` in ``T.Parallel``, with ``threads=(32, 4)``
    After:  LanguageError; legal programs stay unchanged
    """
    _Verifier(_names_of_rows(func.body)).check(func.body, _Context())
    return func


@dataclass(frozen=True)
class _Context:
    """Position of a statement.

    Attributes:
        threads: extents of the block, x first.
        by_row: whether the program selects the rows that reach the statement.
        loads: elements that ``T.Parallel`` has read before the statement; None outside of it.
    """

    threads: tuple[int, ...] = ()
    by_row: bool = False
    loads: list[tirx.BufferLoad] | None = None

    @property
    def rows(self) -> int:
        return math.prod(self.threads[1:])


class _Verifier:
    """Checks statements, with the names whose value may differ between rows."""

    def __init__(self, names: set[tirx.Var]) -> None:
        self.names = names

    def check(self, stmt: tirx.Stmt, context: _Context) -> None:
        context = self._inside(stmt, context)
        if context.rows > 1:
            if isinstance(stmt, tirx.For) and is_pipelined(stmt):
                raise _repetition_error("T.Pipelined", stmt, context)
            if not context.by_row:
                self._check_own(stmt, context)
        for child in children_of(stmt):
            self.check(child, context)

    def _inside(self, stmt: tirx.Stmt, context: _Context) -> _Context:
        """Return the context of the statements inside ``stmt``."""
        threads, loads = context.threads, context.loads
        if isinstance(stmt, tirx.SBlockRealize):
            threads = tuple(map(int, stmt.block.annotations.get("tl.launch_threads", threads)))
        if is_parallel(stmt) and loads is None:
            loads = []
        by_row = context.by_row or any(_depends(part, self.names) for part in headers_of(stmt))
        return _Context(threads, by_row, loads)

    def _check_own(self, stmt: tirx.Stmt, context: _Context) -> None:
        """Refuse what ``stmt`` itself executes, without its inner statements."""
        parts = headers_of(stmt) if children_of(stmt) else [stmt]
        for call in (call for part in parts for call in nodes_in(part, tirx.Call)):
            is_divided = context.loads is not None or op_name(call) == _TILE_ADD
            if is_divided and _accumulates(call) and not _depends(call, self.names):
                raise _repetition_error(_call_name(call), stmt, context)
            if op_name(call) in _SCANS and _is_in_place(call):
                raise _repetition_error(f"{statement_name(stmt)} in place", stmt, context)
        if context.loads is not None:
            for part in parts:
                context.loads.extend(nodes_in(part, tirx.BufferLoad))
            if isinstance(stmt, tirx.BufferStore) and self._updates(stmt, context.loads):
                raise _repetition_error(f"update of {stmt.buffer.name}", stmt, context)

    def _updates(self, store: tirx.BufferStore, loads: list[tirx.BufferLoad]) -> bool:
        """Return whether all rows store to an element that they have read."""
        return (
            not is_private(store.buffer)
            and not any(_depends(index, self.names) for index in store.indices)
            and any(_is_same_element(store, load) for load in loads)
        )


def _names_of_rows(body: tirx.Stmt) -> set[tirx.Var]:
    """Return the variables and private buffers whose value may differ between rows."""
    names: set[tirx.Var] = set()

    def follow(stmt: tirx.Stmt, by_row: bool) -> None:
        children = children_of(stmt)
        parts = headers_of(stmt) if children else [stmt]
        by_row = by_row or any(_depends(part, names) for part in parts)
        if isinstance(stmt, tirx.Bind):
            index = stmt.value.args[0] if op_name(stmt.value) == _THREAD_INDEX else 0
            if by_row or int(index) > 0:
                names.add(stmt.var)
        elif by_row and isinstance(stmt, tirx.For):
            names.add(stmt.loop_var)
        elif by_row and not children:
            written = accesses_of(stmt).writes.values()
            names.update(buffer.data for buffer in written if is_private(buffer))
        for child in children:
            follow(child, by_row)

    before = -1
    while before != len(names):
        before = len(names)
        follow(body, False)
    return names


def _depends(node: tirx.PrimExpr | tirx.Stmt, names: set[tirx.Var]) -> bool:
    """Return whether ``node`` uses one of the names, or the index of a warp."""
    used = {*variables_in(node), *accesses_of(node).reads}
    return not names.isdisjoint(used) or any(
        op_name(call) in THREAD_INDICES and op_name(call) != _THREAD_INDEX
        for call in nodes_in(node, tirx.Call)
    )


def _accumulates(call: tirx.Call) -> bool:
    """Return whether a repetition of ``call`` would change memory again."""
    spec = builtin_of(call)
    if spec is not None:
        return spec.combination(call) in _REPEATED_CHANGES
    is_add = op_name(call).startswith("tl.atomic_add") or op_name(call) == _TILE_ADD
    return is_add and not requires_tma(call)


def _is_in_place(scan: tirx.Call) -> bool:
    source, target = (region.args[0] for region in scan.args[:2])
    return _is_same_element(source, target)


def _is_same_element(
    first: tirx.BufferLoad | tirx.BufferStore, second: tirx.BufferLoad | tirx.BufferStore
) -> bool:
    return first.buffer.data.same_as(second.buffer.data) and all(
        structural_equal(a, b) for a, b in zip(first.indices, second.indices, strict=True)
    )


def _call_name(call: tirx.Call) -> str:
    if builtin_of(call) is not None:
        return name_of(call)
    name = op_name(call).split(".")[-1].removesuffix("_elem_op").removesuffix("_ret")
    return f"T.{name.replace('atomicadd', 'atomic_add')}"


def _repetition_error(name: str, stmt: tirx.Stmt, context: _Context) -> LanguageError:
    x, y, z = context.threads
    threads = (x, y) if z == 1 else (x, y, z)
    return LanguageError(
        f"{name}: executed {context.rows} times with {threads=}, because TileLang divides work "
        f"among the threads of the first axis only; expected threads={x * y * z}{location(stmt)}"
    )
