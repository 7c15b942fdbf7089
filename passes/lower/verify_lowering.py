"""Verify that lowered tile statements access the elements that the tile statements name."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ...builtins.errors import MisloweredError
from ..ir.accesses import touches_in
from ..ir.tma import TMA_COPY
from ..ir.walk import is_parallel, location, nodes_in, op_name, rewrite_children, variables_in
from ..lowering.operations import CALLS
from ..lowering.places import FRAGMENT, Places, Unknown
from ..lowering.points import Points
from ..lowering.samples import MARK, Samples, Statement, marked_statements
from ..lowering.transfers import ELEMENT_VALUES, LoweredTransfers, TileTransfers
from ..sync.regions.space import NotEvaluable

_COPIES = ("tl.tileop.copy", TMA_COPY, "tl.tileop.async_copy")
_FILL = "tl.tileop.fill"


def verify_lowering(func: tirx.PrimFunc, tiles: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse copies, fills and ``T.Parallel`` whose lowered form accesses other elements.

    TileLang copies columns of a wider tile by one bulk copy, as if the tile had no other columns. A
    loop over a part of a fragment uses the registers of another part if the threads of the loop do
    not have those of the part.

    The pass computes the elements that both forms write, and those that each value is computed
    from, for all iterations and threads, and for random values of the variables around them. It
    does not compare statements with operations that it does not know.

    Args:
        func: the function after TileLang has lowered its tiles.
        tiles: the function before, with the marks of ``mark_statements``.

    Raises:
        MisloweredError: names the line.

    Before: ``T.copy(tile[:, 0:64], S[peer, 0, 0])`` as one bulk copy from a tile of 80 columns
    After:  MisloweredError; legal programs stay unchanged, without the marks
    """
    samples, lowered = Samples(tiles), marked_statements(func)
    places = Places(tiles, func)
    for number, statement in samples.statements.items():
        after = lowered.get(number)
        if after is not None and not _is_equal(samples, places, statement, after):
            raise MisloweredError(_message(statement.body))
    return func.with_body(_without_marks(func.body))


def _without_marks(stmt: tirx.Stmt) -> tirx.Stmt:
    if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == MARK:
        return stmt.body
    return rewrite_children(stmt, _without_marks)


def _is_equal(samples: Samples, places: Places, statement: Statement, lowered: tirx.Stmt) -> bool:
    """Return whether both forms write equal elements, or one of them is not known."""
    stmt = statement.body
    is_copy = isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) in _COPIES
    regions = list(stmt.value.args[:2]) if is_copy else []
    if any(op_name(region) != "tl.region" for region in regions) or _updates_reducer(stmt):
        return True
    for number in samples.choose(statement, regions):
        values = samples.values(number)
        try:
            most = _bound_of_elements(places, regions, values)
            expected = _writes_of_tile(places, stmt, values, most)
            actual = _writes_of_threads(places, statement, lowered, values, most)
        except (Unknown, NotEvaluable):
            return True
        if actual is not None and not np.array_equal(expected, actual):
            return False
    return True


def _updates_reducer(stmt: tirx.Stmt) -> bool:
    """Return whether points of a ``T.Parallel`` add to one register: each thread has a part of the
    sum until TileLang adds them up."""
    variables = {loop.loop_var for loop in nodes_in(stmt, tirx.For) if is_parallel(loop)}
    return any(
        store.buffer.scope() == FRAGMENT
        and not variables.issubset({v for index in store.indices for v in variables_in(index)})
        and any(
            load.buffer.same_as(store.buffer) for load in nodes_in(store.value, tirx.BufferLoad)
        )
        for store in nodes_in(stmt, tirx.BufferStore)
    )


def _bound_of_elements(places: Places, regions: list[tirx.Call], values: dict) -> int:
    """Return an upper bound of the values of elements, with which regions that begin at an index
    from memory, such as that of a stage, are inside of their tensors."""
    loading = [r for r in regions if any(nodes_in(i, tirx.BufferLoad) for i in r.args[0].indices)]
    for most in ELEMENT_VALUES:
        transfers = TileTransfers(places, most)
        points = Points(values, 1, transfers.load)
        if all(transfers.contains(region, points) for region in loading):
            return most
    return ELEMENT_VALUES[0]


def _writes_of_tile(places: Places, stmt: tirx.Stmt, values: dict, most: int) -> np.ndarray:
    transfers = TileTransfers(places, most)
    points = Points(values, 1, transfers.load)
    if not isinstance(stmt, tirx.Evaluate):
        transfers.run(stmt, points)
    elif op_name(stmt.value) == _FILL:
        transfers.fill(*stmt.value.args[:2], points)
    else:
        transfers.copy(*stmt.value.args[:2], points)
    return transfers.writes()


def _writes_of_threads(
    places: Places, statement: Statement, lowered: tirx.Stmt, values: dict, most: int
) -> np.ndarray | None:
    """Return the writes of the threads that execute ``lowered``; None if there are none."""
    transfers = LoweredTransfers(places, CALLS, most)
    thread = statement.thread
    if thread is None:
        return None
    values = {**values, thread: np.arange(statement.threads)}
    points = Points(values, statement.threads, transfers.load, thread)
    for condition in statement.conditions:
        if thread in variables_in(condition):
            points = points.where(points.at_all(condition).astype(bool))
    if not points.count:
        return None
    transfers.run(lowered, points)
    return transfers.writes()


def _message(stmt: tirx.Stmt) -> str:
    buffers = list({buffer.data: buffer for _, buffer, _ in touches_in(stmt)}.values())
    fragments = [buffer.name for buffer in buffers if buffer.scope() == FRAGMENT]
    if is_parallel(stmt):
        name, expected = "T.Parallel", "T.copy, or T.Parallel over other axes"
    elif op_name(stmt.value) == _FILL:
        name, expected = "T.fill", "T.Parallel over these elements"
    else:
        name, expected = "T.copy", "T.Parallel over these elements"
        buffers = buffers[:2]
    if fragments:
        condition = "with a condition, such as if i < n"
        expected = f"T.Parallel over all elements of {fragments[0]} {condition}"
    return (
        f"{name}: TileLang accesses other elements of {' and '.join(b.name for b in buffers)} than "
        f"the statement names; expected {expected}{location(stmt)}"
    )
