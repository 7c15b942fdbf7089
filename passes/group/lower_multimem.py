"""Replace multimem operations on symmetric tensors by accesses to the copy of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from functools import reduce
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins import atomics, memory
from ...builtins.declaration.qualifiers import PTX_TYPES
from ...builtins.errors import LanguageError
from ...builtins.ranks import rank
from ...builtins.spec import builtin_of
from ...builtins.symmetric import packed_strides
from ..ir.alignment import Starts
from ..ir.group import heap_tensors
from ..ir.implicit import implicit_of
from ..ir.walk import (
    calls_in,
    flatten,
    format_expr,
    location,
    nodes_in,
    rewrite_and_allocate,
    with_span_of,
)

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "min": tirx.min,
    "max": tirx.max,
    "and": tirx.bitwise_and,
    "or": tirx.bitwise_or,
    "xor": tirx.bitwise_xor,
}
_ACCUMULATED_IN = {"float16": "float32", "bfloat16": "float32"}
"""Type in which values of another type are combined, as by ``.acc::f32``."""


def lower_multimem(func: tirx.PrimFunc, world_size: int) -> tirx.PrimFunc:
    """Replace multimem operations on symmetric tensors, which have no multicast address.

    Relaxed operations become ordinary accesses, which later passes order like all others. The
    others synchronize explicitly, and become ``W.ld``, ``W.st`` and ``W.red_*`` with the same
    qualifiers. A reduction combines the copies in the order of the ranks, so it has the same bits
    on all ranks. Stores begin at the rank's own copy, so that ranks do not write to one rank at the
    same time.

    Operations on a parameter that the user maps to a multicast object do not change.

    Args:
        func: program that is specialized for the group.

    Before: ``W.multimem_st(S[:, i], W.multimem_ld_reduce(P[:, i], op="add"))``
    After:  ``sum = P[0, i] + P[1, i]; S[rank, i] = sum; S[(rank + 1) % 2, i] = sum``
    """
    symmetric = {tensor.data for tensor in heap_tensors(func)}

    def is_lowered(node: Any) -> bool:
        spec = builtin_of(node)
        return bool(spec and spec.multicast) and node.args[0].args[0].buffer.data in symmetric

    if not calls_in(func.body, is_lowered):
        return func
    starts, scratch = Starts(world_size), {i.name for i in implicit_of(func) if i.scratch}

    def require_aligned(stmt: tirx.Stmt) -> None:
        for call in calls_in(stmt, is_lowered):
            _Operation(call, world_size).require_aligned(stmt, starts, scratch)

    starts.visit(func.body, require_aligned)
    vectors: list[tirx.Buffer] = []

    def load(call: tirx.Call) -> tirx.PrimExpr | None:
        is_load = is_lowered(call) and not builtin_of(call).writes
        return _reduction(_Operation(call, world_size)) if is_load else None

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.Evaluate) and is_lowered(stmt.value):
            operation = _Operation(stmt.value, world_size)
            is_store = operation.op == "set"
            changes = _store(operation) if is_store else _combine(operation, vectors)
            return flatten([with_span_of(stmt, s) for s in (*operation.binds, *changes)])
        return rewrite_and_allocate(stmt, visit, vectors)

    return func.with_body(visit(ir_transform(func.body, None, load, ["tirx.Call"])))


class _Operation:
    """A multimem operation, and the elements of each rank that it accesses.

    Attributes:
        indices: those of the first element in each copy. An index that loads the tensor is a
            variable if the operation changes the tensor, so that all copies have the same index.
        binds: statements that define these variables.
        op: the operation that combines values; "set" for a store.
        qualifiers: ``scope`` and ``sem``.
        is_ordinary: whether ordinary accesses replace it.
        is_addition: whether ``T.atomic_add`` replaces a ``multimem_red``.
        lanes: number of consecutive elements.
        piece: number of elements that one instruction combines.
    """

    def __init__(self, call: tirx.Call, world_size: int) -> None:
        spec = builtin_of(call)
        self.call, self.world_size = call, world_size
        self.ref: tirx.BufferLoad = call.args[0].args[0]
        self.indices, self.binds = list(self.ref.indices[1:]), []
        for axis, index in enumerate(self.indices):
            if spec.writes and _loads(index, self.ref.buffer):
                self.indices[axis] = tirx.Var("index", index.dtype)
                self.binds.append(tirx.Bind(self.indices[axis], index))
        self.op = spec.qualifier(call, "op") if spec.has_qualifier("op") else "set"
        self.qualifiers = {name: spec.qualifier(call, name) for name in ("scope", "sem")}
        self.is_ordinary = self.qualifiers["sem"] == "relaxed"
        self.is_addition = self.is_ordinary and self.op == "add"
        dtype = tvm.DataType(str(call.dtype if spec.result else call.args[1].dtype))
        self.lanes = dtype.lanes // tvm.DataType(str(self.ref.buffer.dtype)).lanes
        self.piece = min(self.lanes, PTX_TYPES[spec.ptx_type(call)][1])

    def require_aligned(self, stmt: tirx.Stmt, starts: Starts, scratch: Container[str]) -> None:
        """Refuse misaligned vectors. A row of a tensor begins after the row before, and a version
        after the last row of the version before.

        Args:
            stmt: the statement of the operation.
            starts: values of the variables before it.
            scratch: names of the tensors whose versions the inference may add.
        """
        buffer, first = self.ref.buffer, self.ref.indices[-1]
        if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
            return
        own = [int(extent) for extent in buffer.shape[1:]]
        strides = [stride % self.lanes for stride in packed_strides(own)]
        outer = zip(self.ref.indices[1:-1], strides, strict=False)
        rows = sum((i * s for i, s in outer), tirx.IntImm("int32", 0))
        is_split = buffer.name in scratch and math.prod(own) % self.lanes
        if not is_split and not starts.is_misaligned(rows + first, self.lanes):
            return
        if is_split or starts.is_misaligned(rows, self.lanes):
            what = f"rows of {own[-1]} elements"
        else:
            what = f"a vector from element {format_expr(first)} of a row"
        raise LanguageError(
            f"{builtin_of(self.call).name}: {buffer.name} has {what}; expected a multiple "
            f"of {self.lanes} for vectors of {self.lanes} elements{location(stmt)}"
        )

    def at(
        self, owner: tirx.PrimExpr, first: int | tirx.Var = 0, lanes: int = 1
    ) -> tirx.BufferLoad:
        """Return ``lanes`` of the elements in the copy of ``owner``, from number ``first`` on."""
        *outer, last = self.indices
        last = _offset(last, first)
        last = tirx.Ramp(last, 1, lanes) if lanes > 1 else last
        return tirx.BufferLoad(self.ref.buffer, [owner, *outer, last])

    def owners(self) -> Iterator[tirx.PrimExpr]:
        """Yield all ranks, this one first."""
        for step in range(self.world_size):
            yield (rank() + step) % self.world_size if step else rank()


def _reduction(operation: _Operation) -> tirx.PrimExpr:
    """Return the value of a load: the combined copies of all ranks."""
    dtype = tvm.DataType(str(operation.call.dtype))
    element = str(dtype.with_lanes(1))
    wide = tvm.DataType(_ACCUMULATED_IN.get(element, element)).with_lanes(dtype.lanes)
    copies: list[tirx.PrimExpr] = []
    for owner in range(operation.world_size):
        index = tirx.IntImm("int32", owner)
        if operation.is_ordinary:
            copies.append(operation.at(index, lanes=operation.lanes))
        else:
            ref = operation.at(index)
            copies.append(memory.ld(ref, operation.lanes, **operation.qualifiers))
    values = [tirx.Cast(str(wide), c) if wide != dtype else c for c in copies]
    total = reduce(_COMBINE[operation.op], values)
    return tirx.Cast(str(dtype), total) if wide != dtype else total


def _store(operation: _Operation) -> list[tirx.Stmt]:
    """Return the statements of ``multimem_st``, which evaluate the value once."""
    value = tirx.Var("value", operation.call.args[1].dtype)
    statements: list[tirx.Stmt] = [tirx.Bind(value, operation.call.args[1])]
    for owner in operation.owners():
        if operation.is_ordinary:
            target = operation.at(owner, lanes=operation.lanes)
            statements.append(tirx.BufferStore(target.buffer, value, target.indices))
        else:
            store = memory.st(operation.at(owner), value, **operation.qualifiers)
            statements.append(tirx.Evaluate(store))
    return statements


def _combine(operation: _Operation, vectors: list[tirx.Buffer]) -> list[tirx.Stmt]:
    """Return the statements of ``multimem_red``, which evaluate the value once.

    Args:
        vectors: receives a buffer for the elements of a vector, unless memory already has them.
    """
    lanes, value = operation.lanes, operation.call.args[1]
    if lanes == 1 or (lanes == operation.piece and not operation.is_addition):
        variable = tirx.Var("value", value.dtype)
        changes = [_red(operation, owner, 0, variable) for owner in operation.owners()]
        return [tirx.Bind(variable, value), *changes]
    statements: list[tirx.Stmt] = []
    if not _is_slice(value, operation.ref.buffer):
        vector = tirx.decl_buffer([lanes], operation.ref.buffer.dtype, "vector", scope="local")
        vectors.append(vector)
        slice_of_vector = [tirx.Ramp(tirx.IntImm("int32", 0), 1, lanes)]
        statements.append(tirx.BufferStore(vector, value, slice_of_vector))
        value = tirx.BufferLoad(vector, slice_of_vector)
    for owner in operation.owners():
        if operation.is_addition:
            lane = tirx.Var("lane", "int32")
            add = _red(operation, owner, lane, _piece(value, lane))
            statements.append(tirx.For(lane, 0, lanes, tirx.ForKind.VECTORIZED, add))
            continue
        for first in range(0, lanes, operation.piece):
            piece = _piece(value, first, operation.piece)
            statements.append(_red(operation, owner, first, piece))
    return statements


def _is_slice(value: tirx.PrimExpr, target: tirx.Buffer) -> bool:
    """Return whether ``value`` is a slice that does not depend on ``target``."""
    if not isinstance(value, tirx.BufferLoad) or _loads(value, target):
        return False
    return isinstance(value.indices[-1], tirx.Ramp) and int(value.indices[-1].stride) == 1


def _loads(node: tirx.PrimExpr, buffer: tirx.Buffer) -> bool:
    """Return whether ``node`` loads an element of ``buffer``."""
    return any(load.buffer.data.same_as(buffer.data) for load in nodes_in(node, tirx.BufferLoad))


def _piece(value: tirx.BufferLoad, first: int | tirx.Var, lanes: int = 1) -> tirx.BufferLoad:
    """Return ``lanes`` elements of a slice, from number ``first`` on."""
    *outer, last = value.indices
    index = _offset(last.base, first)
    return tirx.BufferLoad(
        value.buffer, [*outer, tirx.Ramp(index, 1, lanes) if lanes > 1 else index]
    )


def _offset(index: tirx.PrimExpr, first: int | tirx.Var) -> tirx.PrimExpr:
    return index if isinstance(first, int) and first == 0 else index + first


def _red(
    operation: _Operation, owner: tirx.PrimExpr, first: int | tirx.Var, value: tirx.PrimExpr
) -> tirx.Stmt:
    """Return the change of elements from number ``first`` on in the copy of ``owner``."""
    ref = operation.at(owner, first)
    if operation.is_addition:
        return tirx.Evaluate(T.atomic_add(ref, value))
    red = getattr(atomics, f"red_{operation.op}")
    return tirx.Evaluate(red(ref, value, **operation.qualifiers))
