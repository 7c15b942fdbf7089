"""Online softmax: maxima and sums of each row, which are updated with each tile of keys."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from .merge import LOWEST


@dataclass(frozen=True)
class Softmax:
    """Registers of a block.

    Attributes:
        S: products of q and k, then their exponentials.
        out: sum of exponentials times v.
        row_max, previous_max: maximum of each row so far, and before this tile of keys.
        rescale: factor that relates the sums so far to the new maximum.
        tile_sum, row_sum: sums of exponentials of this tile of keys, and so far.
        lse: logarithms to base 2 of the sums of exponentials.
        to_log2: factor from products of q and of the numbers in the cache to exponents of 2.
        v_scale: factor of the values in the cache.
    """

    S: Any
    out: Any
    row_max: Any
    previous_max: Any
    rescale: Any
    tile_sum: Any
    row_sum: Any
    lse: Any
    to_log2: Any
    v_scale: Any


@T.macro
def alloc_softmax(config, inputs):
    """Allocate a ``Softmax``, and read the scales."""
    S = T.alloc_fragment((config.M, config.N), "float32")
    out = T.alloc_fragment((config.M, config.v_dim), "float32")
    row_max = T.alloc_fragment((config.M,), "float32")
    previous_max = T.alloc_fragment((config.M,), "float32")
    rescale = T.alloc_fragment((config.M,), "float32")
    tile_sum = T.alloc_fragment((config.M,), "float32")
    row_sum = T.alloc_fragment((config.M,), "float32")
    lse = T.alloc_fragment((config.M,), "float32")
    # Variables, because TVM would repeat loads in each use.
    to_log2, v_scale = T.alloc_var("float32"), T.alloc_var("float32")
    to_log2 = config.to_log2 * scale_factor(config, inputs.k_scale)
    v_scale = scale_factor(config, inputs.v_scale)
    return Softmax(S, out, row_max, previous_max, rescale, tile_sum, row_sum, lse, to_log2, v_scale)


def scale_factor(config: Any, scale: Any) -> Any:
    """Return the value of a scale of an fp8 cache, or 1 for other caches."""
    return scale[0] if config.is_quantized else T.float32(1)


@T.macro
def clear(softmax):
    """Set all sums to 0 and all maxima to their lower bound."""
    T.clear(softmax.S)
    T.clear(softmax.out)
    T.clear(softmax.row_sum)
    T.fill(softmax.row_max, LOWEST)


@T.macro
def mask(config, softmax, split, step):
    """Set the products with keys after the last one to minus infinity."""
    S, first = softmax.S, (split.begin + step) * config.N
    if first + config.N > split.keys:
        for i, j in T.Parallel(config.M, config.N):
            S[i, j] = T.if_then_else(first + j < split.keys, S[i, j], -T.infinity("float32"))


@T.macro
def add_exponentials(config, softmax):
    """Replace S by exponentials, and update the maximum, the sums and ``out`` of each row."""
    S, to_log2 = softmax.S, softmax.to_log2
    T.copy(softmax.row_max, softmax.previous_max)
    T.reduce_max(S, softmax.row_max, dim=1, clear=False)
    for i in T.Parallel(config.M):
        softmax.rescale[i] = T.exp2((softmax.previous_max[i] - softmax.row_max[i]) * to_log2)
    for i, j in T.Parallel(config.M, config.N):
        S[i, j] = T.exp2(S[i, j] * to_log2 - softmax.row_max[i] * to_log2)
    T.reduce_sum(S, softmax.tile_sum, dim=1)
    for i in T.Parallel(config.M):
        softmax.row_sum[i] = softmax.row_sum[i] * softmax.rescale[i] + softmax.tile_sum[i]
    for i, j in T.Parallel(config.M, config.v_dim):
        softmax.out[i, j] *= softmax.rescale[i]


@T.macro
def divide(config, softmax):
    """Divide ``out`` by the sums of exponentials, and compute the logarithms of these sums. Without
    keys the results are zeros and minus infinity."""
    for i, j in T.Parallel(config.M, config.v_dim):
        softmax.out[i, j] = T.if_then_else(
            softmax.row_sum[i] > 0, softmax.out[i, j] * softmax.v_scale / softmax.row_sum[i], 0
        )
    for i in T.Parallel(config.M):
        softmax.lse[i] = softmax.row_max[i] * softmax.to_log2 + T.log2(softmax.row_sum[i])
