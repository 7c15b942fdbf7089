"""The language: everything a tile program may say beyond TileLang. ``from tileweave import language
as W``."""

from __future__ import annotations

from .builtins.atomics import (
    atom_add,
    atom_and,
    atom_cas,
    atom_exch,
    atom_max,
    atom_min,
    atom_or,
    atom_xor,
    red_add,
    red_and,
    red_max,
    red_min,
    red_or,
    red_xor,
)
from .builtins.barriers import barrier_blocks, sync_grid, sync_ranks
from .builtins.bulk import bulk_commit, bulk_load, bulk_reduce, bulk_store, bulk_wait
from .builtins.debug import delay
from .builtins.memory import fence, fence_proxy_async, ld, st
from .builtins.multimem import multimem_ld_reduce, multimem_red, multimem_st
from .builtins.put_get import get_block, get_warp, put_block, put_warp
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
from .builtins.symmetric import Symmetric, alloc_symmetric
from .builtins.unordered import unordered
from .tile_order import own_last, swizzle_2d
