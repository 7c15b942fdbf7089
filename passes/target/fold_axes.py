"""Fold axes of symmetric tensors with more axes than the TMA supports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilelang import tvm
from tvm import tirx
from tvm.target import Target
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ..ir.group import heap_tensors
from ..ir.tma import TMA_SM, requires_tma, sm_of, tma_name, without_tma
from ..ir.walk import (
    calls_in,
    children_of,
    location,
    nodes_in,
    op_name,
    rewrite_children,
    with_rank,
)

TMA_AXES = 5
"""Maximum number of axes of a TMA descriptor."""
_LARGEST = 1 << 31
_REGION = "tl.region"
_COPY = "tl.tileop.copy"

Node = tirx.BufferLoad | tirx.BufferStore


def fold_axes(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Fold axes of symmetric tensors until the TMA supports them.

    The compiler adds axes to those of the program: the rank, and in the program's own memory the
    buffers that launches use in turn and the versions of a tensor that is written again. All axes
    except the rank's are packed. Two neighboring axes become one if every access has a single index
    on the outer axis and is provably inside the inner one, because the TMA then clips the same
    elements at the end of an axis. Axes whose extents are arguments stay. If a tensor keeps too
    many axes, its copies do not use the TMA.

    Before: ``S: (4, 2, 3, 8, 64, 64)``; ``T.copy(tile, S[r, half, version, i, 0, 0])``
    After:  ``S: (4, 6, 8, 64, 64)``; ``T.copy(tile, S[r, half * 3 + version, i, 0, 0])``

    Raises:
        LanguageError: an operation requires the TMA for a tensor that keeps too many axes.
    """
    if sm_of(target) < TMA_SM:
        return func
    large = {b.data: b for b in heap_tensors(func) if len(b.shape) > TMA_AXES}
    if not large:
        return func
    accesses = _Accesses(large)
    accesses.visit(func.body)
    used = {data: accesses.by_tensor[data] for data in large if accesses.by_tensor[data]}
    folds = {data: _fold_of(large[data], accesses) for data, accesses in used.items()}
    body = _with_folds(func.body, folds)
    too_large = {b for b in (fold.buffer for fold in folds.values()) if len(b.shape) > TMA_AXES}
    return func.with_body(_copy_without_tma(body, too_large) if too_large else body)


@dataclass(frozen=True)
class _Access:
    """An access to a tensor.

    Attributes:
        single: for each axis, whether a single index is accessed.
        inside: for each axis, whether the access is provably inside of it.
    """

    single: tuple[bool, ...]
    inside: tuple[bool, ...]


