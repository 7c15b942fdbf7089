"""The TIR intrinsics: one declaration each. Importing this package registers them all."""

from . import barriers, bulk, put_get, ranks, signals
from .declare import BUILTINS

__all__ = ["BUILTINS", "barriers", "bulk", "put_get", "ranks", "signals"]
