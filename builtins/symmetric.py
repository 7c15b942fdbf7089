"""Symmetric tensors in signatures: all ranks' heaps as one tensor whose first axis is the rank."""

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
"""Extent of the rank axis, until the program is compiled for a group."""

_HEAP_STRIDES = {size: tirx.Var(f"heap_stride_{size}", "int64") for size in (1, 2, 4, 8, 16)}


def heap_stride(itemsize: int) -> tirx.Var:
    """Elements of ``itemsize`` bytes between two ranks' copies, until compiled for a group."""
    return _HEAP_STRIDES[itemsize]


def itemsize(dtype: str) -> int:
    """Bytes of one element, or 0 where elements are smaller than a byte."""
    kind = tvm.DataType(str(dtype))
    return kind.bits * kind.lanes // 8


def packed_strides(shape: Sequence[Any]) -> list[Any]:
    """Strides of a tensor without gaps, in elements; of numbers or expressions."""
    strides: list[Any] = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


class SymmetricProxy(StridedTensorProxy):
    """``W.Symmetric(shape, dtype)``: a tensor that every rank allocates, seen by all of them.

    In the kernel it has shape ``(world_size, *shape)``: ``S[r, ...]`` is rank ``r``'s copy,
    whatever rank runs the code, and any TileLang operation reads or writes it there. Pass
    ``tw.symmetric(shape, dtype)`` (or its ``.all``) as the argument.

    Args:
        shape: of one rank's copy, in elements.
        dtype: element type, of 1, 2, 4, 8 or 16 bytes.

    Raises:
        LanguageError: the element type has no whole power-of-two number of bytes, or an extent is
            no positive integer.
    """

    def __call__(self, shape: Any, dtype: str = "float32") -> tirx.Buffer:  # type: ignore[override]
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        size = _checked_itemsize("Symmetric", dtype)
        _require_extents("Symmetric", shape, "positive integers, or dynamic extents")
        # TileLang widens offsets of 32 bits only where strides are alike; the heap's has 64.
        packed = (tirx.Cast("int64", s) if isinstance(s, tirx.PrimExpr) else s
                  for s in packed_strides(shape))  # fmt: skip
        strides = (heap_stride(size), *packed)
        return super().__call__((WORLD_SIZE, *shape), strides, dtype)

    def __getitem__(self, keys: Any) -> tirx.Buffer:
        return self(*keys)


Symmetric = SymmetricProxy()


_SCRATCH = "tileweave.symmetric"


def alloc_symmetric(shape: Any, dtype: str = "float32") -> tirx.Buffer:
    """Symmetric memory of the program's own, made when it is compiled and kept between launches.

    In the kernel it is what a ``W.Symmetric`` parameter is, ``S[r, ...]`` being rank ``r``'s copy;
    outside it is not seen. It is zeroed once, when it is made: a program that signals explicitly
    may keep its flags there. Where the synchronization is inferred, a read of what no launch has
    written is refused. How many buffers there are is the compiler's choice: it may let launches
    take two of them in turn instead of waiting.

    Args:
        shape: of one rank's copy, in elements; constants, or made of dynamic extents of the
            program's parameters where its synchronisation is inferred.
        dtype: element type, of 1, 2, 4, 8 or 16 bytes.

    Raises:
        LanguageError: the element type has no whole power-of-two number of bytes, or an extent is
            not positive or not known when the program is compiled.
    """
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    _checked_itemsize("alloc_symmetric", dtype)
    _require_extents("alloc_symmetric", shape, "positive constants")
    return T.alloc_buffer((WORLD_SIZE, *shape), dtype, scope=_SCRATCH)


def _checked_itemsize(op: str, dtype: Any) -> int:
    """Return the bytes of one element; refuse a type that a symmetric tensor cannot have."""
    try:
        size = itemsize(dtype)
    except ValueError:
        raise reject(op, f"dtype={dtype!r}", "a type of TileLang, such as 'bfloat16'") from None
    if size not in _HEAP_STRIDES:
        raise reject(op, f"dtype={dtype!r}", "elements of 1, 2, 4, 8 or 16 bytes")
    return size


def _require_extents(op: str, shape: tuple, legal: str) -> None:
    if not all(map(_is_extent, shape)):
        raise reject(op, f"shape={shape}", legal)


def _is_extent(value: Any) -> bool:
    """Return true for a positive integer, and for an expression of integers."""
    if isinstance(value, (numbers.Integral, tirx.IntImm)):
        return not isinstance(value, bool) and int(value) > 0
    return isinstance(value, tirx.PrimExpr) and str(value.dtype).startswith(("int", "uint"))


def is_scratch(buffer: tirx.Buffer) -> bool:
    """Return whether ``alloc_symmetric`` made ``buffer``."""
    return buffer.scope() == _SCRATCH


def is_symmetric(buffer: tirx.Buffer) -> bool:
    """Return whether ``buffer`` is a symmetric tensor of a program not yet compiled for a group."""
    return is_scratch(buffer) or (
        len(buffer.strides) > 0
        and any(buffer.strides[0].same_as(v) for v in _HEAP_STRIDES.values())
    )


def at_rank(op: str, parameter: str, ref: tirx.BufferLoad, peer: Any) -> tirx.BufferLoad:
    """Return the element of a symmetric tensor with these indices in ``peer``'s copy."""
    if not is_symmetric(ref.buffer):
        raise reject(op, f"{parameter}={ref.buffer.name} with peer={peer}", "a W.Symmetric tensor")
    return tirx.BufferLoad(ref.buffer, [tirx.convert(peer), *ref.indices[1:]])


def is_symmetric_dtype(size: int) -> bool:
    """Return whether elements of ``size`` bytes can be symmetric."""
    return size in _HEAP_STRIDES
