"""Paged caches of ranks, and attention to them by definition, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tileweave.ops.decode.kernels.config import DecodeConfig

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
SCALES = 0.75, 3.0
"""Factors of the keys and of the values of fp8 caches."""


@dataclass(frozen=True)
class Sequences:
    """Queries, and the tokens of all sequences, before they are sharded.

    Attributes:
        q: (batch, heads, dim).
        keys, values: of each sequence, (tokens, kv_heads, dim) and (tokens, kv_heads, v_dim), as
            the cache holds them.
    """

    config: DecodeConfig
    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    lengths: list[int] = field(default_factory=list)

    @staticmethod
    def of(config: DecodeConfig, lengths: list[int], seed: int = 0) -> Sequences:
        """Return random numbers."""
        rng = np.random.default_rng(seed)

        def numbers(dtype: str, *shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(DTYPES[dtype])

        q = numbers(config.dtype, config.batch, config.heads, config.dim)
        dtype, kv_heads = config.cache_dtype, config.kv_heads
        keys = [numbers(dtype, n, kv_heads, config.dim) for n in lengths]
        values = [numbers(dtype, n, kv_heads, config.v_dim) for n in lengths]
        if config.is_latent:
            values = [k[..., : config.v_dim] for k in keys]
        return Sequences(config, q, keys, values, lengths)

    @property
    def scales(self) -> dict[str, float]:
        """Factors that the program has parameters for."""
        return (
            dict(zip(("k_scale", "v_scale"), SCALES, strict=True))
            if self.config.is_quantized
            else {}
        )

    def owned(self, length: int, rank: int) -> np.ndarray:
        """Return the numbers of the tokens of a sequence that a rank holds."""
        config, tokens = self.config, np.arange(length)
        if config.sharding == "contiguous":
            return tokens[tokens // config.capacity == rank]
        if config.sharding == "interleaved":
            return tokens[tokens // config.page_size % config.ranks == rank]
        return tokens[tokens % 3 % config.ranks == rank]

    def inputs(self, rank: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Return the inputs of a rank. Pages are in random order; the block table has invalid pages
        after the last one of a sequence, and the cache has other numbers after its last token."""
        config, rng = self.config, np.random.default_rng(100 * seed + rank)
        size = config.page_size
        shape = config.pages, size, config.kv_heads
        k_cache = np.full((*shape, config.dim), 77, DTYPES[config.cache_dtype])
        v_cache = np.full((*shape, config.v_dim), 55, DTYPES[config.cache_dtype])
        table = np.full((config.batch, config.table), -1, np.int32)
        order, used = rng.permutation(config.pages).astype(np.int32), 0
        lengths = []
        for b, length in enumerate(self.lengths):
            tokens = self.owned(length, rank)
            lengths.append(len(tokens) if config.sharding == "local" else length)
            for page, first in enumerate(range(0, len(tokens), size)):
                place, chosen = order[used], tokens[first : first + size]
                k_cache[place, : len(chosen)] = self.keys[b][chosen]
                v_cache[place, : len(chosen)] = self.values[b][chosen]
                table[b, page] = place
                used += 1
        inputs: dict[str, np.ndarray] = {
            "q": self.q.reshape(-1, config.dim),
            "k_cache": k_cache.reshape(config.pages * size, -1),
            "v_cache": v_cache.reshape(config.pages * size, -1),
            "block_table": table,
            "seq_lens": np.array(lengths, np.int32),
        }
        if config.is_latent:
            del inputs["v_cache"]
        return inputs | {name: np.array([x], np.float32) for name, x in self.scales.items()}

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the result and the logarithms, in fp32."""
        config = self.config
        k_scale = self.scales.get("k_scale", 1.0)
        v_scale = self.scales.get("v_scale", 1.0)
        out = np.zeros((config.batch, config.heads, config.v_dim), np.float32)
        lse = np.full((config.batch, config.heads), -np.inf, np.float32)
        for b, length in enumerate(self.lengths):
            if not length:
                continue
            for h in range(config.heads):
                kv = h // config.group
                keys, values = (x[b][:, kv].astype(np.float64) for x in (self.keys, self.values))
                products = keys @ self.q[b, h].astype(np.float64) * (config.scale * k_scale)
                weights = np.exp(products - products.max())
                out[b, h] = weights @ values / weights.sum() * v_scale
                lse[b, h] = np.log(weights.sum()) + products.max()
        return out, lse


def check(results: list[dict[str, Any]], sequences: Sequences, tolerance: float) -> None:
    """Compare the results of all ranks with the definition, and with each other bit by bit."""
    out, lse = sequences.expected()
    for result in results:
        for name in ("out", "lse"):
            assert result[name].tobytes() == results[0][name].tobytes(), f"{name} differs by rank"
    actual = np.asarray(results[0]["out"]).astype(np.float32).reshape(out.shape)
    error = np.abs(actual - out).max() / max(np.abs(out).max(), 1e-6)
    assert error <= tolerance, error
    empty = np.isneginf(lse)
    assert np.array_equal(np.isneginf(results[0]["lse"]), empty)
    assert np.allclose(results[0]["lse"][~empty], lse[~empty], rtol=1e-3, atol=2e-3)
    for b, length in enumerate(sequences.lengths):
        if not length:
            assert not actual[b].any()
