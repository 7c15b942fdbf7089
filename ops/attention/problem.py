"""Checked problems of attention over a sharded sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...runtime.kernel.kernel import capturing
from ..core.checks import refused, require_like
from .sequence import Sharding, check_cu_seqlens, require_chunks, require_offsets

OP = "sp_attention"
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
"""Head dimensions of q and k, and of v, that have kernels."""
_MAX_FLOAT32 = torch.finfo(torch.float32).max
_Maxima: TypeAlias = "tuple[int | None, int | None]"
_asserted = WeakTensorKeyDictionary()
"""For each cu_seqlens_q and cu_seqlens_k: the problems and maxima for which the GPU has asserted
them, and the versions of both tensors at that time."""


@dataclass(frozen=True)
class AttentionProblem:
    """Attention of ``ranks`` ranks; a kernel and memory are kept for each problem.

    Values that change from batch to batch are not part of it: the offsets of packed sequences and
    the length of the longest one.

    Attributes:
        batch: number of sequences.
        q_rows, k_rows: rows of q and k on a rank: of each sequence, or of all packed sequences.
        heads, kv_heads: heads of q, and heads of k and v.
        dim, v_dim: dimension of a head of q and k, and of v.
        layout: one of ``sequence.PARTS``.
        scale: factor of the products of q and k.
        packed: whether sequences are packed, with ``cu_seqlens``.
    """

    batch: int
    q_rows: int
    k_rows: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    ranks: int
    dtype: torch.dtype
    causal: bool
    layout: str
    scale: float
    packed: bool = False
    op: str = OP

    @property
    def sharding(self) -> Sharding:
        """Sharding of the sequences."""
        return Sharding(self.layout, self.ranks)

    @property
    def q_total(self) -> int:
        """Rows of q on all ranks: of each sequence, or of all packed sequences."""
        return self.q_rows * self.ranks

    @property
    def k_total(self) -> int:
        """Rows of k on all ranks: of each sequence, or of all packed sequences."""
        return self.k_rows * self.ranks

    @property
    def group(self) -> int:
        """Heads of q that share a head of k and v."""
        return self.heads // self.kv_heads

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        rows = (self.q_rows, self.heads, self.v_dim)
        return rows if self.packed else (self.batch, *rows)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the logarithms of the sums of exponentials."""
        rows = (self.heads, self.q_rows)
        return rows if self.packed else (self.batch, *rows)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Type of these logarithms and of sums of gradients: fp32 or fp64."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def tile_dtype(self) -> str:
        """Name of the type in TileLang."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        batch = f"{self.batch} {'packed ' * self.packed}sequences"
        return (
            f"{self.op} of {batch}, q ({self.q_rows}, {self.heads}, {self.dim}), "
            f"k ({self.k_rows}, {self.kv_heads}, {self.dim}), v (…, {self.v_dim}) "
            f"{self.tile_dtype}, {'causal' if self.causal else 'full'}, {self.layout}, "
            f"scale {self.scale!r}"
        )


def checked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranks: int,
    *,
    causal: bool,
    layout: str = "contiguous",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    op: str = OP,
) -> AttentionProblem:
    """Return the problem of a call. No tensor value is read: see ``checked_maxima``.

    Raises:
        TileWeaveError: shapes, types, devices or options are invalid.
    """
    sharding = Sharding.checked(op, layout, ranks)
    batch = _check_packing(op, q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    packed = batch is not None
    _check_operands(op, q, k, v, packed)
    *_, q_rows, heads, dim = q.shape
    *_, k_rows, kv_heads, v_dim = v.shape
    for name, rows in (("q", q_rows), ("k", k_rows)):
        label = f"{name} has {rows} rows on each rank, {rows * ranks} in all"
        require_chunks(op, label, rows * ranks, sharding)
    if causal and not packed and k_rows < q_rows:
        raise refused(
            op, f"k has {k_rows} rows on each rank and causal=True", f"at least {q_rows} as q"
        )
    scale = checked_scale(op, dim, softmax_scale)
    return AttentionProblem(
        batch if packed else len(q), q_rows, k_rows, heads, kv_heads, dim, v_dim, ranks,
        q.dtype, bool(causal), layout, scale, packed, op,
    )  # fmt: skip


def _check_operands(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool
) -> None:
    """Refuse operands that are invalid for any number of ranks and any layout."""
    extents = "(rows, heads, head_dim)" if packed else "(batch, rows, heads, head_dim)"
    hint = "as cu_seqlens_q is given" if packed else "or cu_seqlens_q"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 - packed or 0 in tensor.shape:
            raise refused(op, f"{name} has shape {tuple(tensor.shape)}", f"{extents}, {hint}")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            legal = "a floating-point type of 16 bits or more"
            raise refused(op, f"{name} is of {tensor.dtype}", legal)
        require_like(op, name, tensor, "q", q)
    *batch, _, heads, dim = q.shape
    *_, k_rows, kv_heads, _ = k.shape
    for name, tensor, width in (("k", k, dim), ("v", v, v.shape[-1])):
        expected = (*batch, k_rows, kv_heads, width)
        if tuple(tensor.shape) != expected:
            whose = f"q of {tuple(q.shape)} and k of {tuple(k.shape)}"
            raise refused(op, f"{name} has shape {tuple(tensor.shape)}", f"{expected} for {whose}")
    if heads % kv_heads:
        raise refused(op, f"q has {heads} heads", f"a multiple of the {kv_heads} of k and v")


def checked_scale(op: str, dim: int, scale: float | None) -> float:
    """Return the factor of the products of q and k for a head of ``dim`` elements.

    Raises:
        TileWeaveError: ``scale`` is not a positive float32.
    """
    if scale is None:
        return dim**-0.5
    if not isinstance(scale, (int, float)) or not 0 < scale <= _MAX_FLOAT32:
        raise refused(op, f"softmax_scale={scale!r}", "a positive float32, or None")
    return float(scale)


def _check_packing(
    op: str, q: torch.Tensor, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None,
    max_q: int | None, max_k: int | None,
) -> int | None:  # fmt: skip
    """Return the number of packed sequences; None if sequences are not packed."""
    offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    _both_or_none(op, offsets)
    maxima = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    for name, maximum in maxima.items():
        if maximum is None:
            continue
        if cu_q is None:
            raise refused(op, f"{name}={maximum!r} without cu_seqlens_q", "None")
        if not isinstance(maximum, (int, torch.SymInt)) or maximum < 1:
            raise refused(op, f"{name}={maximum!r}", "a positive int")
    _both_or_none(op, maxima)
    if cu_q is None or cu_k is None:
        return None
    for name, cu_seqlens in zip(offsets, (cu_q, cu_k), strict=True):
        require_offsets(op, name, cu_seqlens, torch.int32)
        require_like(op, name, cu_seqlens, "q", q, torch.int32)
    if len(cu_q) != len(cu_k):
        raise refused(
            op, f"cu_seqlens_k has shape {tuple(cu_k.shape)}",
            f"{tuple(cu_q.shape)} as cu_seqlens_q",
        )  # fmt: skip
    return len(cu_q) - 1


def _both_or_none(op: str, arguments: Mapping[str, object]) -> None:
    (first, x), (second, y) = arguments.items()
    if (x is None) != (y is None):
        missing, other = (first, second) if x is None else (second, first)
        raise refused(op, f"{missing} is None and {other} is given", "both or none")


def obstacle(problem: AttentionProblem) -> str | None:
    """Return the value of a problem that has no kernel, and the legal ones; None if it has one."""
    if problem.dtype not in DTYPES:
        return f"q is of {problem.dtype}; expected {' or '.join(map(str, DTYPES))}"
    if (problem.dim, problem.v_dim) not in HEAD_DIMS:
        legal = ", ".join(f"{dim}/{v_dim}" for dim, v_dim in HEAD_DIMS)
        return f"head_dim of q and k/of v is {problem.dim}/{problem.v_dim}; expected {legal}"
    return None


def checked_maxima(
    problem: AttentionProblem,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[int, int]:
    """Return upper bounds of the rows of a whole sequence of q and of k; check ``cu_seqlens_*``.

    The host reads the offsets if they are on the CPU, or if there are no maxima. Otherwise the GPU
    asserts them in stream order, and the host does not wait: once for each pair of tensors and each
    change of them, and in each replay of a graph. If an assertion fails, the GPU prints a message
    to standard error and executes no further work of this process.

    Args:
        problem: result of ``checked_attention`` for the same arguments.

    Raises:
        TileWeaveError: values are invalid, or maxima are missing while a graph is captured.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return problem.q_total, problem.k_total
    maxima = (max_seqlen_q, max_seqlen_k)
    if cu_seqlens_q.device.type != "cpu":
        if max_seqlen_q is not None and max_seqlen_k is not None:
            _assert_once(problem, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
            return max_seqlen_q, max_seqlen_k
        if capturing():
            raise refused(problem.op, "max_seqlen_q is None while a CUDA graph is captured",
                          "both maxima, as the host cannot read cu_seqlens_q")  # fmt: skip
    return _read(problem, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), maxima)


