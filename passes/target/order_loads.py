"""Order the loads of pipelined loops after the stores to the same tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from tilelang import tvm
from tvm import tirx
from tvm.ir import structural_equal
from tvm.target import Target

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.accesses import READS, WRITES, accesses_of, is_private, name_of, touches_in
from ..ir.block_barrier import is_sync_threads, sync_threads
from ..ir.boxes import Box, Surroundings, are_disjoint, box_of
from ..ir.group import heap_tensors
from ..ir.implicit import implicit_of
from ..ir.memory_order import pointers_written
from ..ir.pipelined_loops import (
    COPIES,
    is_pipelined,
    loads_in,
    may_use_tma,
    tiles_loaded_in,
    uses_tma,
)
from ..ir.sizes import LARGEST
from ..ir.tma import TMA_SM, may_have_producer, sm_of
from ..ir.walk import (
    arrows,
    builtins_in,
    calls_in,
    children_of,
    flatten,
    headers_of,
    is_leaf,
    is_parallel,
    line_of,
    nodes_in,
    op_name,
    rewrite_children,
    variables_in,
)


def order_loads(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Order the loads of ``T.Pipelined`` and the stores to the same tensor.

    TileLang issues the loads of a pipelined loop iterations ahead. It does not compare them with
    the stores to the tensor that they read. Producer warps also overtake the statements after the
    loop: they load for the next iteration of a loop around it. Two accesses need an order only if
    they may have an element in common: boxes of elements are compared for all iterations, and an
    index that depends on memory may have any value. Accesses of a symmetric tensor are only
    compared if the program synchronizes ranks explicitly and their rank index is the same.

    - A store in the loop is refused if loads that TileLang issues before it read what it stores,
      or if it may overwrite what a load still reads. TileLang waits for a load before the first
      statement that reads its tile. No barrier in the loop orders the TMA, which reads by the async
      proxy, so its loads are compared with the stores of all iterations.
    - Producer warps read the indices, conditions and extents of loads, and consumers do not wait
      for these reads. A store after them is refused.
    - In a kernel with producer warps, barriers are inserted: before the loop, if it loads what
      statements before it store, or statements of an earlier iteration of a loop around it; and
      before statements that overwrite what the loop loads in such an iteration. TileLang moves a
      statement that writes registers of the consumers after all barriers, so a store in it is
      refused.
    - A ``fence.proxy.async`` is inserted before the loop if the TMA loads what threads store.

    Raises:
        LanguageError: names the tensor, and the lines of the store and of the load.

    Before: ``for k in range(n): for j in T.Pipelined(m): T.copy(y[j], tile); ...; y[k, i] = ...``
    After:  ``for k in range(n): T.sync_threads(); T.fence_proxy_async(); for j in ...``
    """
    program = _Program(func)
    orders: dict[tirx.Stmt, _Order] = {}
    is_hopper, may_specialize = sm_of(target) >= TMA_SM, may_have_producer(target)
    for loop in program.loops:
        loop.has_producer = may_specialize and uses_tma(loop.stmt)
        loads = program.early_loads(loop, is_hopper)
        for load in loads:
            for store in program.stores:
                if store.data.same_as(load.access.data) and program.needs_order(store, load.access):
                    _verify(program, loop, load, store)
                    for stmt, order in _orders_of(program, func.body, loop, load, store):
                        orders[stmt] = orders.get(stmt, _Order()) | order
    return func.with_body(_insert(func.body, orders)) if orders else func


@dataclass(frozen=True)
class _Access:
    """An access of memory.

    Attributes:
        stmt: the statement, which has this number in program order.
        mode: ``READS``, ``WRITES`` or both.
        is_region: whether it is an operand of an operator on tiles.
    """

    stmt: tirx.Stmt
    number: int
    box: Box
    mode: int
    is_region: bool = False

    @property
    def data(self) -> tirx.Var:
        return self.box.buffer.data


