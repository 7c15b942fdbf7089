"""Regions of tensors in the steps of plans, and the rows that a copy engine moves."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...builtins.errors import TileWeaveError
from .parameters import Parameter, Shape


class RegionError(TileWeaveError, IndexError):
    """An index is outside of a tensor, or is neither an integer nor a slice."""


@dataclass(frozen=True)
class Region:
    """Box of elements of a tensor parameter that a step reads or writes.

    Indexing with integers and slices returns a smaller region. The first axis of a symmetric
    tensor is the rank.

    Attributes:
        whole: shape of the tensor as the plan sees it.
        start, extent: along every axis of the tensor, in elements.
        axes: the axes that no integer index has removed.
        shape: extents along ``axes``.
    """

    parameter: Parameter
    whole: Shape
    start: Shape
    extent: Shape
    axes: tuple[int, ...]

    @staticmethod
    def of(parameter: Parameter, whole: Shape) -> Region:
        """Return the region of a whole tensor."""
        return Region(parameter, whole, (0,) * len(whole), whole, tuple(range(len(whole))))

    @property
    def is_whole(self) -> bool:
        return self.extent == self.whole and len(self.axes) == len(self.whole)

    @property
    def shape(self) -> Shape:
        return tuple(self.extent[a] for a in self.axes)

    @property
    def dtype(self) -> str:
        return self.parameter.dtype

    @property
    def key(self) -> tuple:
        """Index of the whole tensor that selects the region."""
        return tuple(
            slice(s, s + e) if axis in self.axes else s
            for axis, (s, e) in enumerate(zip(self.start, self.extent, strict=True))
        )

    @property
    def rank(self) -> int | None:
        """Rank whose memory holds the region; None for a tensor that is not symmetric."""
        return self.start[0] if self.parameter.symmetric else None

    def overlaps(self, other: Region) -> bool:
        """Return whether the regions have an element in common."""
        if self.parameter.name != other.parameter.name:
            return False
        sides = zip(self.start, self.extent, other.start, other.extent, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in sides)

    def __getitem__(self, index: Any) -> Region:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.axes):
            raise RegionError(
                f"{self}: {len(index)} indices; expected at most {len(self.axes)}{at_loc()}"
            )
        start, extent, axes = list(self.start), list(self.extent), list(self.axes)
        for axis, i in zip(self.axes, index, strict=False):
            size = self.extent[axis]
            if isinstance(i, slice):
                low = 0 if i.start is None else _integer(i.start, self, axis)
                high = size if i.stop is None else _integer(i.stop, self, axis)
                step = 1 if i.step is None else _integer(i.step, self, axis)
                if step != 1 or not 0 <= low < high <= size:
                    shown = "" if i.step is None else f":{step}"
                    raise RegionError(
                        f"{self}: slice {low}:{high}{shown} of axis {axis}; expected a part of "
                        f"0:{size} in steps of 1{at_loc()}"
                    )
                start[axis], extent[axis] = start[axis] + low, high - low
            else:
                index = _integer(i, self, axis)
                if not 0 <= index < size:
                    raise RegionError(
                        f"{self}: index {index} of axis {axis}; expected 0 to {size - 1}{at_loc()}"
                    )
                start[axis], extent[axis] = start[axis] + index, 1
                axes.remove(axis)
        return Region(self.parameter, self.whole, tuple(start), tuple(extent), tuple(axes))

    def __str__(self) -> str:
        parts = [
            f"{s}:{s + e}" if axis in self.axes else str(s)
            for axis, (s, e) in enumerate(zip(self.start, self.extent, strict=True))
        ]
        return f"{self.parameter.name}[{', '.join(parts)}]"

    __repr__ = __str__


def _integer(value: Any, region: Region, axis: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise RegionError(
            f"{region}: index {value!r} of axis {axis}; expected an integer or a slice{at_loc()}"
        ) from None


@dataclass(frozen=True)
class Rows:
    """Rows that a copy engine moves: ``count`` rows of ``width`` elements. Rows begin ``dst_pitch``
    elements apart in the destination, and ``src_pitch`` in the source."""

    count: int
    width: int
    dst_pitch: int
    src_pitch: int

    @staticmethod
    def of(dst: Region, src: Region) -> Rows | None:
        """Return the rows of a copy, or None if its regions are not rows."""
        total = math.prod(dst.extent)
        sides = [_rows(r) for r in (dst, src)]
        width = min((side[0] for side in sides if side), default=0)
        pitches = []
        for rows in sides:
            if rows is None or rows[0] not in (width, total):
                return None
            pitches.append(rows[1] if rows[0] == width else width)
        return Rows(total // width, width, *pitches)


def _rows(region: Region) -> tuple[int, int] | None:
    """Return (length, distance) of the contiguous runs of a region, in elements; None if they have
    several distances."""
    axes, stride = [(1, 1)], 1
    for extent, size in zip(reversed(region.extent), reversed(region.whole), strict=True):
        last, distance = axes[-1]
        if extent > 1 and stride == last * distance:
            axes[-1] = (last * extent, distance)
        elif extent > 1:
            axes.append((extent, stride))
        stride *= size
    if len(axes) > 2:
        return None
    return axes[0][0], axes[1][1] if len(axes) == 2 else axes[0][0]


def loc() -> str:
    """Return ``file:line`` of the traced plan: the innermost frame outside of this folder."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def at_loc() -> str:
    """Return `` --> file:line`` on a new line, for errors."""
    return f"\n --> {loc()}"


_HERE = str(Path(__file__).parent)
