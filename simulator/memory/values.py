"""Element types, conversions, and the contents of uninitialized memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from tilelang import tvm

_CANARY = 0xCD
_TOLERANCE = 64
"""Relative error of reordered additions, in units of the precision of the type."""
_BFLOAT16_ROUNDING = 2.0**-8
_NAMES = {"float8_e4m3": "float8_e4m3fn", "custom[tfloat32]": "float32"}
"""Names of NumPy's types, which ml_dtypes extends, where TileLang's differ. A tfloat32 is stored as
a float32, and is not rounded."""


@lru_cache
def numpy_dtype(dtype: Any) -> np.dtype:
    """Return the NumPy type of an element of a TileLang type.

    Raises:
        TypeError: NumPy has no such type.
    """
    name = str(tvm.DataType(dtype).with_lanes(1))
    return np.dtype(_NAMES.get(name, name))


def is_float(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is a floating-point type. NumPy gives types of ml_dtypes kind V."""
    return dtype.kind == "f" or (dtype.kind == "V" and "int" not in dtype.name)


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return float32 for a narrower floating-point type, else ``dtype`` itself."""
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype


def uninitialized_array(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Return uninitialized memory: NaN, or a byte pattern."""
    return np.full(shape, _uninitialized_element(dtype), dtype)


@lru_cache
def _uninitialized_element(dtype: np.dtype) -> Any:
    if is_float(dtype):
        return np.float32(np.nan).astype(dtype)
    return np.frombuffer(bytes([_CANARY] * dtype.itemsize), dtype)[0]


def convert(value: Any, dtype: np.dtype) -> Any:
    """Return ``value`` converted to ``dtype``.

    - To floats: round to nearest even; fp8 saturates.
    - From floats to integers: truncate; 32-bit and 64-bit integers saturate.
    - From integers to integers: wrap to the width.
    """
    if not hasattr(value, "dtype"):
        if isinstance(value, int) and dtype.kind in "iu":
            bits = dtype.itemsize * 8
            value &= (1 << bits) - 1
            if dtype.kind == "i" and value >> (bits - 1):
                value -= 1 << bits
            return dtype.type(value)
        value = np.asarray(value)[()]
    if value.dtype == dtype:
        return value
    if dtype.itemsize == 1 and is_float(dtype):
        largest = float(ml_dtypes.finfo(dtype).max)
        value = np.clip(np.asarray(value, np.float32), -largest, largest)
    if dtype.kind in "iu" and is_float(value.dtype):
        return _saturate(value, dtype) if dtype.itemsize >= 4 else _truncate(value, dtype)
    return value.astype(dtype)


def _truncate(value: Any, dtype: np.dtype) -> Any:
    return value.astype(np.float64).astype(dtype)


def _saturate(value: Any, dtype: np.dtype) -> Any:
    """Truncate to an integer as PTX's ``cvt`` does. NaN becomes 0 or, if a type has 64 bits, the
    value of the highest bit."""
    info, wide = np.iinfo(dtype), value.astype(np.float64)
    of_nan = 0
    if max(dtype.itemsize, value.dtype.itemsize) == 8:
        of_nan = info.min if dtype.kind == "i" else 1 << info.bits - 1
    special = [wide >= float(info.max), wide <= float(info.min), np.isnan(wide)]
    result = _truncate(value, dtype)
    for mask, limit in zip(special, (info.max, info.min, of_nan), strict=True):
        result = np.where(mask, dtype.type(limit), result)
    return result[()]


def union_of_poison(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return the union of two poison masks; None: no poison."""
    return a if b is None else b if a is None else a | b


def poison_of_product(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return the poison mask of ``A @ B``, which broadcasts to its shape: an element is poison if
    its row of A or its column of B has any."""
    rows = None if a is None else a.any(axis=-1, keepdims=True)
    return union_of_poison(rows, None if b is None else b.any(axis=-2, keepdims=True))


def equal_bits(a: Any, b: Any) -> bool:
    """Return whether arrays or elements agree bit by bit."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def nearly_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays agree within the error of reordered additions."""
    precision = float(np.finfo(a.dtype).eps) if a.dtype.kind == "f" else _BFLOAT16_ROUNDING
    a, b = (x.astype(np.float64) for x in (a, b))
    return np.allclose(a, b, rtol=_TOLERANCE * precision, atol=precision, equal_nan=True)
