"""Checks of the words of global memory in which barriers count.

A barrier leaves its words ready for the next one. The accesses are those of
``codegen/include/tileweave/barriers.cuh``: word 0 counts the blocks of a grid that have arrived, in
31 bits, word 1 the calls of a rank, word 2 + r the arrivals of rank r.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...builtins.barriers import words_of
from ..report.errors import SimulationError
from .memory import Access, Tensor
from .shadow import text_of_region

if TYPE_CHECKING:
    from ..machine.block import Block, Frame
    from ..machine.streams import Launch, Stream
    from .clock import View

_FLIP = 1 << 31
"""Bit of word 0 that the last block of a grid flips."""
_BITS = 1 << 32


@dataclass(frozen=True)
class Barrier:
    """A call of a barrier in the program."""

    op: str
    participants: str
    loc: str

    @property
    def counts_blocks(self) -> bool:
        return self.participants != "ranks"

    @property
    def counts_ranks(self) -> bool:
        return self.participants != "grid"


@dataclass
class _AnyOf:
    """View of several accesses: what happens before any of them."""

    views: list[View]

    def covers(self, agents: Any, times: Any) -> Any:
        covered: Any = False
        for view in self.views:
            covered = covered | view.covers(agents, times)
        return covered


@dataclass
class _Users:
    """Last launch of one stream of a rank that used the words."""

    launch: Launch
    loc: str
    left: dict[int, Access | None] = field(default_factory=dict)
    """Access with which each block left the barrier; None until it leaves."""


class BarrierWords:
    """Words of one or more barriers that begin at the same element.

    Args:
        tensor: the tensor that contains the words; None for the words of the process.
        first: flat index of the first word, in the part of a rank if ``tensor`` is symmetric.
    """

    def __init__(self, tensor: Tensor | None, first: int, world_size: int) -> None:
        self.tensor, self.first, self.world_size = tensor, first, world_size
        self.count = 0
        """Number of words that the barriers so far use."""
        self.loc = ""
        self._arrived: dict[int, list[View]] = defaultdict(list)
        """Views of the arrivals of the blocks of each rank in the current phase."""
        self._ahead = np.zeros((world_size, world_size), np.int64)
        """``[r, p]``: arrivals of rank p at rank r minus the calls of rank r."""
        self._users: dict[int, dict[Stream, _Users]] = defaultdict(dict)

    def arrive(self, frame: Frame, barrier: Barrier) -> None:
        """Check the words and count the arrival of a block.

        Raises:
            SimulationError: the words do not have the values that the last barrier left, another
                write is not ordered with the barrier, or another launch may be using them.
        """
        block, access = frame.block, self._access(frame, barrier)
        self._require_alone(block, access, barrier)
        self._users_of(block, barrier).left[block.number] = None
        arrived, is_last = [access.view], True
        if barrier.counts_blocks:
            arrived = self._arrived[block.rank]
            arrived.append(access.view)
            is_last = len(arrived) == block.launch.blocks
            if is_last:
                del self._arrived[block.rank]
            self._count_block(block, access, len(arrived) - 1, is_last)
        if barrier.counts_ranks and is_last:
            self._count_rank(block, replace(access, view=_AnyOf(arrived)))

    def leave(self, frame: Frame, barrier: Barrier) -> None:
        """Note that the block leaves the barrier: what follows may use the words."""
        block, access = frame.block, self._access(frame, barrier)
        self._users_of(block, barrier).left[block.number] = access
        if self.tensor is None:
            return
        if barrier.counts_blocks:
            self._read(block, block.rank, [0], access)
        if barrier.counts_ranks and (block.number == 0 or not barrier.counts_blocks):
            self._read(block, block.rank, range(1, 2 + self.world_size), access)

    @staticmethod
    def _access(frame: Frame, barrier: Barrier) -> Access:
        op = f"{barrier.op} (only barriers may change its words)"
        return frame.block.access(frame.mask.thread_groups, op, barrier.loc)

    def _users_of(self, block: Block, barrier: Barrier) -> _Users:
        of_rank, stream = self._users[block.rank], block.launch.stream
        if stream not in of_rank or of_rank[stream].launch is not block.launch:
            of_rank[stream] = _Users(block.launch, barrier.loc)
        return of_rank[stream]

    def _require_alone(self, block: Block, access: Access, barrier: Barrier) -> None:
        """Refuse words that a launch of another stream may be using."""
        for stream, users in self._users[block.rank].items():
            if stream is block.launch.stream:
                continue
            for number, left in users.left.items():
                if left is None or not access.view.covers(left.agent, left.time):
                    whose = "the process" if self.tensor is None else self.tensor.name
                    raise SimulationError(
                        "arrival",
                        f"{barrier.op} by {block.place} counts in words "
                        f"of {whose} in which block {number} of {stream} may be counting in launch "
                        f"{users.launch.epoch}, since nothing orders the two; expected words of "
                        "its own for each kernel that may run beside another, or an order between "
                        f"them\n --> {barrier.loc}\n --> {users.loc}",
                    )

    def _count_block(self, block: Block, access: Access, arrived: int, is_last: bool) -> None:
        """Count a block after ``arrived`` others. The last one flips a bit and resets the count."""
        if self.tensor is None:
            return
        (seen,) = self._read(block, block.rank, [0], access)
        if seen % _FLIP != arrived:
            meaning = "the blocks that have arrived"
            raise self._unexpected(block, access, 0, seen % _FLIP, arrived, meaning)
        self._write(block.rank, 0, (seen & _FLIP) ^ _FLIP if is_last else seen + 1)

    def _count_rank(self, block: Block, access: Access) -> None:
        """Count one call of a rank, and its arrival at the other ranks."""
        if self.tensor is None:
            return
        me = block.rank
        peers = [p for p in range(self.world_size) if p != me]
        calls, *seen = self._read(block, me, [1, *(2 + p for p in peers)], access)
        for p, arrivals in zip(peers, seen, strict=True):
            expected = (calls + int(self._ahead[me, p])) % _BITS
            if arrivals != expected:
                meaning = f"the arrivals of rank {p} after {calls} calls of the barrier"
                raise self._unexpected(block, access, 2 + p, arrivals, expected, meaning)
        self._write(me, 1, calls + 1)
        self._ahead[me] -= 1
        for p in peers:
            (arrivals,) = self._read(block, p, [2 + me], access)
            self._write(p, 2 + me, arrivals + 1)
            self._ahead[p, me] += 1

    def index(self, rank: int, word: int) -> tuple[int, ...]:
        """Return the tensor index of one word in the part of a rank."""
        tensor = self.tensor
        assert tensor is not None
        shape = tensor.shape[1:] if tensor.symmetric else tensor.shape
        index = tuple(int(i) for i in np.unravel_index(self.first + word, shape))
        return (rank, *index) if tensor.symmetric else index

    def _read(self, block: Block, rank: int, words: Sequence[int], access: Access) -> list[int]:
        """Return words of a rank, by an access with which all others must be ordered."""
        tensor = self.tensor
        assert tensor is not None
        key = tuple(
            np.array(axis) for axis in zip(*(self.index(rank, w) for w in words), strict=True)
        )
        values, poison = tensor.read(key, access)
        if poison is not None:
            index = self.index(rank, words[int(np.flatnonzero(poison)[0])])
            raise SimulationError(
                "poison",
                f"{access.op.split(' ')[0]} counts in {tensor.name}{text_of_region(index)}, which "
                f"is uninitialized, by {block.place}; expected an input "
                f"of zeros\n --> {access.loc}",
            )
        return [int(v) for v in values]

    def _write(self, rank: int, word: int, value: int) -> None:
        assert self.tensor is not None
        self.tensor.count(self.index(rank, word), value % _BITS)

    def _unexpected(
        self, block: Block, access: Access, word: int, seen: int, expected: int, meaning: str
    ) -> SimulationError:
        tensor, index = self.tensor, self.index(block.rank, word)
        assert tensor is not None
        compared = [index, self.index(block.rank, 1)] if word else [index]
        event = max(int(tensor.writes.last[index]) for index in compared)
        last = f"\nlast written: {tensor.memory.describe(event)}" if event else ""
        return SimulationError(
            "arrival",
            f"{access.op.split(' ')[0]} by {block.place} finds {seen} in "
            f"{tensor.name}{text_of_region(index)}; expected {expected}, {meaning}: the words of a "
            f"barrier are zeroed once, and only barriers change them\n --> {access.loc}{last}",
            event=event,
        )


class WordsOfBarriers:
    """The words of all barriers of one schedule, by tensor and first element."""

    def __init__(self) -> None:
        self._all: dict[Tensor | None, dict[int, BarrierWords]] = defaultdict(dict)

    def at(
        self, tensor: Tensor | None, index: tuple[int, ...], block: Block, barrier: Barrier
    ) -> BarrierWords:
        """Return the words of a barrier that begin at ``index``.

        Raises:
            SimulationError: they exceed the tensor, or overlap those of another barrier.
        """
        first, size = 0, _BITS
        if tensor is not None:
            axes = int(tensor.symmetric)
            shape = tensor.shape[axes:]
            first, size = int(np.ravel_multi_index(index[axes:], shape)), int(np.prod(shape))
        world_size = block.machine.world_size
        of_tensor = self._all[tensor]
        if first not in of_tensor:
            of_tensor[first] = BarrierWords(tensor, first, world_size)
        words, count = of_tensor[first], words_of(barrier.participants, world_size)
        if count > words.count:
            words.count, words.loc = count, barrier.loc
            start = f"{barrier.op} by {block.place} counts in {count} word"
            start += f"{'s' if count > 1 else ''} of {tensor.name if tensor else 'the process'} "
            if first + count > size:
                raise SimulationError(
                    "bounds",
                    f"{start}from {text_of_region(index)}, where {size - first} are left; expected "
                    f"{count} of them\n --> {barrier.loc}",
                )
            for other in of_tensor.values():
                low, high = sorted((words, other), key=lambda w: w.first)
                if low is not high and high.first < low.first + low.count:
                    raise SimulationError(
                        "arrival",
                        f"{start}from {text_of_region(index)}, and another barrier in "
                        f"{other.count} from {text_of_region(other.index(block.rank, 0))}, which "
                        "overlap; expected words of its own, or the same first word"
                        f"\n --> {barrier.loc}\n --> {other.loc}",
                    )
        return words
