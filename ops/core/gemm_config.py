"""Configuration of the tile kernels of one GEMM operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import tilelang.language as T

from ...builtins import language as W
from .problem import Problem
from .tiles import Tiles, stores_last_peer


@dataclass(frozen=True)
class GemmConfig:
    """Sizes, types and tiles for which a GEMM kernel is instantiated.

    Attributes:
        M: rows of the product of all ranks: of the gathered A, or of the sum over ranks.
        N, K: columns of a rank's product, and its inner dimension.
        ranks: number of ranks.
        dtype: type of A and B in TileLang's spelling.
        transposed: whether B has the shape (N, K); else (K, N).
        tiles: tile shape and pipeline.
        biased: whether the kernel has a parameter bias.
        result: type of bias, of exchanged products and of C; None for the type of A.
    """

    M: int
    N: int
    K: int
    ranks: int
    dtype: str
    transposed: bool
    tiles: Tiles
    biased: bool = False
    result: str | None = None

    @staticmethod
    def of(problem: Problem, tiles: Tiles) -> GemmConfig:
        """Return the configuration that computes a problem with ``tiles``."""
        return GemmConfig(
            problem.M, problem.N, problem.K, problem.ranks, problem.tile_dtype,
            problem.transposed, tiles, problem.biased, problem.tile_out_dtype,
        )  # fmt: skip

    @property
    def out_dtype(self) -> str:
        """Type of bias, of exchanged products and of C."""
        return self.result or self.dtype

    @property
    def scaled(self) -> bool:
        """True if operands are fp8, which have scales."""
        return self.dtype == "float8_e4m3fn"

    @property
    def adds_on_tensor_cores(self) -> bool:
        """True if the tensor cores of a persistent kernel add the products of other ranks, see
        ``partial_sums``. Those of fp8 operands have another type and cannot be operands."""
        return self.ranks > 1 and not self.scaled

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank contributes to a gathered A, or owns of a sum over ranks."""
        return self.M // self.ranks

    @property
    def whole_tiles(self) -> GemmConfig:
        """Configuration in which each rank owns whole tiles: M is rounded up."""
        tiles_per_rank = ceil(ceil(self.M / self.tiles.M) / self.ranks)
        return replace(self, M=self.ranks * tiles_per_rank * self.tiles.M)

    @property
    def stores_last_peer(self) -> bool:
        """True if a persistent kernel stores the products for the last peer itself."""
        return stores_last_peer(self.rows_per_rank, self.N, self.ranks, self.tiles)

    def grid(self, rows: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of a result (rows, N)."""
        return ceil(rows / self.tiles.M), ceil(self.N / self.tiles.N)

    @property
    def tiles_per_rank(self) -> int:
        """Number of tiles of ``rows_per_rank`` rows."""
        rows, columns = self.grid(self.rows_per_rank)
        return rows * columns

    def origin(self, tile: Any, rows: int) -> tuple[Any, Any]:
        """Return the first row and column of a tile of a result (rows, N).

        Args:
            tile: index in the order of ``W.swizzle_2d``.
        """
        row, column = W.swizzle_2d(tile, *self.grid(rows), self.tiles.group_m)
        return row * self.tiles.M, column * self.tiles.N

    @property
    def B(self) -> Any:
        """Declaration of the parameter B."""
        return T.Tensor((self.N, self.K) if self.transposed else (self.K, self.N), self.dtype)

    @property
    def bias(self) -> Any:
        """Declaration of the parameter bias; None if there is none."""
        return T.Tensor((self.N,), self.out_dtype) if self.biased else None

    @property
    def scale(self) -> Any:
        """Declaration of the scale of an operand; None if operands are not fp8."""
        return T.Tensor((1,), "float32") if self.scaled else None

    @property
    def partials(self) -> Any:
        """Declaration of symmetric memory for products that ranks exchange: one slot per rank."""
        return W.Symmetric((self.ranks, self.rows_per_rank, self.N), self.out_dtype)

    @property
    def last_peer_buf(self) -> Any:
        """Declaration of symmetric memory for the products that the kernel of the last source
        stores; None unless ``stores_last_peer``."""
        if not self.stores_last_peer:
            return None
        return W.Symmetric((self.rows_per_rank, self.N), self.out_dtype)
