"""Everything a tile program may use beyond TileLang: ``from tileweave import language as W``."""

from __future__ import annotations

from .atomics import (
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
from .barriers import barrier_blocks, sync_grid, sync_ranks
from .bulk import bulk_commit, bulk_load, bulk_reduce, bulk_store, bulk_wait
from .debug import delay
from .memory import fence, fence_proxy_async, ld, st, unordered
from .multimem import multimem_ld_reduce, multimem_red, multimem_st
from .put_get import get_block, get_warp, put_block, put_warp
from .ranks import rank, world_size
from .signals import (
    signal,
    wait_eq,
    wait_ge,
    wait_gt,
    wait_le,
    wait_lt,
    wait_ne,
    wait_reached,
)
from .symmetric import Symmetric, alloc_symmetric
from .tile_order import own_last, swizzle_2d