@dataclass(frozen=True)
class _Load:
    """A read of a tensor that TileLang may issue ahead.

    Attributes:
        tiles: pointers of the tiles that are loaded, or for which a value is read.
        is_value: whether an index, a condition or an extent of a load is read.
        is_bulk: whether the TMA may read.
    """

    access: _Access
    tiles: set[tirx.Var]
    is_value: bool
    is_bulk: bool


@dataclass
class _Loop:
    """A pipelined loop.

    Attributes:
        around: statements around it.
        begin, end: numbers of the loop, and of the first statement after it.
        has_producer: whether producer warps may load its tiles.
    """

    stmt: tirx.For
    around: Surroundings
    begin: int
    end: int = 0
    has_producer: bool = False

    @property
    def distance(self) -> int:
        """Number of iterations that TileLang issues a load ahead, at most."""
        stages = [int(s) for s in self.stmt.annotations.get("tl_pipeline_stage", ())]
        return max(stages) - min(stages) if stages else int(self.stmt.annotations["num_stages"])

    def contains(self, access: _Access) -> bool:
        return self.begin <= access.number < self.end

    def may_move(self, access: _Access) -> bool:
        """Return whether TileLang may move the statement of an access into both roles of warps: a
        definition before the loop, without another loop or condition between them."""
        if not self.has_producer or access.number >= self.begin or not _is_definition(access.stmt):
            return False
        other, own = access.box.around, self.around
        return (len(other.loops), len(other.conditions)) == (len(own.loops), len(own.conditions))


@dataclass(frozen=True)
class _Order:
    """A barrier and a fence before a statement, and the stores that they follow."""

    stores: frozenset[tirx.Stmt] = frozenset()
    barrier: bool = False
    fence: bool = False

    def __or__(self, other: _Order) -> _Order:
        return _Order(
            self.stores | other.stores, self.barrier or other.barrier, self.fence or other.fence
        )


