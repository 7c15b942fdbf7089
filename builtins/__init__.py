"""Declarations of the TIR intrinsics. Importing this package registers all of them."""

from .versions import require_supported_tilelang

require_supported_tilelang()  # before TileLang is imported

import tilelang  # noqa: E402, F401  (its import makes TVM importable)

from . import (  # noqa: E402
    atomics,
    barriers,
    bulk,
    debug,
    memory,
    multimem,
    put_get,
    ranks,
    signals,
)
from .spec import BUILTINS  # noqa: E402

__all__ = [
    "BUILTINS",
    "atomics",
    "barriers",
    "bulk",
    "debug",
    "memory",
    "multimem",
    "put_get",
    "ranks",
    "signals",
]