def _read(
    problem: AttentionProblem, q: list[int], k: list[int], maxima: _Maxima
) -> tuple[int, int]:
    """Check offsets that the host has read, and return the maxima."""
    op, longest = problem.op, []
    for name, values, total, maximum in (
        ("q", q, problem.q_total, maxima[0]), ("k", k, problem.k_total, maxima[1])
    ):  # fmt: skip
        check_cu_seqlens(op, f"cu_seqlens_{name}", values, total, problem.sharding)
        length = max(_lengths(values))
        if maximum is not None and maximum < length:
            raise refused(
                op, f"max_seqlen_{name}={maximum}", f"at least {length}, the longest sequence"
            )
        longest.append(length if maximum is None else maximum)
    for index, (queries, keys) in enumerate(zip(_lengths(q), _lengths(k), strict=True)):
        minimum = queries if problem.causal else min(queries, 1)
        if keys < minimum:
            raise refused(
                op, f"cu_seqlens_k: sequence {index} has {keys} keys for {queries} queries",
                f"at least {minimum}, as causal={problem.causal}",
            )  # fmt: skip
    return longest[0], longest[1]


def _lengths(values: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(values)]


def _assert_once(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, maxima: tuple[int, int]
) -> None:
    """Make the GPU assert offsets unless it has; in a graph, in each replay."""
    if capturing() or q.is_inference() or k.is_inference():
        return assert_offsets(problem, q, k, maxima)
    asserted = _asserted.setdefault(q, WeakTensorKeyDictionary()).setdefault(k, {})
    versions = (q._version, k._version)
    if asserted.get((problem, maxima)) != versions:
        assert_offsets(problem, q, k, maxima)
        asserted[problem, maxima] = versions


def assert_offsets(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, maxima: tuple[int, int]
) -> None:
    """Make the GPU assert that ``checked_maxima`` would accept the offsets."""
    chunks = problem.sharding.chunks
    q_lengths, k_lengths = q.diff(), k.diff()
    minimum = q_lengths if problem.causal else q_lengths.clamp(max=1)
    valid = (k_lengths >= minimum).all()
    for offsets, lengths, total, maximum in zip(
        (q, k), (q_lengths, k_lengths), (problem.q_total, problem.k_total), maxima, strict=True
    ):
        fitting = (lengths >= 0) & (lengths <= maximum) & (lengths % chunks == 0)
        valid &= fitting.all() & (offsets[0] == 0) & (offsets[-1] == total)
    torch._assert_async(
        valid,
        f"{problem.op}: cu_seqlens; expected offsets from 0 to {problem.q_total} (q) and "
        f"{problem.k_total} (k), lengths: multiples of {chunks}, at most {maxima}, keys for all "
        f"queries{', at least as many' * problem.causal}",
    )
