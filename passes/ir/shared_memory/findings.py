"""Faults in the order of the threads of a block, and the places where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tvm import tirx

from .values import threads_of, whole_warps_of


@dataclass(frozen=True, eq=False)
class Frame:
    """One statement around a place.

    Attributes:
        parent, index: the statement, and which of its inner statements contains the place.
        stmt: that inner statement.
        mask: threads and iterations that reach it.
        is_exact: whether all of these threads reach it if one does.
    """

    parent: tirx.Stmt
    index: int
    stmt: tirx.Stmt
    mask: np.ndarray
    is_exact: bool

    @cached_property
    def threads(self) -> int:
        """Number of threads that reach it."""
        return int(threads_of(self.mask).sum())

    @cached_property
    def whole_warps(self) -> int:
        """Bits of the warps whose threads all reach it."""
        return whole_warps_of(threads_of(self.mask))

    @property
    def is_whole_block(self) -> bool:
        """True if all threads of the block reach it."""
        return self.threads == len(self.mask)


Path = tuple[Frame, ...]


@dataclass(frozen=True)
class Missing:
    """Two accesses that nothing orders, or two barriers of different warps with one number.

    Attributes:
        before, after: where they are.
        warps: bits of the warps that make them.
        what: both accesses, or the operation with the second barrier, for a message.
        publishes: whether the second one is a release.
        is_awaited: whether the first one has ended, or is asynchronous and may still run.
        tile: name of the buffer in shared memory that both access, or "".
        returned: a wait for an mbarrier between both that may return at once, or None.
        number: number of both barriers; None for accesses.
    """

    before: Path
    after: Path
    warps: int
    what: str
    publishes: bool = False
    is_awaited: bool = True
    tile: str = ""
    returned: Path | None = None
    number: int | None = None


@dataclass(frozen=True)
class MisplacedBarrier:
    """A barrier where threads may wait forever, or that the hardware does not have.

    Attributes:
        path: where it is.
        op: name of its operation, as in ``Barrier``.
        what, legal: the fault, and what is legal, for a message.
        places: labels and paths of the places that the message names.
    """

    path: Path
    op: str
    what: str
    legal: str
    places: tuple[tuple[str, Path], ...]


class Found(Exception):
    """The first fault of a function."""

    def __init__(self, finding: Missing | MisplacedBarrier) -> None:
        self.finding = finding
