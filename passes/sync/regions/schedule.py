"""The order of a launch as numbers: blocks start in order, each runs its statements in order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .accesses import Access, Program
from .footprints import Footprints
from .space import Space


class Timestamps:
    """Numbers the points of a launch: greater means a later block, or later in the same block.

    Attributes:
        weights: of the digits of such a number without its block: the place of a statement, then
            for each loop around it the round and the place therein.
    """

    def __init__(self, accesses: Sequence[Access], program: Program, world_size: int) -> None:
        self._spaces = {
            a: Space(world_size, a.loops, program.values, partly=True) for a in accesses
        }
        self._grid = len(program.grid)
        self._places = 2 * max((max(a.place) for a in accesses), default=0) + 4
        depth = max((len(a.loops) for a in accesses), default=self._grid) - self._grid
        self._rounds = [1] * depth
        for access in accesses:
            extents = self._spaces[access].shape[1 + self._grid :]
            for level, extent in enumerate(extents):
                self._rounds[level] = max(self._rounds[level], extent)
        digits = [self._places]
        for rounds in self._rounds:
            digits += [rounds, self._places]
        self.weights = [math.prod(digits[n + 1 :]) for n in range(len(digits))]
        self.span = math.prod(digits)
        """Points of one block."""

    def rounds(self, access: Access, level: int) -> int:
        """How often the loop number ``level`` around the access goes round, at most."""
        return self._spaces[access].shape[1 + self._grid + level]

    def round_of(self, moment: np.ndarray, level: int) -> np.ndarray:
        """In which round of that loop a point lies."""
        digit = 2 * level + 1
        return moment // self.weights[digit] % (self.weights[digit - 1] // self.weights[digit])

    def of(
        self,
        footprints: Footprints,
        depth: int,
        after: bool = False,
        block: np.ndarray | None = None,
    ) -> np.ndarray:
        """Of each iteration of what stands inside the first ``depth`` loops around an access only,
        before them or ``after``.

        Args:
            block: the number of its block, if not its own.
        """
        access = footprints.access
        places = access.place[self._grid :]
        depth -= self._grid
        space = self._spaces[access]
        block = footprints.block if block is None else block
        moment = space.of(0) + block.reshape(block.shape[: len(space.shape)])
        for level in range(len(self._rounds) + 1):
            moment = moment * self._places
            if level <= depth:
                moment = moment + 2 * places[level] + (after and level == depth)
            if level < len(self._rounds):
                moment = moment * self._rounds[level]
                if level < depth:
                    loop = access.loops[self._grid + level]
                    moment = moment + space.round_of(loop)
        return moment.reshape(moment.shape + (1,) * (footprints.mask.ndim - moment.ndim))
