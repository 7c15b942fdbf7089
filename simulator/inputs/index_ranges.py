"""Ranges of integers that a program reads as indices, counts or bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from ...builtins.ranks import RANK, WORLD_SIZE
from ...passes.ir.accesses import written_tensors
from ...passes.ir.walk import nodes_in, op_name, variables_in
from ...runtime.plans.parameters import Shape

Range = tuple[int, int]
"""Lowest and highest legal value."""
_INFINITE = 1 << 40
_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def index_ranges(
    func: tirx.PrimFunc, world_size: int, shapes: Mapping[str, Shape]
) -> dict[str, Range]:
    """Return the ranges of the integer tensors that ``func`` only reads, as far as it shows them.

    An element may be an index (``A[index[i]]`` stays inside of A), a count (the extent of a loop
    whose variable is an index), or the bound of a comparison (``if i < length[b]``). What a program
    does with a value otherwise says nothing.

    Args:
        shapes: of its tensors, rank axis included.
    """
    finder = _Finder(func, world_size, shapes)
    finder.visit()
    return {
        name: (low, high)
        for name, (low, high) in finder.ranges.items()
        if low <= high and high < _INFINITE
    }


@dataclass
class _Finder:
    func: tirx.PrimFunc
    world_size: int
    shapes: Mapping[str, Shape]
    ranges: dict[str, Range] = field(default_factory=dict)

    def visit(self) -> None:
        rank = tirx.Var("rank", "int32")
        self._analyzer = tvm.arith.Analyzer()
        self._analyzer.bind(rank, tvm.ir.Range(0, self.world_size))
        self._values = self._inputs()
        self._bound: dict[tirx.Var, tirx.PrimExpr] = {}
        self._counts: list[tuple[tirx.Var, tirx.PrimExpr]] = []
        """Variables of loops whose extents depend on an input."""

        def group(call: tirx.Call) -> tirx.PrimExpr | None:
            if op_name(call) == RANK:
                return rank
            is_size = op_name(call) == WORLD_SIZE
            return tirx.IntImm("int32", self.world_size) if is_size else None

        body = substitute(self.func.body, self._extents())
        body = ir_transform(body, None, group, ["tirx.Call"])
        body = ir_transform(body, None, self._value, ["tirx.BufferLoad"])
        nodes = nodes_in(body, tirx.Stmt, tirx.PrimExpr)
        for node in nodes:
            if isinstance(node, tirx.Bind):
                self._bound[node.var] = node.value
            elif isinstance(node, tirx.For):
                self._loop(node)
        for node in nodes:
            if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
                self._access(node.buffer, node.indices, [1] * len(node.indices))
            elif op_name(node) == "tl.region":
                load, _, *sizes = node.args
                if isinstance(load, tirx.BufferLoad):  # else the region of an integer input
                    self._access(load.buffer, load.indices, sizes)
            elif isinstance(node, _COMPARISONS):
                self._comparison(node)

    def _inputs(self) -> dict[tirx.Var, tuple[str, tirx.Var]]:
        """Return a variable for the elements of each integer tensor that is only read, by data."""
        written = written_tensors(self.func.body)
        return {
            b.data: (b.name, tirx.Var(b.name, b.dtype))
            for b in self.func.buffer_map.values()
            if b.data not in written and str(b.dtype) in ("int32", "int64", "uint32", "uint64")
        }

    def _extents(self) -> dict[tirx.Var, tirx.PrimExpr]:
        """Return the dynamic extents."""
        return {
            extent: tirx.IntImm(extent.dtype, size)
            for b in self.func.buffer_map.values()
            if b.name in self.shapes  # not a counter of a kernel that the plan adds
            for extent, size in zip(b.shape, self.shapes[b.name], strict=True)
            if isinstance(extent, tirx.Var)
        }

    def _value(self, load: tirx.BufferLoad) -> tirx.PrimExpr | None:
        value = self._values.get(load.buffer.data)
        return value[1] if value else None

    def _loop(self, loop: tirx.For) -> None:
        extent = self._inlined(loop.extent)
        if self._input_in(extent):
            self._counts.append((loop.loop_var, extent + loop.min))
        else:
            self._analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, extent))

    def _access(self, buffer: tirx.Buffer, indices, sizes) -> None:
        shape = self.shapes.get(buffer.name, tuple(buffer.shape))
        for index, size, extent in zip(indices, sizes, shape, strict=False):
            size, extent = _constant(size), _constant(extent)
            if size is not None and extent is not None:
                index = self._inlined(index)
                self._limit(index, 0, extent - size)
                for variable, count in self._counts:
                    _, high = self._solved(index, variable, 0, extent - size)
                    if high < _INFINITE:
                        self._limit(count, 0, high + 1)

    def _comparison(self, node) -> None:
        for side, bound in ((node.a, node.b), (node.b, node.a)):
            side, bound = self._inlined(side), self._inlined(bound)
            low, high = self._bounds(bound)
            if self._input_in(side) and not self._input_in(bound) and high < _INFINITE:
                is_equal = isinstance(node, (tirx.EQ, tirx.NE))
                self._limit(side, low if is_equal else min(low, 0), high + (not is_equal))

    def _limit(self, expr: tirx.PrimExpr, low: int, high: int) -> None:
        """Note that ``expr`` is in this range."""
        for name, value in self._values.values():
            smallest, largest = self._solved(expr, value, low, high)
            if largest < _INFINITE:
                previous = self.ranges.get(name, (max(0, smallest), largest))
                self.ranges[name] = max(previous[0], smallest), min(previous[1], largest)

    def _solved(self, expr: tirx.PrimExpr, value: tirx.Var, low: int, high: int) -> Range:
        """Return for which values ``expr``, linear in ``value``, is surely in a range."""
        nothing = -_INFINITE, _INFINITE
        if value not in variables_in(expr):
            return nothing
        linear = tvm.arith.detect_linear_equation(expr, [value])
        if len(linear) != 2 or (factor := _constant(linear[0])) is None or factor <= 0:
            return nothing
        smallest, largest = self._bounds(linear[1])
        if largest >= _INFINITE or smallest <= -_INFINITE:
            return nothing
        return -((smallest - low) // factor), math.floor((high - largest) / factor)

    def _bounds(self, expr: tirx.PrimExpr) -> Range:
        if str(expr.dtype).rstrip("0123456789") not in ("int", "uint"):
            return -_INFINITE, _INFINITE
        bound = self._analyzer.const_int_bound(expr)
        return int(bound.min_value), int(bound.max_value)

    def _inlined(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return ``expr`` with the values of named variables, casts left out."""
        for _ in range(8):
            bindings = {v: self._bound[v] for v in variables_in(expr) if v in self._bound}
            if not bindings:
                break
            expr = substitute(expr, bindings)
        return self._analyzer.simplify(expr)

    def _input_in(self, expr: tirx.PrimExpr) -> bool:
        return any(value in variables_in(expr) for _, value in self._values.values())


def _constant(expr) -> int | None:
    return int(expr) if isinstance(expr, (int, tirx.IntImm)) else None
