"""Sets of threads that reach a statement, according to the conditions on the thread index."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from tvm import tirx

from ...builtins.ranks import HOST_VALUES
from .integer_ops import ARITHMETIC, BITWISE, COMPARISONS, DIVISIONS
from .walk import has_effect, nodes_in, op_name, rewrite_children, variables_and_loads

T = TypeVar("T")
_WARP = 32
_INDICES = {
    "tl.get_lane_idx": lambda index: index % _WARP,
    "tl.get_warp_idx": lambda index: index // _WARP,
    "tl.get_warp_idx_sync": lambda index: index // _WARP,
}
_LOGIC = (tirx.And, tirx.Or, tirx.Not)


@dataclass(frozen=True)
class Value:
    """An integer in each thread of a block.

    Attributes:
        values: the integers as an array over the threads, or None if they are unknown.
        varies: whether an unknown value may differ between threads.
    """

    values: np.ndarray | None
    varies: bool = False

    @property
    def differs(self) -> bool:
        """True if the value may differ between threads."""
        return self.varies if self.values is None else bool(np.ptp(self.values))


@dataclass(frozen=True)
class Truth:
    """A condition in each thread.

    Attributes:
        may: threads in which it may hold.
        must: threads in which it certainly holds.
        varies: whether it may differ between threads in which it may hold but need not.
    """

    may: np.ndarray
    must: np.ndarray
    varies: bool = False


@dataclass(frozen=True)
class ThreadSet:
    """Threads that may reach a statement.

    Attributes:
        members: a bool for each thread of the block, by its indices on x, y and z.
        is_exact: whether all of them reach the statement if one of them does.
    """

    members: np.ndarray
    is_exact: bool = True

    @property
    def size(self) -> int:
        return int(np.count_nonzero(self.members))

    @property
    def is_warps(self) -> bool:
        """True if the set consists of whole warps."""
        lanes = self.members.ravel(order="F")
        warps = (lanes[i : i + _WARP] for i in range(0, lanes.size, _WARP))
        return all(warp.all() or not warp.any() for warp in warps)

    @property
    def names(self) -> str:
        """Indices of the threads for a message, such as ``threads 0 to 63``.

        If the block has several axes, each index is a tuple (x, y, z).
        """
        indices = [tuple(map(int, index)) for index in np.argwhere(self.members)]
        labels: list[object] = list(indices)
        if self.members.shape[1:] == (1, 1):
            labels = [x for x, _, _ in indices]
            if len(indices) > 2 and indices[-1][0] - indices[0][0] == len(indices) - 1:
                return f"threads {labels[0]} to {labels[-1]}"
        ellipsis = ", ..." if len(labels) > 4 else ""
        return f"thread{'s' * (len(labels) != 1)} {', '.join(map(str, labels[:4]))}{ellipsis}"


class Block:
    """The threads of one block, and the values of expressions in each thread."""

    def __init__(self, axes: Mapping[int, tuple[tirx.Var | None, int]]) -> None:
        """
        Args:
            axes: index variable and extent of the axes 0, 1 and 2. A missing axis has one thread.
        """
        self.index = axes[0][0] if 0 in axes else None
        """The thread index on x."""
        self.extents = tuple(axes[a][1] if a in axes else 1 for a in range(3))
        self._indices: dict[tirx.Var, np.ndarray] = {}
        self._values: dict[tirx.Var, Value] = {}
        for axis, (variable, extent) in axes.items():
            if variable is not None:
                shape = [-1 if a == axis else 1 for a in range(3)]
                self._indices[variable] = np.arange(extent, dtype=np.int64).reshape(shape)
        x, y, z = np.indices(self.extents, np.int64)
        self._linear = x + self.extents[0] * (y + self.extents[1] * z)
        self.bound: dict[tirx.Var, tirx.PrimExpr] = {}
        """Values of bound variables, as expressions."""
        self.divided: set[tirx.Var] = set()
        """Variables of loops whose iterations are divided among the threads."""

    @property
    def all(self) -> ThreadSet:
        return ThreadSet(np.ones(self.extents, bool))

    def value(self, expr: tirx.PrimExpr) -> Value:
        """Return the value of the integer ``expr`` in each thread."""
        if isinstance(expr, tirx.IntImm):
            return Value(np.int64(int(expr)).reshape(1, 1, 1))
        if isinstance(expr, tirx.Var):
            return self._variable(expr)
        if isinstance(expr, tirx.Cast) and str(expr.dtype).startswith(("int", "uint")):
            return self.value(expr.value)
        if isinstance(expr, tirx.BufferLoad):
            varies = "local" in expr.buffer.scope()
            return Value(None, varies or any(self.value(i).differs for i in expr.indices))
        if type(expr) in COMPARISONS or isinstance(expr, _LOGIC):
            truth = self.truth(expr)
            decided = np.array_equal(truth.may, truth.must)
            return Value(truth.may.astype(np.int64) if decided else None, truth.varies)
        if type(expr) in ARITHMETIC:
            return self._apply(ARITHMETIC[type(expr)], expr.a, expr.b, type(expr) in DIVISIONS)
        if op_name(expr) in BITWISE:
            return self._apply(BITWISE[op_name(expr)], *expr.args)
        if op_name(expr) in _INDICES:
            return Value(_INDICES[op_name(expr)](self._linear))
        return Value(None, self._depends(expr))

    def truth(self, expr: tirx.PrimExpr) -> Truth:
        """Return the value of the condition ``expr`` in each thread."""
        if isinstance(expr, (tirx.And, tirx.Or)):
            a, b = self.truth(expr.a), self.truth(expr.b)
            join = operator.and_ if isinstance(expr, tirx.And) else operator.or_
            return Truth(join(a.may, b.may), join(a.must, b.must), a.varies or b.varies)
        if isinstance(expr, tirx.Not):
            a = self.truth(expr.a)
            return Truth(~a.must, ~a.may, a.varies)
        if isinstance(expr, tirx.Var) and expr in self.bound:
            return self.truth(self.bound[expr])
        if op_name(expr) == "tirx.likely":
            return self.truth(expr.args[0])
        if op_name(expr) == "tl.tl_shuffle_elect":
            group = int(expr.args[0]) or self._linear.size
            return replace(_certain(self._linear % group == 0), varies=True)
        if type(expr) in COMPARISONS:
            value = self._apply(COMPARISONS[type(expr)], expr.a, expr.b)
        else:
            value = self.value(expr)
        if value.values is not None:
            return _certain(value.values != 0)
        may = np.ones((1, 1, 1), bool)
        return Truth(may, ~may, value.varies)

    def _variable(self, variable: tirx.Var) -> Value:
        if variable in self._indices:
            return Value(self._indices[variable])
        if variable in self.bound:
            if variable not in self._values:
                self._values[variable] = self.value(self.bound[variable])
            return self._values[variable]
        return Value(None, variable in self.divided)

    def _apply(
        self, function: Callable, a: tirx.PrimExpr, b: tirx.PrimExpr, divides: bool = False
    ) -> Value:
        x, y = self.value(a), self.value(b)
        if x.values is None or y.values is None or (divides and not y.values.all()):
            return Value(None, x.differs or y.differs)
        return Value(function(x.values, y.values))

    def _depends(self, expr: tirx.PrimExpr) -> bool:
        """Return whether an expression of another kind may differ between threads."""
        return any(self.value(node).differs for node in variables_and_loads(expr)) or any(
            not (op_name(call) in HOST_VALUES or _is_function(call))
            for call in nodes_in(expr, tirx.Call)
        )


def _is_function(call: tirx.Call) -> bool:
    """Return whether the result of ``call`` depends only on its arguments."""
    return op_name(call).startswith("tirx.") and not has_effect(call)


def _certain(holds: np.ndarray) -> Truth:
    return Truth(holds, holds)


Visit = Callable[[tirx.Stmt, ThreadSet, "Block | None"], tirx.Stmt]


def disjoint(parts: Iterable[tuple[np.ndarray, T]]) -> list[tuple[np.ndarray, list[T]]]:
    """Return sets of threads that share none, each with the values of the parts in it."""
    sets: list[tuple[np.ndarray, list[T]]] = []
    for threads, value in parts:
        united, values, others = threads, [value], []
        for own, earlier in sets:
            if (own & threads).any():
                united, values = united | own, earlier + values
            else:
                others.append((own, earlier))
        sets = [*others, (united, values)]
    return sets


def follow_threads(body: tirx.Stmt, visit: Visit) -> tirx.Stmt:
    """Replace each statement of ``body`` by the result of ``visit``, outer statements first.

    ``visit(stmt, threads, block)`` receives the threads that reach the statement, and their block,
    which is None outside of a kernel.
    """
    return _Follow(visit).follow(body, ThreadSet(np.ones((1, 1, 1), bool)))


class _Follow:
    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._block: Block | None = None
        self._variables: dict[int, tirx.Var] = {}
        self._extents: dict[int, int] = {}

    def follow(self, stmt: tirx.Stmt, threads: ThreadSet) -> tirx.Stmt:
        threads = self._enter(stmt, threads)
        stmt = self._visit(stmt, threads, self._block)
        block = self._block
        if isinstance(stmt, tirx.IfThenElse) and block is not None:
            truth = block.truth(stmt.condition)
            exact = threads.is_exact and not truth.varies
            sides = [ThreadSet(threads.members & truth.may, exact)]
            sides += [ThreadSet(threads.members & ~truth.must, exact)]
            cases = iter(sides)
            return rewrite_children(stmt, lambda s: self.follow(s, next(cases)))
        inner_threads = self._inside(stmt, threads, block) if block is not None else threads
        return rewrite_children(stmt, lambda s: self.follow(s, inner_threads))

    def _inside(self, stmt: tirx.Stmt, threads: ThreadSet, block: Block) -> ThreadSet:
        if isinstance(stmt, tirx.Bind):
            block.bound[stmt.var] = stmt.value
        if isinstance(stmt, tirx.While):
            truth = block.truth(stmt.condition)
        elif isinstance(stmt, tirx.For):
            if stmt.kind == tirx.ForKind.PARALLEL:
                block.divided.add(stmt.loop_var)
                return ThreadSet(threads.members, False)
            truth = block.truth(stmt.extent > 0)
        else:
            return threads
        return ThreadSet(threads.members & truth.may, threads.is_exact and not truth.varies)

    def _enter(self, stmt: tirx.Stmt, threads: ThreadSet) -> ThreadSet:
        """Record thread indices and extents; return the threads inside ``stmt``."""
        if op_name(getattr(stmt, "value", None)) == "tl.launch_thread_idx":
            self._variables[int(stmt.value.args[0])] = stmt.var
            return threads
        if isinstance(stmt, tirx.SBlockRealize):
            extents = stmt.block.annotations.get("tl.launch_threads")
            if extents is None:
                return threads
            self._extents = {axis: int(extent) for axis, extent in enumerate(extents)}
        elif isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            tag = stmt.node.thread_tag
            if not tag.startswith("threadIdx."):
                return threads
            self._variables["xyz".index(tag[-1])] = stmt.node.var
            self._extents["xyz".index(tag[-1])] = int(stmt.value)
        else:
            return threads
        bound = self._block.bound if self._block is not None else {}
        self._block = Block({a: (self._variables.get(a), n) for a, n in self._extents.items()})
        self._block.bound.update(bound)
        return self._block.all
