"""Boxes of tensors that statements access, and whether two of them are disjoint."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Range
from tvm.tirx.stmt_functor import ir_transform, substitute

from ...builtins.ranks import RANK
from .accesses import Touch
from .operators import ONLY_IF
from .sizes import LARGEST
from .walk import has_effect, op_name, variables_in

_INDEX, _EXTENTS = "tl.launch_thread_idx", "tl.launch_threads"


@dataclass(frozen=True)
class Surroundings:
    """Statements around a place, outermost first.

    Attributes:
        loops: loops, ``tirx.For`` or ``tirx.While``, also those of ``T.Parallel``.
        conditions: conditions that hold.
        threads: extents of the axes of threads.
        blocks: loops of the block indices.
        values: expressions of the variables that the program binds, shared by all places.
    """

    loops: tuple[tirx.Stmt, ...] = ()
    conditions: tuple[tirx.PrimExpr, ...] = ()
    threads: tuple[tirx.PrimExpr, ...] = ()
    blocks: tuple[tirx.For, ...] = ()
    values: dict[tirx.Var, tirx.PrimExpr] = field(default_factory=dict)

    def inside(self, stmt: tirx.Stmt, case: int) -> Surroundings:
        """Return the surroundings of the inner statement of ``stmt`` with this number."""
        if isinstance(stmt, tirx.For) and stmt.thread_binding is not None:
            return replace(self, blocks=(*self.blocks, stmt))
        if isinstance(stmt, tirx.For | tirx.While):
            return replace(self, loops=(*self.loops, stmt))
        if isinstance(stmt, tirx.IfThenElse):
            condition = tirx.Not(stmt.condition) if case else stmt.condition
            return replace(self, conditions=(*self.conditions, condition))
        if isinstance(stmt, tirx.SBlockRealize) and _EXTENTS in stmt.block.annotations:
            return replace(self, threads=tuple(stmt.block.annotations[_EXTENTS]))
        return self


@dataclass(frozen=True)
class Box:
    """Part of a tensor that a statement accesses in each of its iterations.

    Attributes:
        buffer: the tensor.
        axes: first index and extent on each axis; None if the part is not known.
        around: statements around the access.
    """

    buffer: tirx.Buffer
    axes: tuple[Axis, ...] | None
    around: Surroundings

    @property
    def first_index(self) -> tirx.PrimExpr:
        """First index on the first axis, by the variables of loops only."""
        return _without_values(self.axes[0][0], self.around.values)


def box_of(touch: Touch, around: Surroundings) -> Box:
    """Return the part of a tensor that an access touches."""
    node, buffer, _ = touch
    if op_name(node) == "tl.region":
        starts, extents = node.args[0].indices, [*node.args[2:]]
        extents = [tirx.const(1)] * (len(starts) - len(extents)) + extents
        return Box(buffer, tuple(zip(starts, extents, strict=True)), around)
    if isinstance(node, tirx.Call):
        extent = node.args[1] if op_name(node) == "tl.access_ptr" else None
        if not isinstance(extent, tirx.IntImm) or int(extent) != 1:
            return Box(buffer, None, around)
        node = node.args[0]
    return Box(buffer, tuple(map(_axis, node.indices)), around)


def _axis(index: tirx.PrimExpr) -> Axis:
    """Return first element and extent of an index, which may be a vector of elements."""
    if isinstance(index, tirx.Ramp):
        return index.base, (index.lanes - 1) * index.stride + 1
    return index, tirx.const(1, index.dtype)


def are_disjoint(first: Box, second: Box, shared: int, distances: range | None = None) -> bool:
    """Return whether two boxes have no element in common, in all iterations of the loops around
    them.

    Args:
        shared: number of outer loops whose iteration is the same for both.
        distances: numbers of iterations of the next loop from the first access to the second one;
            None for any iteration of this loop and of those in it.
    """
    if first.axes is None or second.axes is None or not first.buffer.same_as(second.buffer):
        return False
    space = _Space(first.buffer, first.around)
    names: _Names = {}
    for loop in first.around.loops[:shared]:
        space.enter(loop, names)
    later = dict(names)
    if distances is not None:
        loop = first.around.loops[shared]
        space.enter(loop, names)
        space.enter_later(loop, names, later, distances)
        shared += 1
    return space.differ(space.axes_of(first, shared, names), space.axes_of(second, shared, later))


Axis = tuple[tirx.PrimExpr, tirx.PrimExpr]
"""First index and extent of a box on one axis."""
_Names = dict[tirx.Var, tirx.PrimExpr]


class _Space:
    """Ranges of variables and conditions for a proof."""

    def __init__(self, buffer: tirx.Buffer, around: Surroundings) -> None:
        self._buffer = buffer
        self._values = around.values
        self._analyzer = Analyzer()
        self._conditions: list[tirx.PrimExpr] = []
        self._rank = tirx.Var("rank", "int32")
        self._threads: list[tirx.Var] = []
        sizes = {v for size in [*buffer.shape, *buffer.strides] for v in variables_in(size)}
        for variable in (*sizes, self._rank):
            self._analyzer.bind(variable, Range(0, LARGEST))
        for loop in around.blocks:
            block = Range.from_min_extent(loop.min, loop.extent)
            self._analyzer.bind(loop.loop_var, block)

    def enter(self, loop: tirx.Stmt, names: _Names) -> None:
        """Name an iteration of ``loop``."""
        if isinstance(loop, tirx.For):
            low, extent = (self._named(e, names) for e in (loop.min, loop.extent))
            variable = _renamed(loop.loop_var)
            self._analyzer.bind(variable, Range.from_min_extent(low, extent))
            names[loop.loop_var] = variable

    def enter_later(self, loop: tirx.Stmt, names: _Names, later: _Names, distances: range) -> None:
        """Name an iteration of ``loop`` that is later than the one in ``names``."""
        if isinstance(loop, tirx.For):
            distance = tirx.Var("distance", loop.loop_var.dtype)
            self._analyzer.bind(distance, Range(distances.start, distances.stop))
            variable = names[loop.loop_var] + distance * (1 if loop.step is None else loop.step)
            end = self._named(loop.min + loop.extent, later)
            self._conditions.append(variable < end)
            later[loop.loop_var] = variable

    def axes_of(self, box: Box, shared: int, names: _Names) -> list[Axis]:
        """Return the axes of ``box`` by these names of the first ``shared`` loops, and new ones for
        the variables of the other loops and of the threads."""
        names = dict(names)
        self._threads = [tirx.Var("thread", "int32") for _ in box.around.threads]
        for variable, extent in zip(self._threads, box.around.threads, strict=True):
            self._analyzer.bind(variable, Range(0, extent))
        for loop in box.around.loops[shared:]:
            self.enter(loop, names)
        self._conditions += [self._named(c, names) for c in box.around.conditions]
        return [(self._named(start, names), self._named(n, names)) for start, n in box.axes]

    def _named(self, expr: tirx.PrimExpr, names: _Names) -> tirx.PrimExpr:
        """Return ``expr`` with other names. What memory holds is a new variable each time."""
        expr = _without_values(expr, self._values)

        def known(node: tirx.BufferLoad | tirx.Call) -> tirx.PrimExpr | None:
            if op_name(node) == RANK:
                return self._rank
            if op_name(node) == ONLY_IF:
                return node.args[1]
            if op_name(node) == _INDEX and self._threads:
                return self._threads[int(node.args[0])]
            is_unknown = isinstance(node, tirx.BufferLoad) or has_effect(node)
            return tirx.Var("value", node.dtype) if is_unknown else None

        nodes = ["tirx.BufferLoad", "tirx.Call"]
        return substitute(ir_transform(tirx.Evaluate(expr), None, known, nodes).value, names)

    def differ(self, a: list[Axis], b: list[Axis]) -> bool:
        """Return whether the boxes are disjoint on an axis, or in memory."""
        with ExitStack() as stack:
            for condition in self._conditions:
                stack.enter_context(self._analyzer.constraint_scope(condition))
            pairs = [*zip(a, b, strict=True), (self._flat(a), self._flat(b))]
            return any(self._are_apart(*pair) for pair in pairs)

    def _are_apart(self, a: Axis, b: Axis) -> bool:
        is_before, is_after = a[0] + a[1] <= b[0], b[0] + b[1] <= a[0]
        return any(
            map(self._analyzer.can_prove, (is_before, is_after, tirx.Or(is_before, is_after)))
        )

    def _flat(self, axes: list[Axis]) -> Axis:
        """Return the first element of a box in memory, and the number of elements to its end."""
        first, length = tirx.const(0, "int64"), tirx.const(1, "int64")
        stride = tirx.const(1, "int64")
        strides = list(self._buffer.strides)
        for axis in reversed(range(len(axes))):
            stride = tirx.Cast("int64", strides[axis]) if strides else stride
            start, extent = (tirx.Cast("int64", e) for e in axes[axis])
            first, length = first + start * stride, length + (extent - 1) * stride
            stride = stride * tirx.Cast("int64", self._buffer.shape[axis])
        return first, length


def _without_values(expr: tirx.PrimExpr, values: _Names) -> tirx.PrimExpr:
    """Return ``expr`` without the variables of ``values``."""
    while any(variable in values for variable in variables_in(expr)):
        expr = substitute(expr, values)
    return expr


def _renamed(variable: tirx.Var) -> tirx.Var:
    return tirx.Var(variable.name, variable.dtype)
