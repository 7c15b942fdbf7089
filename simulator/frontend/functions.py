"""NumPy implementations of the operators and pure functions of the IR."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np
from tvm import tirx


def _truncdiv(a, b):
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0)))  # abs() of the lowest integer overflows


def _div(a, b):
    return _truncdiv(a, b) if _is_integer(a) and _is_integer(b) else a / b


def _is_integer(value) -> bool:
    return isinstance(value, int) or getattr(value, "dtype", np.dtype(np.float32)).kind in "iu"


def _choose(of_ints, f):
    """Return a minimum or maximum that ignores NaN, as in CUDA, and keeps Python integers."""
    return lambda a, b: of_ints(a, b) if isinstance(a, int) and isinstance(b, int) else f(a, b)


BINARY = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.Div: _div,
    tirx.Mod: lambda a, b: a - b * _truncdiv(a, b),
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: _choose(min, np.fmin),
    tirx.Max: _choose(max, np.fmax),
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
}


def _rounded(f):
    """Compute a function in at least float32 and round to the type of its argument."""

    def call(x, *others):
        x = np.asarray(x)[()]
        wide = [np.asarray(v, np.promote_types(np.float32, x.dtype) if x.dtype.kind == "f"
                           else np.float32) for v in (x, *others)]  # fmt: skip
        return f(*wide)[()].astype(x.dtype)

    return call


def _popcount(a):
    a = np.asarray(a, None if hasattr(a, "dtype") else np.int32)
    return np.bitwise_count(a.view(f"u{a.dtype.itemsize}")).astype(np.int32)[()]


_erf = np.vectorize(math.erf, otypes=[np.float64])
_float = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(x.dtype.type(10), x),
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "pow": np.power, "floor": np.floor,
    "ceil": np.ceil, "trunc": np.trunc, "round": np.rint, "nearbyint": np.rint,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "erf": _erf, "fmod": np.fmod,
    "hypot": np.hypot, "copysign": np.copysign, "fma": lambda a, b, c: a * b + c,
    "__exp": np.exp, "__exp10": lambda x: np.power(x.dtype.type(10), x), "__log": np.log,
    "__log2": np.log2, "__log10": np.log10, "__sin": np.sin, "__cos": np.cos, "__tan": np.tan,
    "fast_rcp": lambda x: 1 / x, "ieee_frcp": lambda x: 1 / x, "ieee_fsqrt": np.sqrt,
    "ieee_frsqrt": lambda x: 1 / np.sqrt(x), "ieee_add": np.add, "ieee_sub": np.subtract,
    "ieee_mul": np.multiply, "ieee_fdiv": np.divide, "fmul": np.multiply,
    "max_nan": np.maximum, "min_nan": np.minimum, "add2": np.add, "sub2": np.subtract,
    "mul2": np.multiply, "fma2": lambda a, b, c: a * b + c, "max2": np.fmax, "min2": np.fmin,
    "max2_nan": np.maximum, "min2_nan": np.minimum, "abs2": np.abs,
}  # fmt: skip

FUNCTIONS: dict[str, Callable] = {name: _rounded(f) for name, f in _float.items()} | {
    "fabs": abs,
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "pow_of_int": lambda x, n: x**n,
    "isnan": lambda x: np.isnan(np.asarray(x, np.float32))[()],
    "isinf": lambda x: np.isinf(np.asarray(x, np.float32))[()],
    "isfinite": lambda x: np.isfinite(np.asarray(x, np.float32))[()],
    "shift_left": lambda a, b: a << b,
    "shift_right": lambda a, b: a >> b,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": lambda a: ~a,
    "popcount": _popcount,
    "likely": lambda a: a,
}
"""Pure functions, by the last part of the operator name."""

REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
"""Ufuncs of atomic operations and bulk reductions, by their ``op`` qualifier."""