class _Program:
    """Accesses of memory and pipelined loops, in program order."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        implicit = implicit_of(func)
        params = func.params[len(func.params) - len(implicit) :]
        self._heap = {tensor.data for tensor in heap_tensors(func)}
        self._inferred: set[tirx.Var] = set()
        if any(not parameter.scratch for parameter in implicit):
            self._inferred = self._heap | {func.buffer_map[param].data for param in params}
        self._number = 0
        self.accesses: list[_Access] = []
        self.loops: list[_Loop] = []
        self._visit(func.body, Surroundings())
        self.stores = [a for a in self.accesses if a.mode & WRITES and self._is_tensor(a)]

    def _visit(self, stmt: tirx.Stmt, around: Surroundings) -> None:
        self._number += 1
        loop = None
        if isinstance(stmt, tirx.For) and is_pipelined(stmt):
            loop = _Loop(stmt, around, self._number)
            self.loops.append(loop)
        for node in _own_nodes(stmt):
            moved = {arg for c in builtins_in(node) if builtin_of(c).moves for arg in c.args}
            for touch in touches_in(node):
                access, _, mode = touch
                is_first = access in moved
                box = self._box_after(access.args[0], around) if is_first else box_of(touch, around)
                self._add(stmt, box, mode, op_name(access) == "tl.region")
            for pointer in calls_in(node, lambda call: op_name(call) == "tirx.address_of"):
                if isinstance(pointer.args[0], tirx.BufferLoad):
                    self._add(stmt, self._box_after(pointer.args[0], around), READS | WRITES)
        if isinstance(stmt, tirx.Bind):
            around.values[stmt.var] = stmt.value
        for case, child in enumerate(children_of(stmt)):
            self._visit(child, around.inside(stmt, case))
        if loop is not None:
            loop.end = self._number + 1

    def _add(self, stmt: tirx.Stmt, box: Box, mode: int, is_region: bool = False) -> None:
        self.accesses.append(_Access(stmt, self._number, box, mode, is_region))

    def _box_after(self, first: tirx.BufferLoad, around: Surroundings) -> Box:
        """Return what may be accessed by the address of an element: the tensor, or the copy of a
        symmetric tensor on one rank."""
        buffer = first.buffer
        if buffer.data not in self._heap:
            return Box(buffer, None, around)
        rest = ((tirx.const(0, extent.dtype), extent) for extent in buffer.shape[1:])
        return Box(buffer, ((first.indices[0], tirx.const(1)), *rest), around)

    def needs_order(self, first: _Access, second: _Access) -> bool:
        """Return whether two accesses of one tensor need an order within the block. An atomic
        operation is one access, and signals and waits of the program order accesses of copies on
        different ranks."""
        if first is second:
            return False
        boxes = first.box, second.box
        if first.data not in self._heap or any(box.axes is None for box in boxes):
            return True
        return structural_equal(*(box.first_index for box in boxes))

    def _is_tensor(self, access: _Access) -> bool:
        """Return whether an access is of a tensor whose accesses the inference does not order."""
        return access.box.buffer.scope() == "global" and access.data not in self._inferred

    def early_loads(self, loop: _Loop, has_tma: bool) -> list[_Load]:
        """Return the reads that TileLang may issue ahead for iterations of ``loop``."""
        moved = [access.stmt for access in self.accesses if loop.may_move(access)]
        early = _early_statements(loop, moved)
        loads = []
        for access in self.accesses:
            stmt = access.stmt
            if access.mode & READS and stmt in early and self._is_tensor(access):
                is_copy = access.is_region and op_name(stmt.value) in COPIES
                is_value = not is_copy and not _loads_elements(stmt)
                is_bulk = has_tma and is_copy and may_use_tma(stmt.value)
                loads.append(_Load(access, early[stmt], is_value, is_bulk))
        return loads

    def reads_tile(self, load: _Load, until: _Access) -> bool:
        """Return whether a statement after ``load``, at most ``until``, reads what it loads."""
        return any(
            access.data in load.tiles and access.mode & READS
            for access in self.accesses
            if load.access.number < access.number <= until.number
        )

    def uses_after(self, data: set[tirx.Var], stmt: tirx.Stmt) -> bool:
        """Return whether statements after ``stmt`` read memory of ``data``."""
        inner = set(nodes_in(stmt, tirx.Stmt))
        last = max(access.number for access in self.accesses if access.stmt in inner)
        return any(a.number > last and a.mode & READS and a.data in data for a in self.accesses)


def _own_nodes(stmt: tirx.Stmt) -> list:
    """Return what ``stmt`` evaluates itself: the statement, or its conditions and extents."""
    return [stmt] if is_leaf(stmt) else headers_of(stmt)


def _loads_elements(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` stores an element of a tile."""
    return isinstance(stmt, tirx.BufferStore) and stmt.buffer.scope().startswith("shared")


