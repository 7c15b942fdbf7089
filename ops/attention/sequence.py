"""Sharding of a sequence among ranks, and the chunks that each rank attends to.

Each of ``parts * ranks`` chunks of a sequence belongs to one rank. In ``contiguous`` a rank has one
chunk. In ``zigzag`` it has two, ``r`` and ``2 * ranks - 1 - r``, one from the front and its mirror
from the back: causal attention is then the same work for all ranks. Each sequence of a packed batch
is sharded separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...builtins.errors import brief_errors
from ..core.checks import refused, require_bools

PARTS = {"contiguous": 1, "zigzag": 2}
"""Number of chunks of each sequence that a rank holds, by layout."""


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


class Visit(NamedTuple):
    """Attention of one of a rank's chunks of queries to one chunk of keys.

    Attributes:
        owner: the rank that holds the keys.
        query, key: indices of the chunks in the sequence.
        pairs: number of pairs of a query and a key that it sees.
    """

    owner: int
    query: int
    key: int
    pairs: int


@dataclass(frozen=True)
class Sharding:
    """A layout among ``ranks`` ranks. Values are ints, tensors, or expressions of a tile program.

    Attributes:
        layout: one of ``PARTS``.
    """

    layout: str
    ranks: int

    @classmethod
    def checked(cls, op: str, layout: str, ranks: int) -> Sharding:
        """Return the sharding for the argument ``layout`` of ``op``.

        Raises:
            TileWeaveError: the layout is unknown.
        """
        if layout not in PARTS:
            raise refused(op, f"layout={layout!r}", " or ".join(map(repr, PARTS)))
        return cls(layout, ranks)

    @property
    def parts(self) -> int:
        """Number of chunks of each sequence that a rank holds."""
        return PARTS[self.layout]

    @property
    def chunks(self) -> int:
        """Number of chunks of each sequence; the length of a sequence is a multiple of it."""
        return self.parts * self.ranks

    def chunk_of(self, part: Any, rank: Any) -> Any:
        """Return the index in the sequence of a rank's chunk ``part``."""
        return rank + part * (2 * self.ranks - 1 - 2 * rank)

    def position(self, row: Any, rank: Any, length: Any) -> Any:
        """Return the position in a sequence of ``length`` rows of a rank's row ``row`` of it."""
        size = length // self.chunks
        part = row // size
        return row + (self.chunk_of(part, rank) - part) * size

    def visible(
        self, limit: Any, owner: Any, length: Any, clamp: Callable[..., Any] = _clamp
    ) -> Any:
        """Return how many of the owner's rows precede ``limit`` in a sequence of ``length`` rows.

        These are its first rows: a query that sees keys up to a position sees a prefix of the keys
        of every owner.

        Args:
            clamp: function of a value, its minimum and its maximum: ``torch.clamp`` or ``T.clamp``
                for values that are not ints.
        """
        size = length // self.chunks
        return sum(
            clamp(limit - self.chunk_of(part, owner) * size, 0, size) for part in range(self.parts)
        )


def owners_from(rank: Any, ranks: int) -> list[Any]:
    """Return all ranks in the order in which ``rank`` attends to their keys.

    Its own keys are local. Its left neighbor's arrive first, because each rank sends to its right
    neighbor first.
    """
    return [(rank - step) % ranks for step in range(ranks)]


@brief_errors
def attention_schedule(
    rank: int,
    world_size: int,
    layout: str = "contiguous",
    *,
    causal: bool,
    q_length: int,
    k_length: int | None = None,
) -> list[Visit]:
    """Return the visits of a rank in attention over a sharded sequence, in order of execution.

    Args:
        layout: ``contiguous`` or ``zigzag``.
        causal: whether the query at position ``p`` sees only the keys up to
            ``p + k_length - q_length``.
        q_length, k_length: rows of the whole sequence; ``k_length`` defaults to ``q_length``.

    Returns:
        The visits in which a query sees a key.

    Raises:
        TileWeaveError: arguments are invalid.
    """
    op = "attention_schedule"
    require_bools(op, causal=causal)
    sharding = _sharding_of(op, rank, world_size, layout)
    k_length = q_length if k_length is None else k_length
    for name, length in (("q_length", q_length), ("k_length", k_length)):
        require_chunks(op, f"{name}={length}", length, sharding)
    if causal and k_length < q_length:
        raise refused(op, f"k_length={k_length}", f"at least q_length={q_length}, as causal=True")
    rows, columns = q_length // sharding.chunks, k_length // sharding.chunks

    def pairs(query: int, key: int) -> int:
        if not causal:
            return rows * columns
        seen = query * rows + k_length - q_length - key * columns  # before the first query
        return _area(seen + rows, columns) - _area(seen, columns)

    parts = range(sharding.parts)
    visits = [
        Visit(owner, query, key, pairs(query, key))
        for owner in owners_from(rank, world_size)
        for query in (sharding.chunk_of(part, rank) for part in parts)
        for key in (sharding.chunk_of(part, owner) for part in parts)
    ]
    return [visit for visit in visits if visit.pairs]


def _area(queries: int, columns: int) -> int:
    """Return the area under the diagonal in ``columns`` columns.

    It is the sum of ``clamp(n, 0, columns)`` for n from 1 to ``queries``.
    """
    sloped = _clamp(queries, 0, columns)
    return sloped * (sloped + 1) // 2 + max(queries - columns, 0) * columns


