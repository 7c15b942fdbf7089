"""The TIR intrinsics: one declaration each. Importing this package registers them all."""

from . import barriers, ranks, signals
from .declare import BUILTINS

__all__ = ["BUILTINS", "barriers", "ranks", "signals"]
