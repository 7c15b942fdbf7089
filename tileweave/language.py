"""The language: everything a tile program may say beyond TileLang. ``from tileweave import language as W``."""

from __future__ import annotations

from .builtins.barriers import barrier_blocks, sync_grid, sync_ranks
from .builtins.ranks import rank, world_size
from .builtins.signals import (
    signal,
    wait_eq,
    wait_ge,
    wait_gt,
    wait_le,
    wait_lt,
    wait_ne,
    wait_reached,
)
from .builtins.symmetric import Symmetric
