"""Element types, and what memory holds before anybody wrote it."""

from __future__ import annotations

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
    """NumPy's type of one element of a TileLang type; raises TypeError where there is none."""
    name = str(dtype).split("x")[0] if not str(dtype).startswith("x") else str(dtype)
    return np.dtype(_NAMED.get(name, name))


def is_float(dtype: np.dtype) -> bool:
    """Whether values of ``dtype`` have a fraction; NumPy calls ml_dtypes' types void."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.itemsize <= 2)


def unwritten(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Memory as it is before the first write: NaN, or a pattern no program counts on."""
    if is_float(dtype):
        return np.full(shape, np.nan, np.float32).astype(dtype)
    return (
        np.frombuffer(
            np.full(int(np.prod(shape)) * dtype.itemsize, _CANARY, np.uint8).tobytes(), dtype
        )
        .reshape(shape)
        .copy()
    )


def convert(value: Any, dtype: np.dtype) -> Any:
    """``value`` as ``dtype``: rounded to nearest even, integers cut to width, fp8 and numbers too
    large for 32 or 64 bits saturating."""
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
        most = float(ml_dtypes.finfo(dtype).max)
        value = np.clip(np.asarray(value, np.float32), -most, most)
    if dtype.kind in "iu" and is_float(value.dtype):
        return _saturated(value, dtype) if dtype.itemsize >= 4 else _cut(value, dtype)
    return value.astype(dtype)


def _cut(value: Any, dtype: np.dtype) -> Any:
    return value.astype(np.float64).astype(dtype)


def _saturated(value: Any, dtype: np.dtype) -> Any:
    """Cut to a whole number, as PTX's cvt: what is none becomes 0, of or to 64 bits the lowest."""
    info, wide = np.iinfo(dtype), value.astype(np.float64)
    of_nan = 0
    if max(dtype.itemsize, value.dtype.itemsize) == 8:
        of_nan = info.min if dtype.kind == "i" else 1 << info.bits - 1
    special = [wide >= float(info.max), wide <= float(info.min), np.isnan(wide)]
    found = _cut(value, dtype)
    for where, least in zip(special, (info.max, info.min, of_nan), strict=True):
        found = np.where(where, dtype.type(least), found)
    return found[()]