def _is_definition(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` defines a variable of each thread."""
    is_register = isinstance(stmt, tirx.BufferStore) and is_private(stmt.buffer)
    return is_register or isinstance(stmt, tirx.Bind)


def _early_statements(loop: _Loop, moved: list[tirx.Stmt]) -> dict[tirx.Stmt, set[tirx.Var]]:
    """Return the statements that TileLang may run ahead, with the tiles for which it does: loads of
    tiles in ``loop``, conditions and loops around these, and definitions of what these read.

    Args:
        moved: definitions before the loop that TileLang may move to the producer.
    """
    leaves = [*((stmt, []) for stmt in moved), *_leaves_of(loop.stmt, [])]
    early: dict[tirx.Stmt, set[tirx.Var]] = {}
    for leaf, path in leaves:
        if loads_in(leaf) and not _stays_in_place(leaf, path, loop):
            early[leaf] = tiles_loaded_in(leaf)
    before: dict[tirx.Stmt, int] = {}
    while before != (before := {stmt: len(tiles) for stmt, tiles in early.items()}):
        needed: dict[tirx.Var, set[tirx.Var]] = {}
        for leaf, path in leaves:
            for stmt in path if leaf in early else ():
                early.setdefault(stmt, set()).update(early[leaf])
        for stmt, tiles in early.items():
            for variable in _needed_by(stmt):
                needed.setdefault(variable, set()).update(tiles)
        for leaf, _ in leaves:
            for variable in _defined_by(leaf) & needed.keys():
                early.setdefault(leaf, set()).update(needed[variable])
    return early


def _stays_in_place(leaf: tirx.Stmt, path: list[tirx.Stmt], loop: _Loop) -> bool:
    """Return whether TileLang runs a load in the statements of ``path`` in program order.

    It moves no statement that also stores to a tensor, but producers run loops of ``T.Parallel``.
    With producers, consumers make copies under a condition that is not one of the whole iteration.
    """
    inner = path[1:]
    loops = (s for s in inner if isinstance(s, tirx.For))
    if any(_stores(s) for s in loops if not (loop.has_producer and is_parallel(s))):
        return True
    if not loop.has_producer or not isinstance(leaf, tirx.Evaluate):
        return False
    return any(isinstance(s, tirx.IfThenElse) for s in dropwhile(_has_one_case, inner))


def _has_one_case(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None


def _leaves_of(stmt: tirx.Stmt, path: list[tirx.Stmt]) -> Iterator[tuple[tirx.Stmt, list]]:
    """Yield the statements in ``stmt`` without inner ones, and those around each."""
    if is_leaf(stmt):
        yield stmt, path
    for child in children_of(stmt):
        yield from _leaves_of(child, [*path, stmt])


def _stores(stmt: tirx.Stmt) -> bool:
    return any(buffer.scope() == "global" for buffer in accesses_of(stmt).writes.values())


def _needed_by(stmt: tirx.Stmt) -> set[tirx.Var]:
    """Return the variables and the memory of the block that ``stmt`` itself reads."""
    nodes = _own_nodes(stmt)
    reads = {d for d, b in accesses_of(*nodes).reads.items() if b.scope() != "global"}
    return reads.union(*map(variables_in, nodes))


def _defined_by(leaf: tirx.Stmt) -> set[tirx.Var]:
    if isinstance(leaf, tirx.Bind):
        return {leaf.var}
    return {d for d, b in accesses_of(leaf).writes.items() if b.scope() != "global"}


def _verify(program: _Program, loop: _Loop, load: _Load, store: _Access) -> None:
    """Refuse a store that a load of ``loop`` may overtake, or that may overtake the load."""
    first, depth = load.access, len(loop.around.loops)
    is_later = store.number > first.number
    is_inside = loop.contains(store) and loop.contains(first)
    if is_inside and not _is_by_builtin(store):  # pin_pipelined refuses these
        boxes = store.box, first.box
        start = 1 if is_later else 0
        distances = [range(n, n + 1) for n in range(start, loop.distance + 1)]
        if not all(are_disjoint(*boxes, depth, d) for d in distances):
            raise _error("which T.Pipelined loads iterations ahead; expected ", store, load)
        later = range(loop.distance + 1, LARGEST)
        if load.is_bulk and not are_disjoint(*boxes, depth, later):
            problem = (
                "which the TMA loads in a later iteration without a fence; expected "
                "disable_tma=True for this load, "
            )
            raise _error(problem, store, load)
        waits = program.reads_tile(load, store)
        if is_later and not waits and not are_disjoint(*boxes, depth + 1):
            problem = (
                "whose load by T.Pipelined may not have ended; expected a statement between both "
                "that reads the loaded tile, "
            )
            raise _error(problem, store, load)
    if loop.has_producer and load.is_value and is_later:
        shared = min(_common_loops(store, first), depth + is_inside)
        if not are_disjoint(store.box, first.box, shared):
            problem = (
                "which producer warps may still read for an index, a condition or an extent of "
                "T.Pipelined; expected "
            )
            raise _error(problem, store, load)


def _is_by_builtin(store: _Access) -> bool:
    pointers = (p for call in builtins_in(store.stmt) for p in pointers_written(call))
    return any(pointer.buffer.data.same_as(store.data) for pointer in pointers)


def _orders_of(
    program: _Program, body: tirx.Stmt, loop: _Loop, load: _Load, store: _Access
) -> Iterator[tuple[tirx.Stmt, _Order]]:
    """Yield what a load of ``loop`` and a store need that are in different iterations of the loops
    around it, or of which the store is before it: statements, and what is inserted before these."""
    is_before = store.number < loop.begin
    shared = min(_common_loops(store, load.access), len(loop.around.loops))
    is_loaded = _is_later(store, load.access, shared) or (
        is_before and not are_disjoint(store.box, load.access.box, shared)
    )
    if is_loaded and (loop.has_producer or load.is_bulk):
        yield loop.stmt, _Order(frozenset({store.stmt}), loop.has_producer, load.is_bulk)
    if not loop.has_producer:
        return
    place = _beside(body, store.stmt, loop.stmt) if is_before else loop.stmt
    if is_loaded and is_before:
        registers = {d for d, b in accesses_of(place).writes.items() if is_private(b)}
        if program.uses_after(registers, place):
            problem = (
                "which T.Pipelined loads, in a statement that TileLang moves to the consumer "
                "warps, because it also writes registers; expected the store in a statement of its "
                "own, "
            )
            raise _error(problem, store, load)
    if (is_before or load.is_value) and _is_later(load.access, store, shared):
        yield place, _Order(barrier=True)


def _common_loops(first: _Access, second: _Access) -> int:
    """Return the number of loops around both accesses."""
    pairs = zip(first.box.around.loops, second.box.around.loops, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].same_as(pair[1]), pairs))


def _is_later(first: _Access, second: _Access, shared: int) -> bool:
    """Return whether ``second``, in a later iteration of one of the first ``shared`` loops around
    both, may access what ``first`` does."""
    later = range(1, LARGEST)
    return not all(are_disjoint(first.box, second.box, n, later) for n in range(shared))


def _beside(body: tirx.Stmt, stmt: tirx.Stmt, other: tirx.Stmt) -> tirx.Stmt:
    """Return the outermost statement in ``body`` that contains ``stmt`` and not ``other``."""
    inner = nodes_in(body, tirx.Stmt)
    if not any(s.same_as(other) for s in inner):
        return body
    child = next(c for c in children_of(body) if any(map(stmt.same_as, nodes_in(c, tirx.Stmt))))
    return _beside(child, stmt, other)


def _insert(stmt: tirx.Stmt, orders: Mapping[tirx.Stmt, _Order]) -> tirx.Stmt:
    """Insert barriers and fences before the statements of ``orders``."""
    before: list[tirx.Stmt] = []

    def visit(inner: tirx.Stmt) -> tirx.Stmt:
        new = _insert(inner, orders)
        if inner in orders:
            new = flatten([*_statements_of(orders[inner], before), new])
        if isinstance(stmt, tirx.SeqStmt):
            before.append(inner)
        return new

    return rewrite_children(stmt, visit)


def _statements_of(order: _Order, before: list[tirx.Stmt]) -> Iterator[tirx.Stmt]:
    """Yield the barrier and the fence of ``order`` that are missing after ``before``."""
    if order.barrier and not _has_barrier(order.stores, before):
        yield sync_threads()
    if order.fence:
        yield tirx.Evaluate(tirx.call_intrin("handle", tvm.ir.Op.get("tl.fence_proxy_async")))


def _has_barrier(stores: frozenset[tirx.Stmt], before: list[tirx.Stmt]) -> bool:
    """Return whether a barrier follows the last of ``stores`` in a sequence of statements."""
    for stmt in reversed(before):
        if is_sync_threads(stmt):
            return True
        if not stores.isdisjoint(nodes_in(stmt, tirx.Stmt)):
            return False
    return False


def _error(problem: str, store: _Access, load: _Load) -> LanguageError:
    lines = arrows([("store", line_of(store.stmt)), ("load", line_of(load.access.stmt))])
    what = f"stores to {store.box.buffer.name}, {problem}another tensor, or T.serial"
    return LanguageError(f"{name_of(store.stmt)}: {what}{lines}")
