"""Problem of decode attention, checked."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..core.checks import (
    check_layout,
    refused,
    require_dense,
    require_dense_or_none,
    require_like,
    require_no_overlap,
)
from ..core.epilogue import FP8
from .kernels.config import SHARDINGS, DecodeConfig

NAME = "decode_attention"
LATENT = 576, 512
"""Elements of a key and of a value of a latent cache."""
DIMS = 64, 128
"""Elements of a head for which there are programs."""
PAGES = 16, 32, 64
"""Page sizes for which there are programs, besides the multiples of the last."""
_DTYPES = (torch.bfloat16, torch.float16)
_INDEX_LIMIT = 1 << 31
"""Kernels number tokens and elements of results in int32."""


class Inputs(NamedTuple):
    """Tensors that a call reads.

    Attributes:
        q: (batch, heads, dim).
        k_cache, v_cache: (pages, page_size, kv_heads, dim); no v_cache for latent caches.
        block_table: (batch, pages of a sequence) int32.
        seq_lens: (batch,) int32.
        k_scale, v_scale: one float32 each for fp8 caches, else None.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class Results(NamedTuple):
    """Results of a call.

    Attributes:
        out: (batch, heads, v_dim), in the type of q.
        lse: (batch, heads) float32, or None.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None


@dataclass(frozen=True)
class DecodeProblem:
    """Attention of one query of each sequence. Its program and memory are cached per problem.

    Attributes:
        op: the operator.
        heads, kv_heads: heads of q, and of the cache.
        dim, v_dim: elements of a key and of a value.
        pages, page_size: pages of a rank's cache, and tokens of a page.
        table: pages of a sequence in a rank's block table.
        scale: factor of the products of q and k.
        sharding: one of ``SHARDINGS``.
        latent: whether values are the first columns of keys.
        returns_lse: whether the logarithms are returned.
    """

    op: str
    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    pages: int
    page_size: int
    table: int
    ranks: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    sharding: str
    latent: bool
    returns_lse: bool

    @property
    def config(self) -> DecodeConfig:
        """Parameters of the program."""
        return DecodeConfig(
            self.batch, self.heads, self.kv_heads, self.dim, self.v_dim, self.pages,
            self.page_size, self.table, self.ranks, _tile_dtype(self.dtype),
            _tile_dtype(self.cache_dtype), self.scale, self.sharding, self.returns_lse,
        )  # fmt: skip

    def obstacle(self) -> str | None:
        """Return why no program serves the problem, with what is expected; else None."""
        if self.dtype not in _DTYPES:
            return f"q is of {self.dtype}; expected {' or '.join(map(str, _DTYPES))}"
        if self.latent and self.cache_dtype != self.dtype:
            return f"the latent cache is of {self.cache_dtype}; expected {self.dtype} as q"
        if not self.latent and (self.dim not in DIMS or self.v_dim != self.dim):
            return f"heads have {self.dim} and {self.v_dim} elements; expected 64 or 128 for both"
        # Loads of a latent tile from smaller pages need more barriers than shared memory has.
        pages = PAGES[1:] if self.latent else PAGES
        if self.page_size not in pages and self.page_size % pages[-1]:
            legal = f"{', '.join(map(str, pages))}, or a multiple of {pages[-1]}"
            return f"pages have {self.page_size} tokens; expected {legal}"
        if (tokens := self.pages * self.page_size) >= _INDEX_LIMIT:
            return f"the cache has {tokens} tokens; expected less than 2**31"
        if (elements := self.batch * self.heads * self.dim) >= _INDEX_LIMIT:
            return f"q has {elements} elements; expected less than 2**31"
        return None

    def __str__(self) -> str:
        cache = "" if self.cache_dtype == self.dtype else f", cache {_tile_dtype(self.cache_dtype)}"
        return (
            f"{self.op} of {self.batch} sequences, {self.heads} heads of {self.dim} to "
            f"{self.kv_heads}{' latent' * self.latent}, {_tile_dtype(self.dtype)}{cache}, "
            f"{self.pages} pages of {self.page_size}, {self.table} in a sequence, "
            f"{self.sharding}, scale {self.scale}{', with lse' * self.returns_lse}"
        )


def _tile_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_tensors(inputs: Inputs, out: Any) -> None:
    """Refuse arguments that are no dense tensors."""
    q, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale = inputs
    require_dense(NAME, q=q, k_cache=k_cache, block_table=block_table, seq_lens=seq_lens)
    require_dense_or_none(NAME, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale, out=out)


def checked_problem(
    inputs: Inputs, scale: float | None, sharding: str, returns_lse: bool, ranks: int
) -> DecodeProblem:
    """Return the problem of a call whose tensors are dense.

    Raises:
        TileWeaveError: shapes, types, devices or options do not fit.
    """
    q, k_cache, v_cache, block_table, seq_lens, *_ = inputs
    if q.ndim != 3 or 0 in q.shape:
        raise refused(NAME, f"q has shape {tuple(q.shape)}", "(batch, heads, dim), all positive")
    if not q.is_floating_point() or q.dtype.itemsize < 2:
        raise refused(NAME, f"q is of {q.dtype}", "a floating-point type of 16 bits or more")
    batch, heads, dim = q.shape
    v_dim = _check_caches(q, k_cache, v_cache)
    pages, page_size, kv_heads, _ = k_cache.shape
    if heads % kv_heads:
        legal = f"a number that divides the {heads} heads of q"
        raise refused(NAME, f"k_cache has {kv_heads} heads", legal)
    if block_table.ndim != 2 or block_table.shape[0] != batch or 0 in block_table.shape:
        expected = f"({batch}, pages of a sequence) for q of shape {tuple(q.shape)}"
        raise refused(NAME, f"block_table has shape {tuple(block_table.shape)}", expected)
    if tuple(seq_lens.shape) != (batch,):
        expected = f"({batch},) for q of shape {tuple(q.shape)}"
        raise refused(NAME, f"seq_lens has shape {tuple(seq_lens.shape)}", expected)
    require_like(NAME, "block_table", block_table, "q", q, torch.int32)
    require_like(NAME, "seq_lens", seq_lens, "q", q, torch.int32)
    _check_scales(inputs)
    check_options(scale, sharding)
    scale = dim**-0.5 if scale is None else scale
    return DecodeProblem(
        NAME, batch, heads, kv_heads, dim, v_dim, pages, page_size, block_table.shape[1], ranks,
        q.dtype, k_cache.dtype, float(scale), sharding, v_cache is None, bool(returns_lse),
    )  # fmt: skip


def check_options(scale: Any, sharding: Any) -> None:
    """Refuse values that no call accepts."""
    is_number = isinstance(scale, (int, float, Real)) and not isinstance(scale, bool)
    if scale is not None and (not is_number or not 0 < scale < inf):
        raise refused(NAME, f"scale={scale!r}", "a positive finite number")
    if sharding not in SHARDINGS:
        raise refused(NAME, f"sharding={sharding!r}", ", ".join(map(repr, SHARDINGS)))


def _check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None) -> int:
    """Return the number of elements of a value."""
    dim = q.shape[-1]
    if k_cache.ndim != 4 or k_cache.shape[-1] != dim or 0 in k_cache.shape:
        expected = f"(pages, page_size, kv_heads, {dim}) for q of shape {tuple(q.shape)}"
        raise refused(NAME, f"k_cache has shape {tuple(k_cache.shape)}", expected)
    require_like(NAME, "k_cache", k_cache, "q", q, FP8 if k_cache.dtype == FP8 else None)
    if v_cache is None:
        if (k_cache.shape[2], dim) != (1, LATENT[0]):
            expected = f"v_cache, or (pages, page_size, 1, {LATENT[0]}) for a latent cache"
            raise refused(
                NAME, f"v_cache is None, and k_cache has shape {tuple(k_cache.shape)}", expected
            )
        return LATENT[1]
    shape = tuple(k_cache.shape[:3])
    if v_cache.ndim != 4 or tuple(v_cache.shape[:3]) != shape or 0 in v_cache.shape:
        expected = f"({', '.join(map(str, shape))}, v_dim) as k_cache"
        raise refused(NAME, f"v_cache has shape {tuple(v_cache.shape)}", expected)
    require_like(NAME, "v_cache", v_cache, "k_cache", k_cache)
    return v_cache.shape[-1]


def _check_scales(inputs: Inputs) -> None:
    """Refuse scales of a cache that is not fp8, and fp8 caches without scales."""
    quantized = inputs.k_cache.dtype == FP8
    needed = {"k_scale": quantized, "v_scale": quantized and inputs.v_cache is not None}
    for name, is_needed in needed.items():
        scale = getattr(inputs, name)
        if (scale is not None) != is_needed:
            given = f"{name} is {'None' if scale is None else 'given'}"
            latent = ", latent" * (inputs.v_cache is None)
            legal = f"{name} for caches of {FP8}, and no v_scale for latent ones"
            raise refused(NAME, f"{given}, and k_cache is of {inputs.k_cache.dtype}{latent}", legal)
        if scale is not None:
            if scale.numel() != 1:
                raise refused(NAME, f"{name} has shape {tuple(scale.shape)}", "one element")
            require_like(NAME, name, scale, "q", inputs.q, torch.float32)


def check_result(inputs: Inputs, problem: DecodeProblem, out: torch.Tensor) -> None:
    """Refuse a result of a wrong shape, type or device."""
    shape = problem.batch, problem.heads, problem.v_dim
    if tuple(out.shape) != shape:
        expected = f"{shape} for q of shape {tuple(inputs.q.shape)}"
        raise refused(NAME, f"out has shape {tuple(out.shape)}", expected)
    require_like(NAME, "out", out, "q", inputs.q)


def check_memory(inputs: Inputs, out: torch.Tensor | None) -> None:
    """Refuse caches that kernels cannot read, because a copy would cost more than the call, and
    results that they cannot write or that overlap an argument."""
    check_layout(NAME, inputs.k_cache, "k_cache")
    if inputs.v_cache is not None:
        check_layout(NAME, inputs.v_cache, "v_cache")
    if out is not None:
        check_layout(NAME, out)
        require_no_overlap(NAME, out, **inputs._asdict())
