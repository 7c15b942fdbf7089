"""Keep the values of indices that TVM simplifies wrongly."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from tilelang import transform, tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ...builtins.symmetric import packed_strides
from ..ir.walk import location, nodes_in, op_name, with_span_of
from ..sync.regions.space import IterationSpace, NotEvaluable

Access = tirx.BufferLoad | tirx.BufferStore

_POINTS = 4096, 262_144
"""Numbers of random values of the variables for which an index is computed: the second if the
conditions around the access hold for fewer than ``_MIN_REACHED`` of the first."""
_MIN_REACHED = 64
"""If the conditions hold for fewer of the second number of values, all of them are compared."""
_LIMIT = 1 << 16
"""Upper bound of the random values of a variable without a known range."""


def keep_indices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Change each index to which TVM's ``IterMapSimplify`` would give another value.

    TileLang simplifies flat indices by it. It merges a sum of quotients and remainders into one
    number with one offset, although the terms have different offsets:
    ``(j // 32 + 1) % 2 * 32 + (j % 32 // 16 + 1) % 2 * 16 + j % 16`` becomes ``(j + 32) % 64``.
    Such a sum is the place of an element of a swizzled tile, in a row whose number is constant.

    The pass lets TileLang flatten a copy of the function, and computes both forms of each index for
    random values of the variables. If they differ, it adds an operation without effect. nvcc
    removes it, but TVM does not simplify it.

    Before: ``x[(j // 8 + 1) % 2 * 8 + (j % 8 + 1) % 8]``
    After:  ``x[T.bitwise_or((j // 8 + 1) % 2 * 8 + (j % 8 + 1) % 8, 0)]``
    """
    wrong = _simplified_wrongly(func)
    if not wrong:
        return func
    numbers = itertools.count()

    def change(access: Access) -> Access | None:
        if next(numbers) not in wrong:
            return None
        return _in_buffer(access, access.buffer, list(map(_with_no_op, access.indices)))

    func = _rewrite_accesses(func, change)
    for access in _simplified_wrongly(func).values():
        raise LanguageError(
            f"{access.buffer.name}{list(access.indices)}: TVM simplifies this index to one with "
            "another value; expected an index without // and %, or with positive factors"
            f"{_place(func.body, access)}"
        )
    return func


def _place(body: tirx.Stmt, access: Access) -> str:
    """Return the line of the innermost statement that contains ``access``, for a message."""
    for stmt in nodes_in(body, tirx.Stmt):
        if any(node.same_as(access) for node in nodes_in(stmt, type(access))):
            return location(stmt)
    return ""


def _simplified_wrongly(func: tirx.PrimFunc) -> dict[int, Access]:
    """Return the accesses to whose flat index TileLang gives another value, by their numbers."""
    accesses: list[Access] = []

    def number(access: Access) -> Access:
        accesses.append(access)
        return _in_buffer(access, _copy(access.buffer, str(len(accesses) - 1)), access.indices)

    numbered = _rewrite_accesses(func, number)
    if not accesses:
        return {}
    try:
        flattened = _flat_indices(numbered)
    except tvm.error.InternalError:
        return dict(enumerate(accesses))
    samples, conditions = _Samples(func), _conditions(numbered)
    return {
        number: accesses[number]
        for number, flat_index in flattened.items()
        if samples.differ(accesses[number], flat_index, conditions[number])
    }


def _with_no_op(index: tirx.PrimExpr) -> tirx.PrimExpr:
    if isinstance(index, tirx.Ramp):
        return tirx.Ramp(_with_no_op(index.base), index.stride, index.lanes)
    divides = nodes_in(index, tirx.FloorDiv, tirx.FloorMod)
    return tirx.bitwise_or(index, tirx.const(0, index.dtype)) if divides else index


def _rewrite_accesses(
    func: tirx.PrimFunc, change: Callable[[Access], Access | None]
) -> tirx.PrimFunc:
    """Change the accesses of ``func`` whose indices have quotients or remainders."""

    def change_some(access: Access) -> Access | None:
        divides = any(nodes_in(i, tirx.FloorDiv, tirx.FloorMod) for i in access.indices)
        return change(access) if divides else None

    kinds = ["tirx.BufferLoad", "tirx.BufferStore"]
    return func.with_body(ir_transform(func.body, None, change_some, kinds))


def _in_buffer(access: Access, buffer: tirx.Buffer, indices: list[tirx.PrimExpr]) -> Access:
    """Return ``access`` at other indices or in another buffer."""
    if isinstance(access, tirx.BufferLoad):
        return tirx.BufferLoad(buffer, indices, access.predicate)
    store = tirx.BufferStore(buffer, access.value, indices, access.predicate)
    return with_span_of(access, store)


