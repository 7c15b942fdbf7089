"""Attend with the query heads that share a head of separate caches of keys and values (GQA)."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from .softmax import add_exponentials, mask
from .tiles import alloc_tile, convert, load_tile

ROWS = T.GemmWarpPolicy.FullRow


@dataclass(frozen=True)
class Heads:
    """Memory of a block.

    Attributes:
        Q: queries, in shared memory.
        K, V: ``Tile`` of keys, and of values.
        P: exponentials in the type of q, in registers.
    """

    Q: Any
    K: Any
    V: Any
    P: Any


@T.macro
def alloc(config):
    """Allocate ``Heads``."""
    Q = T.alloc_shared((config.M, config.dim), config.dtype)
    K, V = alloc_tile(config, config.dim), alloc_tile(config, config.v_dim)
    P = T.alloc_fragment((config.M, config.N), config.dtype)
    return Heads(Q, K, V, P)


@T.macro
def load_queries(config, q, item, heads):
    """Load the queries of an item. The remaining rows of the tile receive others, which are not
    used."""
    T.copy(q[item * config.rows, 0], heads.Q)


@T.macro
def load_keys(config, inputs, split, step, heads):
    """Load a tile of keys and values."""
    head = split.kv_head
    load_tile(config, inputs, split, step, inputs.k_cache, head * config.dim, heads.K)
    load_tile(config, inputs, split, step, inputs.v_cache, head * config.v_dim, heads.V)


@T.macro
def attend(config, split, step, heads, softmax):
    """Attend to a tile of keys."""
    convert(config, heads.K)
    T.gemm(heads.Q, heads.K.operand, softmax.S, transpose_B=True, policy=ROWS)
    mask(config, softmax, split, step)
    add_exponentials(config, softmax)
    T.copy(softmax.S, heads.P)
    convert(config, heads.V)
    T.gemm(heads.P, heads.V.operand, softmax.out, policy=ROWS)
    # A clear before the products would keep statements here that the producer has to execute first.
    T.clear(softmax.S)
