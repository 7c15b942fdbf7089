"""The TIR intrinsics: one declaration each. Importing this package registers them all."""

from . import atomics, barriers, bulk, debug, memory, multimem, put_get, ranks, signals
from .declare import BUILTINS

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
