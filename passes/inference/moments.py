"""The order of a launch as numbers: blocks start in order, each runs its statements in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tvm import tirx

from .accesses import Access, Program
from .boxes import Boxes
from .space import Space


class Moments:
    """Numbers the points of a launch: greater means a later block, or later in the same block."""

    def __init__(
        self, accesses: Sequence[Access], program: Program, world_size: int,
        sizes: Mapping[tirx.Var, int],
    ) -> None:  # fmt: skip
        self._program, self._world_size, self._sizes = program, world_size, sizes
        self._grid = len(program.grid)
        self._places = 2 * max((max(a.place) for a in accesses), default=0) + 4
        depth = max((len(a.loops) for a in accesses), default=self._grid) - self._grid
        self._rounds = [1] * depth
        for access in accesses:
            extents = self._space(access).shape[1 + self._grid :]
            for level, extent in enumerate(extents):
                self._rounds[level] = max(self._rounds[level], extent)

    def _space(self, access: Access) -> Space:
        return Space(self._world_size, access.loops, self._program.values, self._sizes)

    def of(self, boxes: Boxes, depth: int | None = None, after: bool = False) -> np.ndarray:
        """Of each iteration of an access, or of what stands inside the first ``depth`` loops around
        it only."""
        access = boxes.access
        places = access.place[self._grid :]
        serial = len(access.loops) - self._grid
        depth = serial if depth is None else depth - self._grid
        space = self._space(access)
        moment = space.of(0) + boxes.block.reshape(boxes.block.shape[: len(space.shape)])
        for level in range(len(self._rounds) + 1):
            moment = moment * self._places
            if level <= depth:
                moment = moment + 2 * places[level] + (after and level == depth)
            if level < len(self._rounds):
                moment = moment * self._rounds[level]
                if level < depth:
                    loop = access.loops[self._grid + level]
                    moment = moment + space.of(loop.var) - space.of(loop.min)
        return moment.reshape(moment.shape + (1,) * (boxes.mask.ndim - moment.ndim))
