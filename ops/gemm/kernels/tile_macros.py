"""Macros of GEMM kernels: multiplication of a tile, its epilogue, and its store."""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from ...core.gemm_config import GemmConfig

ROWS = T.GemmWarpPolicy.FullRow
"""Partition of a product among the warp groups of a block, see ``accumulate``."""


class Operands(NamedTuple):
    """Inputs of a GEMM kernel.

    Attributes:
        A: this rank's first operand.
        B: second operand, (N, K) or (K, N).
        bias: (N,), added to every row, if ``config.biased``.
        scale_a, scale_b: factors of fp8 operands, if ``config.scaled``.
    """

    A: Any
    B: Any
    bias: Any
    scale_a: Any
    scale_b: Any


class TileBuffers(NamedTuple):
    """Memory of a block for one tile of the result.

    Attributes:
        A, B: tiles of the operands in shared memory.
        C: columns of the result in shared memory that are stored at once.
        total: the tile of the result in fp32 registers.
    """

    A: Any
    B: Any
    C: Any
    total: Any

    @staticmethod
    def alloc(config: GemmConfig, columns: int) -> TileBuffers:
        """Allocate the memory; ``columns`` of the result are stored at once."""
        return TileBuffers(*_alloc(config, columns))


@T.macro
def _alloc(config, columns):
    tiles, dtype = config.tiles, config.dtype
    B_shape = (tiles.N, tiles.K) if config.transposed else (tiles.K, tiles.N)
    A_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
    B_tile = T.alloc_shared(B_shape, dtype)
    C_tile = T.alloc_shared((tiles.M, columns), config.out_dtype)
    total = T.alloc_fragment((tiles.M, tiles.N), "float32")
    return A_tile, B_tile, C_tile, total


@T.macro
def load_b(config, B, n, k, B_tile):
    """Load the tile of B whose first column is ``n`` and whose first row is ``k``."""
    T.copy(B[n, k] if config.transposed else B[k, n], B_tile)


@T.macro
def accumulate(config, buffers):
    """Compute ``buffers.total += buffers.A @ buffers.B`` in fp32.

    Each warp group multiplies rows of its own. Its instructions are twice as wide as with
    TileLang's default, a square per warp group, and read less shared memory.

    Tensor cores of sm_90 accumulate fp8 products in fewer bits than fp32. So CUDA cores add the
    products of each tile, as CUTLASS does without fast accumulation.
    """
    A_tile, B_tile, total = buffers.A, buffers.B, buffers.total
    transposed = config.transposed
    if config.scaled:
        product = T.alloc_fragment(total.shape, "float32")
        T.gemm(A_tile, B_tile, product, transpose_B=transposed, policy=ROWS, clear_accum=True)
        for i, j in T.Parallel(*total.shape):
            total[i, j] += product[i, j]
    else:
        T.gemm(A_tile, B_tile, total, transpose_B=transposed, policy=ROWS)


@T.macro
def multiply(config, A, rows, B, n, buffers):
    """Compute ``buffers.total``, a tile of A @ B, with ``tiles.stages`` tiles in flight.

    Args:
        rows: indices of A up to the first row of the tile.
        n: first column of the tile.
    """
    T.clear(buffers.total)
    for step in T.Pipelined(T.ceildiv(config.K, config.tiles.K), num_stages=config.tiles.stages):
        k = step * config.tiles.K
        T.copy(A[(*rows, k)], buffers.A)
        load_b(config, B, n, k, buffers.B)
        accumulate(config, buffers)


@T.macro
def scale(config, total, operands):
    """Multiply ``total`` by the scales of fp8 operands; do nothing for other types."""
    if config.scaled:
        factor = operands.scale_a[0] * operands.scale_b[0]
        for i, j in T.Parallel(*total.shape):
            total[i, j] *= factor


@T.macro
def add_bias(config, total, operands, n):
    """Compute ``total[i, j] += bias[n + j]``; columns past the end of bias do not change.

    Do nothing if the kernel has no bias.
    """
    if config.biased:
        row = T.alloc_fragment((total.shape[1],), config.out_dtype)
        T.copy(operands.bias[n], row)
        for i, j in T.Parallel(*total.shape):
            total[i, j] += row[j]


@T.macro
def add_tile(total, tile):
    """Compute ``total += tile``, where ``tile`` has another type."""
    for i, j in T.Parallel(*total.shape):
        total[i, j] += tile[i, j]


@T.macro
def store(buffers, target, second=None):
    """Round ``buffers.total`` and store it, as many columns at a time as ``buffers.C`` has.

    Args:
        target: a tensor with the indices up to the first row and with the first column.
        second: another target.
    """
    columns = buffers.C.shape[1]
    if columns == buffers.total.shape[1]:
        T.copy(buffers.total, buffers.C)
        T.copy(buffers.C, _element(target, 0))
        if second is not None:
            T.copy(buffers.C, _element(second, 0))
    else:
        for first in T.unroll(0, buffers.total.shape[1], columns):
            T.copy(buffers.total[:, first : first + columns], buffers.C)
            T.copy(buffers.C, _element(target, first))
            if second is not None:
                T.copy(buffers.C, _element(second, first))


def _element(target: tuple, column: Any) -> Any:
    """Return an element of a target of ``store``; a macro would rename the tensor."""
    tensor, rows, n = target
    return tensor[(*rows, n + column)]
