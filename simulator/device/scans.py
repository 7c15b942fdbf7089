"""Scans of lines of shared memory: ``tl::CumSum1D``, ``CumSum2D``, ``CumMax1D`` and ``CumMax2D``.

A warp scans a line in segments of 32 elements: by shuffles at doubled distances, then it adds the
last result of the previous segment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ..frontend.accesses import of_threads, uniform
from ..frontend.expressions import Value
from ..frontend.matrix_ops import warps_of
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.threads import WARP
from ..memory.values import convert, numpy_dtype
from .shared import SharedMemory, Source
from .statements import DeviceStatements, shared_address

_NAME = re.compile(r"tl::Cum(Sum|Max)(1|2)D<(\d+)(?:, (\d+))?, (true|false)>::run")
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"Sum": np.add, "Max": np.fmax}


@dataclass(frozen=True)
class Line:
    """Elements at equal distances that each of some warps scans.

    Attributes:
        memory: the shared memory.
        first: address of the first element of each warp.
        stride: distance in bytes.
    """

    memory: SharedMemory
    first: np.ndarray
    stride: int

    def addresses(self, elements: np.ndarray) -> np.ndarray:
        """Return the address of each of these elements, by warp."""
        return self.first[:, None] + elements * self.stride


@dataclass(frozen=True)
class Scan:
    """Inclusive scan of lines of ``extent`` elements of ``dtype``."""

    combine: Callable[[Any, Any], Any]
    reverse: bool
    extent: int
    dtype: np.dtype
    source: Source

    def run(self, source: Line, target: Line, groups: np.ndarray) -> None:
        """Scan a line with each warp.

        Args:
            groups: thread group of each lane, by warp.
        """
        carry = None
        for elements in self._segments():
            lanes = groups[:, elements % WARP]
            values, bad = self._load(source, elements, lanes)
            values, bad = self._scanned(values, bad)
            if carry is not None:
                values = self._combined(values, carry[0][:, None])
                bad = bad | carry[1][:, None]
            carry = values[:, -1], bad[:, -1]
            target.memory.store(
                target.addresses(elements).reshape(-1), values.reshape(-1, 1), bad.reshape(-1),
                lanes.reshape(-1), self.source,
            )  # fmt: skip

    def _segments(self) -> Iterator[np.ndarray]:
        """Yield the elements of each segment, in the order of the scan."""
        starts = range(0, self.extent, WARP)
        for start in reversed(starts) if self.reverse else starts:
            elements = np.arange(start, min(start + WARP, self.extent))
            yield elements[::-1] if self.reverse else elements

    def _load(
        self, line: Line, elements: np.ndarray, lanes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        addresses = line.addresses(elements)
        values, bad = line.memory.load(
            addresses.reshape(-1), self.dtype.itemsize, self.dtype, lanes.reshape(-1), self.source
        )
        poison = np.zeros(len(values), np.bool_) if bad is None else bad[:, 0]
        return values.reshape(addresses.shape), poison.reshape(addresses.shape)

    def _scanned(self, values: np.ndarray, bad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the scan of a segment, in the order of the shuffles."""
        distance = 1
        while distance < WARP:
            later = self._combined(values[:, distance:], values[:, :-distance])
            values = np.concatenate([values[:, :distance], later], axis=1)
            distance *= 2
        return values, np.logical_or.accumulate(bad, axis=1)

    def _combined(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        return convert(self.combine(values, others), self.dtype)


def scan_or(otherwise: Any):
    """Return the compiler of calls of scans; ``otherwise`` compiles other calls."""

    def compile(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
        match = _NAME.fullmatch(call.args[0].value)
        return otherwise(c, call, loc) if match is None else _scan(c, call, match, loc)

    return compile


def _scan(c: DeviceStatements, call: tirx.Call, match: re.Match, loc: str) -> Step:
    """Compile ``run(source, target, N)`` or ``run(source, target, H, W, strides ...)``."""
    op = f"T.cum{match[1].lower()}"
    dtype, source = numpy_dtype(c.pointee(call.args[1], loc)[0].dtype), Source(op, loc)
    places = [shared_address(c, call.args[i], op, loc) for i in (1, 2)]
    sizes = c.indices(call.args[3:], op, loc)
    of_columns, in_block = match[4] == "0", int(match[3])

    def lines(frame: Frame) -> tuple[int, int, list[tuple[int, int]]]:
        """Return number and extent of the lines; for source and target the distances in elements
        of lines and of their elements."""
        numbers = [uniform(size, frame, loc) for size in sizes(frame)]
        if len(numbers) == 1:
            return 1, numbers[0], [(0, 1)] * 2
        height, width = numbers[:2]
        pitches = numbers[2:] or [width] * 2
        if of_columns:
            return width, height, [(1, pitch) for pitch in pitches]
        return height, width, [(pitch, 1) for pitch in pitches]

    def run(frame: Frame) -> None:
        count, extent, distances = lines(frame)
        scan = Scan(_COMBINE[match[1]], match[5] == "true", extent, dtype, source)
        rows = warps_of(frame, op, loc)
        number = frame.block.kernel.thread_indices[0][rows[:, 0]] // WARP
        for first in range(0, count, in_block // WARP if match[2] == "2" else 1):
            line = first + number
            chosen = line < count
            if not chosen.any():
                continue
            starts = [_starts(frame, address, rows[chosen]) for _, address in places]
            source_line, target_line = (
                Line(
                    frame.block.shared[memory], start + line[chosen] * outer * dtype.itemsize,
                    inner * dtype.itemsize,
                )
                for (memory, _), start, (outer, inner) in zip(
                    places, starts, distances, strict=True
                )
            )  # fmt: skip
            scan.run(source_line, target_line, frame.mask.group_of[rows[chosen]])

    return c.preempted(run, call)


def _starts(frame: Frame, address: Value, rows: np.ndarray) -> np.ndarray:
    """Return the address of an operand in the first thread of each of these warps."""
    of_all = np.zeros(len(frame.mask.on), np.int64)
    of_all[frame.mask.threads] = of_threads(address(frame), frame)
    return of_all[rows[:, 0]]


def register(c: DeviceStatements) -> None:
    """Register the scans."""
    for name in ("tirx.call_extern", "tirx.call_pure_extern"):
        c.steps[name] = scan_or(c.steps[name])
