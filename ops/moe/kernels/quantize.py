"""Kernel that quantizes rows to e4m3, with a scale for each 128 columns."""

from typing import Any

import tilelang.language as T

from ...core.quantize import FP8_MAX
from .grouped_gemm import SCALED, end_of

THREADS = 128


def quantize_program(columns: int, experts: int, dtype: str, min_absmax: float, blocks: int) -> Any:
    """Build the kernel: values and scales, as ``quant.quantized`` returns them, of the rows that
    experts have. It does not write other rows, which a grouped GEMM does not use.

    Args:
        columns: a multiple of ``SCALED``.
        min_absmax: lower bound of the largest absolute value of 128 columns.
        blocks: number of persistent blocks.
    """
    rows, groups = T.dynamic("rows"), columns // SCALED

    @T.prim_func
    def quantize_rows(
        x: T.Tensor((rows, groups, SCALED), dtype),
        offsets: T.Tensor((experts,), "int32"),
        values: T.Tensor((rows, groups, SCALED), "float8_e4m3fn"),
        scales: T.Tensor((rows, groups), "float32"),
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            row = T.alloc_fragment((groups, SCALED), "float32")
            scale = T.alloc_fragment((groups,), "float32")
            used = end_of(offsets, experts - 1, rows)
            for wave in T.serial(T.ceildiv(used - block, blocks)):
                number = wave * blocks + block
                for g, j in T.Parallel(groups, SCALED):
                    row[g, j] = x[number, g, j]
                T.reduce_absmax(row, scale, dim=1)
                for g in T.Parallel(groups):
                    scale[g] = T.max(scale[g], min_absmax) / FP8_MAX
                for g in T.Parallel(groups):
                    scales[number, g] = scale[g]
                # No quotient is rounded up from FP8_MAX; a minimum would lose NaN.
                for g, j in T.Parallel(groups, SCALED):
                    values[number, g, j] = row[g, j] / scale[g]

    return quantize_rows
