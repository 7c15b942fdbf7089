"""Addition of partial sums by the tensor cores, which multiply them by the identity.

Each step of a product loads a tile of A and a tile of B. Further steps after the product load a
partial sum as the tile of A and the identity as the tile of B. The same producer loads them through
the same stages, so a partial sum costs as much as a step of its size. Separate loads would cost
each tile several round trips to memory.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import tilelang.language as T

from ...core.gemm_config import GemmConfig
from .tile_macros import accumulate, add_bias, load_b, multiply, scale


class PeerProducts(NamedTuple):
    """Products of other ranks for this rank's rows, and what adds them.

    Attributes:
        rank: this rank. A macro that asked for it again would bind it to another variable, which
            would keep the loads out of the producer warp.
        partials: (ranks, rows_per_rank, N), by source; copies write them.
        last_peer_buf: (rows_per_rank, N), products of the last source, whose kernel stores them,
            if ``config.stores_last_peer``.
        identity: identity matrix by which the tensor cores multiply, if
            ``config.adds_on_tensor_cores``.
    """

    rank: Any
    partials: Any
    last_peer_buf: Any
    identity: Any


def steps_per_partial(config: GemmConfig) -> int:
    """Return the number of steps that add one partial sum to a tile."""
    return ceil(config.tiles.N / config.tiles.K)


def identity_extent(config: GemmConfig) -> int:
    """Return the rows and columns of the identity matrix; 0 if the tensor cores add nothing."""
    return config.adds_on_tensor_cores * steps_per_partial(config) * config.tiles.K


def identity_of(config: GemmConfig) -> Any:
    """Return the declaration of the parameter identity; None if there is none."""
    extent = identity_extent(config)
    return T.Tensor((extent, extent), config.dtype) if extent else None


@T.macro
def load_partial(config, received, source, place, tile):
    """Load a tile of the product of ``source`` for this rank.

    Args:
        place: its first row and column, in a tuple so that they are bound to no variables, either.
    """
    if config.stores_last_peer and source == (received.rank + 1) % config.ranks:
        T.copy(received.last_peer_buf[(received.rank, *place)], tile)
    else:
        T.copy(received.partials[(received.rank, source, *place)], tile)


@T.macro
def multiply_and_add(config, operands, received, owner, m, n, buffers):
    """Compute a tile of the product; if this rank is its owner, add the products of all ranks.

    Args:
        owner, m, n: owner of the tile, and its first row and column among the owner's.
    """
    tiles, ranks = config.tiles, config.ranks
    steps, per_partial = ceil(config.K / tiles.K), steps_per_partial(config)
    adding = (ranks - 1) * per_partial
    T.clear(buffers.total)
    for step in T.Pipelined(
        T.if_then_else(owner == received.rank, steps + adding, steps), num_stages=tiles.stages
    ):
        k = step * tiles.K
        source = (received.rank + ranks - 1 - (step - steps) // per_partial) % ranks
        column = (step - steps) % per_partial * tiles.K
        if step < steps:
            T.copy(operands.A[owner * config.rows_per_rank + m, k], buffers.A)
        else:
            load_partial(config, received, source, (m, n + column), buffers.A)
        if step < steps:
            load_b(config, operands.B, n, k, buffers.B)
        else:
            load_b(config, received.identity, 0, column, buffers.B)
        accumulate(config, buffers)


@T.macro
def compute_tile(config, operands, received, owner, m, n, buffers):
    """Compute a tile of the product, with scales.

    Add the products of other ranks if ``config.adds_on_tensor_cores``.
    """
    if config.adds_on_tensor_cores:
        multiply_and_add(config, operands, received, owner, m, n, buffers)
    else:
        multiply(config, operands.A, (owner * config.rows_per_rank + m,), operands.B, n, buffers)
    scale(config, buffers.total, operands)


@T.macro
def complete_sum(config, operands, received, m, n, buffers):
    """Complete an own tile: add the products of other ranks unless ``compute_tile`` has, and bias.

    The left neighbor's product is added first, because it arrives first.
    """
    if not config.adds_on_tensor_cores:
        columns = buffers.C.shape[1]
        for step in T.serial(config.ranks - 1):
            source = (received.rank + config.ranks - 1 - step) % config.ranks
            for first in T.unroll(0, config.tiles.N, columns):
                load_partial(config, received, source, (m, n + first), buffers.C)
                for i, j in T.Parallel(config.tiles.M, columns):
                    buffers.total[i, first + j] += buffers.C[i, j]
    add_bias(config, buffers.total, operands, n)
