"""Element types, conversions, and the contents of uninitialized memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

_NAMED = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "bool": np.bool_,
}
_CANARY = 0xCD


def numpy_dtype(dtype: Any) -> np.dtype:
    """Return the NumPy type of an element of a TileLang type.

    Raises:
        TypeError: NumPy has no such type.
    """
    name = str(dtype).split("x")[0] if not str(dtype).startswith("x") else str(dtype)
    return np.dtype(_NAMED.get(name, name))


def is_float(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is a floating-point type. NumPy gives those of ml_dtypes kind V."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.itemsize <= 2)


def widened(dtype: np.dtype) -> np.dtype:
    """Return float32 for a narrower floating-point type, else ``dtype`` itself."""
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype


def unwritten(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Return uninitialized memory: NaN, or a byte pattern."""
    return np.full(shape, _unwritten_element(dtype), dtype)


@lru_cache
def _unwritten_element(dtype: np.dtype) -> Any:
    if is_float(dtype):
        return np.float32(np.nan).astype(dtype)
    return np.frombuffer(bytes([_CANARY] * dtype.itemsize), dtype)[0]


def convert(value: Any, dtype: np.dtype) -> Any:
    """Convert ``value`` to ``dtype``. Floats round to nearest even, integers wrap to the width,
    fp8 and floats converted to 32-bit or 64-bit integers saturate."""
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
        return _saturated(value, dtype) if dtype.itemsize >= 4 else _truncated(value, dtype)
    return value.astype(dtype)


def _truncated(value: Any, dtype: np.dtype) -> Any:
    return value.astype(np.float64).astype(dtype)


def _saturated(value: Any, dtype: np.dtype) -> Any:
    """Truncate to an integer as PTX's ``cvt`` does. NaN becomes 0 or, if a type has 64 bits, the
    value of the highest bit."""
    info, wide = np.iinfo(dtype), value.astype(np.float64)
    of_nan = 0
    if max(dtype.itemsize, value.dtype.itemsize) == 8:
        of_nan = info.min if dtype.kind == "i" else 1 << info.bits - 1
    special = [wide >= float(info.max), wide <= float(info.min), np.isnan(wide)]
    result = _truncated(value, dtype)
    for mask, limit in zip(special, (info.max, info.min, of_nan), strict=True):
        result = np.where(mask, dtype.type(limit), result)
    return result[()]


def union(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return the union of two poison masks; None: no poison."""
    return a if b is None else b if a is None else a | b


def poison_of_product(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return the poison of ``A @ B``, which broadcasts to its shape: a row of A or a column of B
    with poison is poison."""
    rows = None if a is None else a.any(axis=-1, keepdims=True)
    return union(rows, None if b is None else b.any(axis=-2, keepdims=True))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays agree bit by bit."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays agree within the error of reordered additions."""
    digits = np.finfo(a.dtype).eps if a.dtype.kind == "f" else 2.0**-8
    a, b = (x.astype(np.float64) for x in (a, b))
    return np.allclose(a, b, rtol=64 * float(digits), atol=float(digits), equal_nan=True)


def lanes_of(dtype: str) -> int:
    """Return the number of elements of a type such as ``float32x4``."""
    tail = str(dtype).rsplit("x", 1)
    return int(tail[1]) if len(tail) == 2 and tail[1].isdigit() else 1
