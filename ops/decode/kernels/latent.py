"""Attend with the query heads that share a latent cache (MLA). Values are the first columns of
keys."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from .softmax import add_exponentials, mask
from .tiles import alloc_tile, load_tile

COLUMNS = T.GemmWarpPolicy.FullCol
"""Each warp group computes columns of its own: of the products with keys, then of those with
values."""

PRODUCER_REGISTERS, REGISTERS = 40, 232
"""Registers of a thread of the producer, and of a thread that computes. The accumulator of the
result alone uses 128 of the latter."""


@dataclass(frozen=True)
class LatentBuffers:
    """Memory of a block.

    Attributes:
        Q, Q_rest: queries, in shared memory: the columns of values, and the columns after them.
        V, K_rest: ``Tile`` of these columns of keys.
        P: exponentials in the type of q, in shared memory, as both warp groups read them.
    """

    Q: Any
    Q_rest: Any
    V: Any
    K_rest: Any
    P: Any


@T.macro
def alloc(config):
    """Allocate ``LatentBuffers``, and move registers from the producer to the warp groups that
    compute."""
    T.annotate_producer_reg_dealloc(PRODUCER_REGISTERS)
    T.annotate_consumer_reg_alloc(REGISTERS)
    rest = config.dim - config.v_dim
    Q = T.alloc_shared((config.M, config.v_dim), config.dtype)
    Q_rest = T.alloc_shared((config.M, rest), config.dtype)
    V, K_rest = alloc_tile(config, config.v_dim), alloc_tile(config, rest)
    P = T.alloc_shared((config.M, config.N), config.dtype)
    return LatentBuffers(Q, Q_rest, V, K_rest, P)


@T.macro
def load_queries(config, q, item, latent):
    """Load the queries of an item. The remaining rows of the tile receive others, which are not
    used."""
    T.copy(q[item * config.rows, 0], latent.Q)
    T.copy(q[item * config.rows, config.v_dim], latent.Q_rest)


@T.macro
def load_keys(config, inputs, split, step, latent):
    """Load a tile of keys."""
    load_tile(config, inputs, split, step, inputs.k_cache, 0, latent.V)
    load_tile(config, inputs, split, step, inputs.k_cache, config.v_dim, latent.K_rest)


@T.macro
def attend(config, split, step, latent, softmax):
    """Attend to a tile of keys."""
    T.gemm(latent.Q, latent.V.operand, softmax.S, transpose_B=True, policy=COLUMNS)
    T.gemm(latent.Q_rest, latent.K_rest.operand, softmax.S, transpose_B=True, policy=COLUMNS)
    mask(config, softmax, split, step)
    add_exponentials(config, softmax)
    T.copy(softmax.S, latent.P)
    T.gemm(latent.P, latent.V.operand, softmax.out, policy=COLUMNS)
    # A clear before the products would keep statements here that the producer has to execute first.
    T.clear(softmax.S)