def _copy(buffer: tirx.Buffer, name: str) -> tirx.Buffer:
    return tirx.decl_buffer(
        buffer.shape, buffer.dtype, name, buffer.data, buffer.strides, buffer.elem_offset
    )


def _flat_indices(func: tirx.PrimFunc) -> dict[int, tirx.PrimExpr]:
    """Return the flat index of each access, by the name of its buffer, a number.

    TileLang drops accesses in branches that do not run.
    """
    with tvm.transform.PassContext():
        mod = transform.FlattenBuffer()(tvm.IRModule({"main": func}))
    accesses = nodes_in(mod["main"].body, tirx.BufferLoad, tirx.BufferStore)
    return {int(a.buffer.name): a.indices[0] for a in accesses if a.buffer.name.isdecimal()}


def _conditions(func: tirx.PrimFunc) -> dict[int, list[tirx.PrimExpr]]:
    """Return the conditions that hold at each access, by the name of its buffer."""
    conditions = collections.defaultdict(list)
    for node in nodes_in(func.body, tirx.IfThenElse, tirx.Call):
        if isinstance(node, tirx.IfThenElse):
            condition, *cases = node.condition, node.then_case, node.else_case
        elif op_name(node) == "tirx.if_then_else":
            condition, *cases = node.args
        else:
            continue
        for case, holds in zip(cases, (condition, tirx.Not(condition)), strict=True):
            for access in (
                nodes_in(case, tirx.BufferLoad, tirx.BufferStore) if case is not None else ()
            ):
                if access.buffer.name.isdecimal():
                    conditions[int(access.buffer.name)].append(holds)
    return conditions


class _Samples(IterationSpace):
    """Values of expressions of a function, for random values of its variables."""

    def __init__(self, func: tirx.PrimFunc, points: int = _POINTS[0]) -> None:
        super().__init__(1, (), {})
        self._func, self._points = func, points
        self._random = np.random.default_rng(0)
        self._numbers: dict[Any, np.ndarray] = {}
        self._ranges = {
            loop.loop_var: (loop.min, loop.extent) for loop in nodes_in(func.body, tirx.For)
        }
        for attribute in nodes_in(func.body, tirx.AttrStmt):
            if attribute.attr_key == "thread_extent":
                self._ranges[attribute.node.var] = (0, attribute.value)

    def differ(
        self, access: Access, flat_index: tirx.PrimExpr, conditions: list[tirx.PrimExpr]
    ) -> bool:
        """Return whether ``flat_index`` is not the flat index of ``access`` where it is reached."""
        buffer = access.buffer
        expected = self.evaluate(buffer.elem_offset)
        strides = buffer.strides or packed_strides(buffer.shape)
        for index, stride in zip(access.indices, strides, strict=True):
            expected = expected + self.evaluate(index) * self.evaluate(stride)
        reached = np.ones(self._points, np.bool_)
        for condition in conditions:
            reached &= self.evaluate(condition).astype(np.bool_)
        is_rare = np.count_nonzero(reached) < _MIN_REACHED
        if is_rare and self._points < _POINTS[-1]:
            return self._more.differ(access, flat_index, conditions)
        return bool(np.any((self.evaluate(flat_index) != expected) & (reached | is_rare)))

    @cached_property
    def _more(self) -> _Samples:
        return _Samples(self._func, _POINTS[-1])

    def evaluate(self, expr: Any) -> Any:
        """Return the values of ``expr``; if it is a vector, those of random elements.

        Variables of loops, blocks and threads are within their ranges. Other variables, and results
        of calls and of loads from a buffer, are any numbers.
        """
        if isinstance(expr, tirx.Ramp):
            lane = self._numbers_for("lane") % int(expr.lanes)
            return self.evaluate(expr.base) + lane * self.evaluate(expr.stride)
        if isinstance(expr, tirx.Broadcast):
            return self.evaluate(expr.value)
        try:
            return super().evaluate(expr)
        except NotEvaluable:
            if isinstance(expr, tirx.Var) and expr in self._ranges:
                low, extent = map(self.evaluate, self._ranges[expr])
                return low + self._numbers_for(expr) % np.maximum(extent, 1)
            if isinstance(expr, tirx.BufferLoad):
                return self._numbers_for(expr.buffer.data)
            return self._numbers_for(getattr(expr, "op", expr))

    def _numbers_for(self, key: Any) -> np.ndarray:
        if key not in self._numbers:
            self._numbers[key] = self._random.integers(0, _LIMIT, self._points)
        return self._numbers[key]
