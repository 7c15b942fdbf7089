"""How a sequence is cut among ranks, and who attends to what.

Each of ``parts * ranks`` chunks of a sequence belongs to one rank. In ``contiguous`` a rank has one
chunk; in ``zigzag`` it has one from the front and its mirror from the back, chunks ``r`` and
``2 * ranks - 1 - r``, so that causal attention is the same work for all. A batch of packed
sequences is cut sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..core.problem import refused

PARTS = {"contiguous": 1, "zigzag": 2}
"""By layout, how many chunks of each sequence a rank holds."""


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


class Visit(NamedTuple):
    """A rank attends with one of its chunks of queries to one chunk of keys.

    Attributes:
        owner: the rank that holds the keys.
        query, key: which chunks of the sequence.
        pairs: of a query and a key that it sees.
    """

    owner: int
    query: int
    key: int
    pairs: int


@dataclass(frozen=True)
class Sharding:
    """A layout among ``ranks`` ranks. Numbers are ints, tensors, or expressions of a tile program.

    Attributes:
        layout: one of ``PARTS``.
    """

    layout: str
    ranks: int

    @classmethod
    def checked(cls, op: str, layout: str, ranks: int) -> Sharding:
        """The sharding that an argument ``layout`` of ``op`` asks for.

        Raises:
            TileWeaveError: there is no such layout.
        """
        if layout not in PARTS:
            raise refused(op, f"layout={layout!r}", " or ".join(map(repr, PARTS)))
        return cls(layout, ranks)

    @property
    def parts(self) -> int:
        """Chunks of each sequence that a rank holds."""
        return PARTS[self.layout]

    @property
    def chunks(self) -> int:
        """Of each sequence, in all; its length is a multiple of it."""
        return self.parts * self.ranks

    def chunk_of(self, part: Any, rank: Any) -> Any:
        """Which chunk of a sequence a rank holds as its ``part``-th."""
        return rank + part * (2 * self.ranks - 1 - 2 * rank)

    def position(self, row: Any, rank: Any, length: Any) -> Any:
        """Where in a sequence of ``length`` rows a rank's ``row``-th row of it belongs."""
        size = length // self.chunks
        part = row // size
        return row + (self.chunk_of(part, rank) - part) * size

    def visible(
        self, limit: Any, owner: Any, length: Any, clamp: Callable[..., Any] = _clamp
    ) -> Any:
        """How many of the owner's rows lie before ``limit`` in a sequence of ``length`` rows.

        They are the first that it holds: a query that sees keys up to a position sees a prefix of
        every owner's keys.

        Args:
            clamp: of a value, its least and its greatest; ``torch.clamp`` or ``T.clamp`` for
                numbers that are not ints.
        """
        size = length // self.chunks
        return sum(
            clamp(limit - self.chunk_of(part, owner) * size, 0, size) for part in range(self.parts)
        )


def owners_from(rank: Any, ranks: int) -> list[Any]:
    """All ranks in the order in which ``rank`` attends to their keys: its own lie there already,
    and its left neighbour's come first, as a rank begins to send with its right neighbour."""
    return [(rank - step) % ranks for step in range(ranks)]


def attention_schedule(
    rank: int,
    world_size: int,
    layout: str = "contiguous",
    *,
    causal: bool,
    q_length: int,
    k_length: int | None = None,
) -> list[Visit]:
    """What a rank computes of attention over a sharded sequence, in the order in which it does.

    Args:
        layout: ``contiguous`` or ``zigzag``.
        causal: whether the query at position ``p`` sees only the keys up to
            ``p + k_length - q_length``.
        q_length, k_length: of the whole sequence, in rows; ``k_length`` is ``q_length`` if not
            given.

    Returns:
        Its visits; what no query sees is left out.

    Raises:
        TileWeaveError: arguments that do not fit.
    """
    op = "attention_schedule"
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
        seen = query * rows + k_length - q_length - key * columns  # before the first of the queries
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
    """Under the diagonal in ``columns`` columns: the sum of ``clamp(n, 0, columns)`` for n from 1
    to ``queries``."""
    sloped = _clamp(queries, 0, columns)
    return sloped * (sloped + 1) // 2 + max(queries - columns, 0) * columns


def require_chunks(op: str, what: str, length: int, sharding: Sharding) -> None:
    """Refuse a length of a whole sequence that ranks cannot share out.

    Args:
        what: its name and value, for the message.
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
    """Refuse offsets at which sequences of a packed batch cannot begin.

    Args:
        name: of the argument.
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


def shard_sequence(
    x: torch.Tensor,
    rank: int,
    world_size: int,
    layout: str = "contiguous",
    dim: int = 1,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """A rank's rows of whole sequences, as ``sp_attention`` takes them.

    Args:
        x: whole sequences along ``dim``.
        rank, world_size: whose rows, of how many ranks.
        layout: ``contiguous`` or ``zigzag``.
        dim: the axis of the sequence; of packed sequences it is 0 as a rule.
        cu_seqlens: (batch + 1), integers: where in ``dim`` each packed sequence begins, and where
            the last one ends. The host waits for it.

    Returns:
        A new tensor with ``x.shape[dim] / world_size`` rows along ``dim``; differentiable.

    Raises:
        TileWeaveError: arguments that do not fit.
    """
    op = "shard_sequence"
    sharding = _sharding_of(op, rank, world_size, layout)
    dim = _axis(op, "x", x, dim)
    begins = _begins(op, f"x of shape {tuple(x.shape)}", x.shape[dim], sharding, cu_seqlens)
    return x.index_select(dim, _rows(sharding, rank, begins).to(x.device))


def unshard_sequence(
    shards: Sequence[torch.Tensor],
    layout: str = "contiguous",
    dim: int = 1,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Whole sequences from the rows of all ranks: the inverse of ``shard_sequence``.

    Args:
        shards: of rank 0, rank 1, and so on.
        layout, dim, cu_seqlens: as for ``shard_sequence``.

    Raises:
        TileWeaveError: arguments that do not fit.
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
    """Which of all rows a rank holds, in its order."""
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
    """Where sequences begin, and where the last one ends."""
    if cu_seqlens is None:
        require_chunks(op, f"{what}: {total} rows", total, sharding)
        return [0, total]
    require_offsets(op, "cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    values = cu_seqlens.tolist()
    check_cu_seqlens(op, "cu_seqlens", values, total, sharding)
    return values


def require_offsets(op: str, name: str, cu_seqlens: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Refuse a tensor that cannot hold offsets of packed sequences, whatever its values."""
    if cu_seqlens.dtype not in dtypes:
        raise refused(op, f"{name} is of {cu_seqlens.dtype}", " or ".join(map(str, dtypes)))
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise refused(op, f"{name} has shape {tuple(cu_seqlens.shape)}", "(batch + 1,)")