@dataclass
class _Accesses:
    """Accesses to tensors, by data pointer."""

    tensors: dict[tirx.Var, tirx.Buffer]
    by_tensor: dict[tirx.Var, list[_Access]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_tensor = {data: [] for data in self.tensors}
        self._analyzer = tvm.arith.Analyzer()
        ranks = next(iter(self.tensors.values())).shape[0]
        self._rank = tirx.Var("rank", "int32")
        self._analyzer.bind(self._rank, tvm.ir.Range(0, ranks))

    def visit(self, stmt: tirx.Stmt) -> None:
        """Collect the accesses inside ``stmt``, with the bounds of its variables."""
        if isinstance(stmt, tirx.For):
            low, extent = with_rank(stmt.min, self._rank), with_rank(stmt.extent, self._rank)
            self._analyzer.bind(stmt.loop_var, tvm.ir.Range.from_min_extent(low, extent))
        if isinstance(stmt, tirx.Bind) and str(stmt.var.dtype).startswith("int"):
            self._analyzer.bind(stmt.var, with_rank(stmt.value, self._rank))
        if isinstance(stmt, tirx.IfThenElse):
            self._collect(stmt.condition)
            condition = with_rank(stmt.condition, self._rank)
            with self._analyzer.constraint_scope(condition):
                self.visit(stmt.then_case)
            if stmt.else_case is not None:
                with self._analyzer.constraint_scope(tirx.Not(condition)):
                    self.visit(stmt.else_case)
            return
        children = children_of(stmt)
        for inner in children:
            self.visit(inner)
        if not children:
            self._collect(stmt)

    def _collect(self, node) -> None:
        """Collect the accesses of a statement without inner statements, or of an expression."""
        sizes = {region.args[0]: region.args[2:] for region in calls_in(node, _is_region)}
        for inner in nodes_in(node, tirx.BufferLoad, tirx.BufferStore):
            if inner.buffer.data in self.tensors:
                extents = sizes.get(inner, [tirx.IntImm("int32", 1)] * len(inner.indices))
                self.by_tensor[inner.buffer.data].append(self._access(inner, extents))

    def _access(self, node: Node, extents: Sequence[tirx.PrimExpr]) -> _Access:
        single, inside = [], []
        for index, extent, size in zip(node.indices, extents, node.buffer.shape, strict=True):
            scalar = tvm.DataType(str(index.dtype)).lanes == 1
            single.append(scalar and isinstance(extent, tirx.IntImm) and int(extent) == 1)
            start = with_rank(index, self._rank)
            inside.append(
                scalar
                and self._analyzer.can_prove(start >= 0)
                and self._analyzer.can_prove(start + extent <= size)
            )
        return _Access(tuple(single), tuple(inside))


@dataclass(frozen=True)
class _Fold:
    """A tensor with fewer axes.

    Attributes:
        groups: for each axis of ``buffer``, the neighboring axes of the program's tensor.
        shape: shape of the program's tensor.
        buffer: the folded tensor.
    """

    groups: list[list[int]]
    shape: Sequence[tirx.PrimExpr]
    buffer: tirx.Buffer

    def indices(self, indices: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """Return the indices of an element in ``buffer``."""
        out = []
        for first, *others in self.groups:
            index = indices[first]
            for axis in others:
                index = index * self.shape[axis] + indices[axis]
            out.append(index)
        return out

    def extents(self, extents: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """Return the extents of a region in ``buffer``. Only the last of a group may exceed 1."""
        return [extents[group[-1]] for group in self.groups]


def _fold_of(buffer: tirx.Buffer, accesses: Sequence[_Access]) -> _Fold:
    """Fold as many axes as necessary, outer axes first, because the compiler adds outer axes."""
    groups = [[axis] for axis in range(len(buffer.shape))]
    index = 1
    while len(groups) > TMA_AXES and index < len(groups) - 1:
        outer, inner = groups[index], groups[index + 1]
        if _may_fold(buffer, outer, inner[0], accesses):
            groups[index : index + 2] = [[*outer, *inner]]
        else:
            index += 1
    shape = [math.prod(buffer.shape[axis] for axis in group) for group in groups]
    strides = [buffer.strides[group[-1]] for group in groups]
    data, name = buffer.data, buffer.name
    folded = tirx.decl_buffer(shape, buffer.dtype, name, data=data, strides=strides)
    return _Fold(groups, list(buffer.shape), folded)


def _may_fold(
    buffer: tirx.Buffer, outer: Sequence[int], inner: int, accesses: Sequence[_Access]
) -> bool:
    """Return whether the ``outer`` axes, which are already folded, can be folded with ``inner``."""
    sizes = [buffer.shape[axis] for axis in (*outer, inner)]
    if not all(isinstance(n, tirx.IntImm) for n in sizes):
        return False
    stride, inner_stride = buffer.strides[outer[-1]], buffer.strides[inner]
    return (
        tvm.arith.Analyzer().can_prove_equal(stride, inner_stride * sizes[-1])
        and math.prod(map(int, sizes)) < _LARGEST
        and all(a.inside[inner] and all(a.single[axis] for axis in outer) for a in accesses)
    )


def _is_region(call: tirx.Call) -> bool:
    return op_name(call) == _REGION


def _with_folds(body: tirx.Stmt, folds: dict[tirx.Var, _Fold]) -> tirx.Stmt:
    """Redirect the accesses of ``body`` to the folded tensors."""

    def change(node):
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
            fold = folds.get(node.buffer.data)
            if fold is None:
                return None
            indices = fold.indices(node.indices)
            if isinstance(node, tirx.BufferLoad):
                return tirx.BufferLoad(fold.buffer, indices, node.predicate, node.span)
            return tirx.BufferStore(fold.buffer, node.value, indices, node.predicate)
        if _is_region(node) and node.args[0].buffer.data in folds:
            load, mode, *extents = node.args
            extents = folds[load.buffer.data].extents(extents)
            return tirx.Call(node.dtype, node.op, [load, mode, *extents])
        return None

    kinds = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.Call"]
    return ir_transform(body, None, change, kinds)


def _copy_without_tma(body: tirx.Stmt, tensors: set[tirx.Buffer]) -> tirx.Stmt:
    """Disable the TMA for the copies of ``tensors`` in ``body``."""

    def regions_of(call: tirx.Call) -> Iterator[tirx.Buffer]:
        regions = (a for a in call.args if op_name(a) == _REGION)
        return (r.args[0].buffer for r in regions if r.args[0].buffer in tensors)

    def refuse(stmt: tirx.Stmt) -> tirx.Stmt:
        rewrite_children(stmt, refuse)  # inner statements first, because their lines are exact
        for call in calls_in(stmt, requires_tma):
            for tensor in regions_of(call):
                raise LanguageError(
                    f"{tma_name(call)}: {tensor.name} has {len(tensor.shape)} axes, with those "
                    "for the rank, buffers and versions: shape "
                    f"({', '.join(map(str, tensor.shape))}); expected at most {TMA_AXES}, or "
                    f"indices that are provably inside of the inner axes{location(stmt)}"
                )
        return stmt

    def change(call: tirx.Call):
        if op_name(call) != _COPY or not any(regions_of(call)):
            return None
        return without_tma(call)

    refuse(body)
    return ir_transform(body, None, change, ["tirx.Call"])
