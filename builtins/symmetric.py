"""Symmetric tensors: the copies on all ranks form one tensor whose first axis is the rank."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tilelang.language.proxy import StridedTensorProxy
from tvm import tirx

from .errors import reject

__all__ = ["Symmetric", "alloc_symmetric"]

WORLD_SIZE = tirx.Var("world_size", "int32")
"""Extent of the rank axis before the program is compiled for a group."""

_HEAP_STRIDES = {size: tirx.Var(f"heap_stride_{size}", "int64") for size in (1, 2, 4, 8, 16)}


def heap_stride(itemsize: int) -> tirx.Var:
    """Return the distance between two ranks' copies, in elements of ``itemsize`` bytes.

    It is a variable until the program is compiled for a group.
    """
    return _HEAP_STRIDES[itemsize]


def itemsize(dtype: str) -> int:
    """Return the bytes of one element, or 0 if its bits do not fill whole bytes."""
    data_type = tvm.DataType(str(dtype))
    size, rest = divmod(data_type.bits * data_type.lanes, 8)
    return 0 if rest else size


def packed_strides(shape: Sequence[Any]) -> list[Any]:
    """Return the strides of a tensor without gaps, in elements, as numbers or expressions."""
    strides: list[Any] = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def is_packed(buffer: tirx.Buffer) -> bool:
    """Return whether a tensor has no gaps and its last axis varies fastest."""
    is_equal = tvm.arith.Analyzer().can_prove_equal
    return all(map(is_equal, buffer.strides, packed_strides(buffer.shape)))


class SymmetricProxy(StridedTensorProxy):
    """``W.Symmetric(shape, dtype)``: a tensor with a copy on every rank, visible to all ranks.

    In the kernel it has the shape ``(world_size, *shape)``. On every rank, ``S[r, ...]`` is the
    copy that rank ``r`` stores. All TileLang operations can read and write it. Pass
    ``tw.symmetric(shape, dtype)`` (or its ``.all``) as the argument.

    Args:
        shape: shape of one rank's copy, in elements; it may contain ``T.dynamic`` extents.
        dtype: element type of 1, 2, 4, 8 or 16 bytes.

    Raises:
        LanguageError: the element type has another size, or an extent is neither a positive
            integer nor dynamic.
    """

    def __call__(self, shape: Any, dtype: str = "float32") -> tirx.Buffer:  # type: ignore[override]
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        size = checked_itemsize("Symmetric", dtype)
        _require_extents("Symmetric", shape, "positive integers, or dynamic extents")
        # TileLang widens 32-bit offsets only if all strides have one type; the heap's has 64 bits.
        packed = (tirx.Cast("int64", s) if isinstance(s, tirx.PrimExpr) else s
                  for s in packed_strides(shape))  # fmt: skip
        strides = (heap_stride(size), *packed)
        return super().__call__((WORLD_SIZE, *shape), strides, dtype)

    def __getitem__(self, keys: Any) -> tirx.Buffer:
        return self(*keys)


Symmetric = SymmetricProxy()


_SCRATCH = "tileweave.symmetric"
_RAGGED = f"{_SCRATCH}.ragged"


def alloc_symmetric(shape: Any, dtype: str = "float32") -> tirx.Buffer:
    """Allocate symmetric memory for the program. It exists from compilation on, across launches.

    In the kernel it behaves like a ``W.Symmetric`` parameter: ``S[r, ...]`` is the copy of rank
    ``r``. The caller cannot access it. It is zeroed once, so a program with explicit signals may
    keep its flags there. In a program with inferred synchronization, each element that is read must
    be written in the same launch, and the compiler may allocate two buffers, which launches use in
    turn instead of waiting.

    Args:
        shape: shape of one rank's copy, in elements: constants. In a program with inferred
            synchronization, it may contain dynamic extents of the parameters.
        dtype: element type of 1, 2, 4, 8 or 16 bytes.

    Raises:
        LanguageError: the element type has another size, or an extent is not positive, or not
            known when the program is compiled.
    """
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    checked_itemsize("alloc_symmetric", dtype)
    _require_extents("alloc_symmetric", shape, "positive constants")
    return T.alloc_buffer((WORLD_SIZE, *shape), dtype, scope=_SCRATCH)


def checked_itemsize(op: str, dtype: Any) -> int:
    """Return the bytes of one element; refuse a type that a symmetric tensor cannot have."""
    try:
        size = itemsize(dtype)
    except ValueError:
        raise reject(op, f"dtype={dtype!r}", "a type of TileLang, such as 'bfloat16'") from None
    if size not in _HEAP_STRIDES:
        raise reject(op, f"dtype={dtype!r}", "elements of 1, 2, 4, 8 or 16 bytes")
    return size


def _require_extents(op: str, shape: tuple, legal: str) -> None:
    if not all(map(is_extent, shape)):
        raise reject(op, f"shape={shape}", legal)


def is_extent(value: Any) -> bool:
    """Return whether ``value`` is a positive integer or an integer expression."""
    if isinstance(value, (numbers.Integral, tirx.IntImm)):
        return not isinstance(value, bool) and int(value) > 0
    return isinstance(value, tirx.PrimExpr) and str(value.dtype).startswith(("int", "uint"))


def is_scratch(buffer: tirx.Buffer) -> bool:
    """Return whether the program allocates ``buffer``, a symmetric tensor."""
    return buffer.scope().startswith(_SCRATCH)


def ragged_scope(axes: int) -> str:
    """Return the scope of a ragged tensor whose segments have this number of axes."""
    return f"{_RAGGED}{axes}"


def ragged_axes(buffer: tirx.Buffer) -> int:
    """Return the number of axes after the rank axis that select a segment of a ragged tensor; 0 for
    other buffers. The last of these axes is the source."""
    scope = buffer.scope()
    return int(scope.removeprefix(_RAGGED)) if scope.startswith(_RAGGED) else 0


def is_symmetric(buffer: tirx.Buffer) -> bool:
    """Return whether ``buffer`` is a symmetric tensor of a program not yet compiled for a group."""
    return is_scratch(buffer) or (
        len(buffer.strides) > 0
        and any(buffer.strides[0].same_as(v) for v in _HEAP_STRIDES.values())
    )


def at_rank(op: str, parameter: str, ref: tirx.BufferLoad, peer: Any) -> tirx.BufferLoad:
    """Return the element of a symmetric tensor with these indices in ``peer``'s copy."""
    if not is_symmetric(ref.buffer):
        problem = f"peer={peer}, and {parameter}={ref.buffer.name} is not symmetric"
        raise reject(op, problem, "a W.Symmetric tensor")
    return tirx.BufferLoad(ref.buffer, [tirx.convert(peer), *ref.indices[1:]])


def scratch_buffer(shape: Sequence[Any], dtype: str, name: str) -> tirx.Buffer:
    """Declare a buffer like one of ``alloc_symmetric``; the first extent is the number of ranks."""
    return tirx.decl_buffer(shape, dtype, name, scope=_SCRATCH)


def is_symmetric_dtype(size: int) -> bool:
    """Return whether elements of ``size`` bytes can be symmetric."""
    return size in _HEAP_STRIDES
