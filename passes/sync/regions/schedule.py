"""Timestamps of a launch: blocks start in order, and each block runs its statements in order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .accesses import Access, Program
from .footprints import Footprints
from .space import IterationSpace


class Timestamps:
    """Number the points of a launch: greater means a later block, or later in the same block.

    A timestamp is a mixed-radix number. Its digits are the block, the position of the outermost
    statement, and for each loop the iteration and the position inside the loop body.

    Attributes:
        weights: weights of the digits after the block.
    """

    def __init__(self, accesses: Sequence[Access], program: Program, world_size: int) -> None:
        self._spaces = {
            a: IterationSpace(world_size, a.loops, program.values, allow_unknown_ranges=True)
            for a in accesses
        }
        self._grid = len(program.grid)
        self._positions = 2 * max((max(a.positions) for a in accesses), default=0) + 4
        depth = max((len(a.loops) for a in accesses), default=self._grid) - self._grid
        self._iterations = [1] * depth
        for access in accesses:
            extents = self._spaces[access].shape[1 + self._grid :]
            for level, extent in enumerate(extents):
                self._iterations[level] = max(self._iterations[level], extent)
        digits = [self._positions]
        for count in self._iterations:
            digits += [count, self._positions]
        self.weights = [math.prod(digits[n + 1 :]) for n in range(len(digits))]
        self.span = math.prod(digits)
        """Number of points in one block."""

    def max_iterations(self, access: Access, level: int) -> int:
        """Return the maximum number of iterations of loop ``level`` around the access."""
        return self._spaces[access].shape[1 + self._grid + level]

    def iteration_of(self, timestamp: np.ndarray, level: int) -> np.ndarray:
        """Return the iteration of loop ``level`` at a point of the launch."""
        digit = 2 * level + 1
        return timestamp // self.weights[digit] % (self.weights[digit - 1] // self.weights[digit])

    def of_access(
        self,
        footprints: Footprints,
        depth: int,
        after: bool = False,
        block: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the timestamp of each iteration of a statement inside the outer ``depth`` loops.

        The point is just before the access of ``footprints``, or just after it.

        Args:
            after: take the point after the access.
            block: block number to use instead of the access's own.
        """
        access = footprints.access
        positions = access.positions[self._grid :]
        depth -= self._grid
        space = self._spaces[access]
        block = footprints.block if block is None else block
        timestamp = space.evaluate(0) + block.reshape(block.shape[: len(space.shape)])
        for level in range(len(self._iterations) + 1):
            timestamp = timestamp * self._positions
            if level <= depth:
                timestamp = timestamp + 2 * positions[level] + (after and level == depth)
            if level < len(self._iterations):
                timestamp = timestamp * self._iterations[level]
                if level < depth:
                    loop = access.loops[self._grid + level]
                    timestamp = timestamp + footprints.taken(space.iteration_of(loop))
        return timestamp.reshape(timestamp.shape + (1,) * (footprints.mask.ndim - timestamp.ndim))