def require_chunks(op: str, what: str, length: int, sharding: Sharding) -> None:
    """Refuse a length of a whole sequence that cannot be sharded.

    Args:
        what: name and value of the length, for the message.
    """
    if length < 0 or length % sharding.chunks:
        raise refused(
            op, what,
            f"a multiple of {sharding.chunks} for {sharding.ranks} ranks and "
            f"layout={sharding.layout!r}",
        )  # fmt: skip


def check_cu_seqlens(
    op: str, name: str, values: Sequence[int], total: int, sharding: Sharding
) -> None:
    """Refuse invalid offsets of packed sequences.

    Args:
        name: name of the argument.
        total: rows of all sequences.
    """
    if values[0] != 0:
        raise refused(op, f"{name}[0]={values[0]}", "0")
    for index, (begin, end) in enumerate(pairwise(values)):
        if end < begin:
            raise refused(op, f"{name}[{index + 1}]={end}", f"at least {name}[{index}]={begin}")
        require_chunks(op, f"{name}: sequence {index} has length {end - begin}", end - begin,
                       sharding)  # fmt: skip
    if values[-1] != total:
        raise refused(op, f"{name}[-1]={values[-1]}", f"{total}, the rows of all ranks")


@brief_errors
def shard_sequence(
    x: torch.Tensor,
    rank: int,
    world_size: int,
    layout: str = "contiguous",
    dim: int = 1,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a rank's rows of whole sequences, as ``sp_attention`` expects them.

    Args:
        x: whole sequences along ``dim``.
        rank, world_size: the rank, and the number of ranks.
        layout: ``contiguous`` or ``zigzag``.
        dim: the axis of the sequence; usually 0 for packed sequences.
        cu_seqlens: (batch + 1), integers: the start of each packed sequence in ``dim``, and the end
            of the last one. The host waits for it.

    Returns:
        A new tensor with ``x.shape[dim] / world_size`` rows along ``dim``; differentiable.

    Raises:
        TileWeaveError: arguments are invalid.
    """
    op = "shard_sequence"
    sharding = _sharding_of(op, rank, world_size, layout)
    dim = _axis(op, "x", x, dim)
    begins = _begins(op, f"x of shape {tuple(x.shape)}", x.shape[dim], sharding, cu_seqlens)
    return x.index_select(dim, _rows(sharding, rank, begins).to(x.device))


@brief_errors
def unshard_sequence(
    shards: Sequence[torch.Tensor],
    layout: str = "contiguous",
    dim: int = 1,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return whole sequences from the rows of all ranks: the inverse of ``shard_sequence``.

    Args:
        shards: rows of rank 0, rank 1, and so on.
        layout, dim, cu_seqlens: see ``shard_sequence``.

    Raises:
        TileWeaveError: arguments are invalid.
    """
    op, world_size = "unshard_sequence", len(shards)
    if not world_size:
        raise refused(op, "shards is empty", "a tensor of each rank")
    sharding = Sharding.checked(op, layout, world_size)
    dim = _axis(op, "shards[0]", shards[0], dim)
    for rank, shard in enumerate(shards):
        if shard.shape != shards[0].shape:
            raise refused(
                op, f"shards[{rank}] has shape {tuple(shard.shape)}",
                f"{tuple(shards[0].shape)} as shards[0]",
            )  # fmt: skip
    together = torch.cat(list(shards), dim)
    what = f"{world_size} shards of shape {tuple(shards[0].shape)}"
    begins = _begins(op, what, together.shape[dim], sharding, cu_seqlens)
    rows = torch.cat([_rows(sharding, rank, begins) for rank in range(world_size)])
    return together.index_select(dim, rows.argsort().to(together.device))


def _rows(sharding: Sharding, rank: int, begins: Sequence[int]) -> torch.Tensor:
    """Return the indices of the rows that a rank holds, in its order."""
    return torch.cat([
        begin + sharding.position(torch.arange(length // sharding.ranks), rank, length)
        for begin, length in ((begin, end - begin) for begin, end in pairwise(begins))
        if length
    ] or [torch.arange(0)])  # fmt: skip


def _sharding_of(op: str, rank: int, world_size: int, layout: str) -> Sharding:
    if world_size < 1:
        raise refused(op, f"world_size={world_size}", "a positive number")
    if not 0 <= rank < world_size:
        raise refused(op, f"rank={rank}", f"0 to {world_size - 1} for world_size={world_size}")
    return Sharding.checked(op, layout, world_size)


def _axis(op: str, name: str, x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise refused(op, f"dim={dim}", f"an axis of {name} of shape {tuple(x.shape)}")
    return dim % x.ndim


def _begins(
    op: str, what: str, total: int, sharding: Sharding, cu_seqlens: torch.Tensor | None
) -> list[int]:
    """Return the start of each sequence, and the end of the last one."""
    if cu_seqlens is None:
        require_chunks(op, f"{what}: {total} rows", total, sharding)
        return [0, total]
    require_offsets(op, "cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    values = cu_seqlens.tolist()
    check_cu_seqlens(op, "cu_seqlens", values, total, sharding)
    return values


def require_offsets(op: str, name: str, cu_seqlens: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Refuse a tensor whose type or shape is invalid for offsets of packed sequences."""
    if cu_seqlens.dtype not in dtypes:
        raise refused(op, f"{name} is of {cu_seqlens.dtype}", " or ".join(map(str, dtypes)))
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise refused(op, f"{name} has shape {tuple(cu_seqlens.shape)}", "(batch + 1,)")
