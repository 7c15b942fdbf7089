"""What attention over a sharded sequence is asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...runtime.kernel.kernel import capturing
from ..core.problem import refused, require_like
from .sequence import Sharding, check_cu_seqlens, require_chunks, require_offsets

OP = "sp_attention"
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
"""Of q and k, and of v: what there are kernels for."""
_MOST = torch.finfo(torch.float32).max
_Maxima: TypeAlias = "tuple[int | None, int | None]"
_asserted = WeakTensorKeyDictionary()
"""By cu_seqlens_q and cu_seqlens_k: for which problems and maxima the GPU was told to assert them,
and the versions of both then."""


@dataclass(frozen=True)
class AttentionProblem:
    """Attention of ``ranks`` ranks; for each a kernel and memory are kept.

    What differs from batch to batch, where packed sequences begin and how long the longest one is,
    is no part of it.

    Attributes:
        batch: sequences.
        q_rows, k_rows: of a rank: of each sequence, or of all that are packed.
        heads, kv_heads: of q, and of k and v.
        dim, v_dim: of a head of q and k, and of v.
        layout: one of ``sequence.PARTS``.
        scale: of the products of q and k.
        packed: whether sequences lie one behind the other, with ``cu_seqlens``.
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
        """How sequences are cut."""
        return Sharding(self.layout, self.ranks)

    @property
    def q_total(self) -> int:
        """Rows of q on all ranks: of each sequence, or of all that are packed."""
        return self.q_rows * self.ranks

    @property
    def k_total(self) -> int:
        """The same of k."""
        return self.k_rows * self.ranks

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self.heads // self.kv_heads

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        rows = (self.q_rows, self.heads, self.v_dim)
        return rows if self.packed else (self.batch, *rows)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the logarithms of the sums."""
        rows = (self.heads, self.q_rows)
        return rows if self.packed else (self.batch, *rows)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of these logarithms, and what numbers and gradients are added in: fp32, or fp64."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def tile_dtype(self) -> str:
        """TileLang's name of the type."""
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
    """The problem of a call. No value of a tensor is read: see ``checked_maxima``.

    Raises:
        TileWeaveError: shapes, types, devices or options that do not fit.
    """
    sharding = Sharding.checked(op, layout, ranks)
    batch = _check_packing(op, q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    packed = batch is not None
    _check_operands(op, q, k, v, packed)
    *_, q_rows, heads, dim = q.shape
    *_, k_rows, kv_heads, v_dim = v.shape
    for name, rows in (("q", q_rows), ("k", k_rows)):
        what = f"{name} has {rows} rows on each rank, {rows * ranks} in all"
        require_chunks(op, what, rows * ranks, sharding)
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
    """Refuse what does not fit whatever the ranks and the layout."""
    extents = "(rows, heads, head_dim)" if packed else "(batch, rows, heads, head_dim)"
    given = "as cu_seqlens_q is given" if packed else "or cu_seqlens_q"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 - packed or 0 in tensor.shape:
            raise refused(op, f"{name} has shape {tuple(tensor.shape)}", f"{extents}, {given}")
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
    """By which products of q and k, of ``dim`` numbers each, are multiplied.

    Raises:
        TileWeaveError: ``scale`` is no positive number that kernels can hold.
    """
    if scale is None:
        return dim**-0.5
    if not isinstance(scale, (int, float)) or not 0 < scale <= _MOST:
        raise refused(op, f"softmax_scale={scale!r}", "a positive float32, or None")
    return float(scale)


def _check_packing(
    op: str, q: torch.Tensor, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None,
    max_q: int | None, max_k: int | None,
) -> int | None:  # fmt: skip
    """How many sequences are packed; None if they are not."""
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    _both_or_none(op, given)
    maxima = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    for name, most in maxima.items():
        if most is None:
            continue
        if cu_q is None:
            raise refused(op, f"{name}={most!r} without cu_seqlens_q", "None")
        if not isinstance(most, (int, torch.SymInt)) or most < 1:
            raise refused(op, f"{name}={most!r}", "a positive int")
    _both_or_none(op, maxima)
    if cu_q is None or cu_k is None:
        return None
    for name, cu_seqlens in zip(given, (cu_q, cu_k), strict=True):
        require_offsets(op, name, cu_seqlens, torch.int32)
        require_like(op, name, cu_seqlens, "q", q, torch.int32)
    if len(cu_q) != len(cu_k):
        raise refused(
            op, f"cu_seqlens_k has shape {tuple(cu_k.shape)}",
            f"{tuple(cu_q.shape)} as cu_seqlens_q",
        )  # fmt: skip
    return len(cu_q) - 1


def _both_or_none(op: str, given: Mapping[str, object]) -> None:
    (first, x), (second, y) = given.items()
    if (x is None) != (y is None):
        missing, other = (first, second) if x is None else (second, first)
        raise refused(op, f"{missing} is None and {other} is given", "both or none")


def obstacle(problem: AttentionProblem) -> str | None:
    """What of a problem there is no kernel for, and what there is."""
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
    """Rows of the longest whole sequence of q and of k, or more; the values of ``cu_seqlens_*`` are
    checked.

    The host reads them where it need not wait, on a CPU, or has to, without maxima; else the GPU
    asserts them itself, in the order of the stream and without the host, once for each pair of
    tensors and each change of them, and in each replay of a graph; if they are wrong, it says so on
    standard error and runs nothing more of this process.

    Args:
        problem: of ``checked_attention`` for the same arguments.

    Raises:
        TileWeaveError: values that do not fit; or maxima are missing while a graph is captured.
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
    """The maxima of offsets that the host has read."""
    op, longest = problem.op, []
    for name, values, total, most in (
        ("q", q, problem.q_total, maxima[0]), ("k", k, problem.k_total, maxima[1])
    ):  # fmt: skip
        check_cu_seqlens(op, f"cu_seqlens_{name}", values, total, problem.sharding)
        found = max(_lengths(values))
        if most is not None and most < found:
            raise refused(
                op, f"max_seqlen_{name}={most}", f"at least {found}, the longest sequence"
            )
        longest.append(found if most is None else most)
    for index, (queries, keys) in enumerate(zip(_lengths(q), _lengths(k), strict=True)):
        least = queries if problem.causal else min(queries, 1)
        if keys < least:
            raise refused(
                op, f"cu_seqlens_k: sequence {index} has {keys} keys for {queries} queries",
                f"at least {least}, as causal={problem.causal}",
            )  # fmt: skip
    return longest[0], longest[1]


def _lengths(values: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(values)]


def _assert_once(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, maxima: tuple[int, int]
) -> None:
    """Let the GPU assert offsets that are new to it; in a graph, in each replay."""
    if capturing() or q.is_inference() or k.is_inference():
        return assert_offsets(problem, q, k, maxima)
    seen = _asserted.setdefault(q, WeakTensorKeyDictionary()).setdefault(k, {})
    versions = (q._version, k._version)
    if seen.get((problem, maxima)) != versions:
        assert_offsets(problem, q, k, maxima)
        seen[problem, maxima] = versions


def assert_offsets(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, maxima: tuple[int, int]
) -> None:
    """Stop the GPU at offsets that ``checked_maxima`` would refuse if it read them."""
    chunks = problem.sharding.chunks
    of_q, of_k = q.diff(), k.diff()
    least = of_q if problem.causal else of_q.clamp(max=1)
    right = (of_k >= least).all()
    for offsets, lengths, total, most in zip(
        (q, k), (of_q, of_k), (problem.q_total, problem.k_total), maxima, strict=True
    ):
        fitting = (lengths >= 0) & (lengths <= most) & (lengths % chunks == 0)
        right &= fitting.all() & (offsets[0] == 0) & (offsets[-1] == total)
    torch._assert_async(
        right,
        f"{problem.op}: cu_seqlens; expected offsets from 0 to {problem.q_total} (q) and "
        f"{problem.k_total} (k), lengths: multiples of {chunks}, at most {maxima}, keys for all "
        f"queries{', at least as many' * problem.causal}",
    )
