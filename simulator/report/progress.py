"""Progress of long simulations: an estimate, a progress bar, and a time limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from ...builtins.errors import TileWeaveError
from ..machine.machine import Machine

_SILENT = 5.0
"""Seconds after which a simulation prints an estimate."""
_PERIOD = 0.5
"""Seconds between two updates."""


class _Bar(tqdm):
    """Progress bar without tqdm's thread: a process with threads should not fork."""

    monitor_interval = 0


class Progress:
    """Count of the blocks that have ended in all schedules, and an estimate of the total time.

    Args:
        schedules: number of schedules.
        shown: whether to print an estimate to stderr after a few seconds, and a progress bar if
            that is a terminal.
        most_seconds: refuse a simulation that is estimated to take longer; None for no limit.
        clock: returns the current time in seconds.
        jobs: largest number of schedules that run at the same time.
    """

    def __init__(
        self, name: str, schedules: int, shown: bool, most_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic, jobs: int = 1,
    ) -> None:  # fmt: skip
        self._name, self._schedules, self._shown = name, schedules, shown
        self._most, self._jobs, self._clock = most_seconds, jobs, clock
        self._start = clock()
        self._next = self._start + _SILENT
        """Time of the next update."""
        self._done, self._left, self._has_printed = 0, schedules, False
        self._blocks = 0
        """Number of blocks of a schedule."""
        self._bar: _Bar | None = None

    @contextmanager
    def schedule(self, machine: Machine) -> Iterator[None]:
        """Watch ``machine`` while it runs one schedule.

        Raises:
            TileWeaveError: all schedules together are estimated to take too long.
        """

        def watch() -> None:
            now = self._clock()
            if now >= self._next:
                ended, running, blocks = machine.block_counts()
                self._update(now, ended, ended + running, blocks)

        machine.watch = watch
        left_before = self._left
        try:
            yield
            self._blocks = machine.block_counts()[2]
            self._done += self._blocks
            self._left -= 1
        finally:
            if self._bar is not None and self._left in (0, left_before):  # last, or a fault
                self._bar.close()

    def ended(self) -> None:
        """Count a schedule that has ended in another process, while others may run there.

        Raises:
            TileWeaveError: all schedules together are estimated to take too long.
        """
        self._done += self._blocks
        self._left -= 1
        now = self._clock()
        if now >= self._next:
            self._update(now, 0, self._blocks, self._blocks)
        if self._bar is not None and not self._left:
            self._bar.close()

    def _update(self, now: float, ended: int, begun: int, blocks: int) -> None:
        """Print the estimate and the bar, with the blocks of the running schedule."""
        self._next = now + _PERIOD
        seconds = self._estimate(now, begun, blocks)
        self._refuse(seconds, blocks)
        self._show(ended, blocks, seconds)

    def _estimate(self, now: float, begun: int, blocks: int) -> float:
        """Return a lower bound of the seconds of all schedules: running blocks count as done, and
        as many of each schedule that may run at the same time."""
        done = self._done + begun * min(self._jobs, self._left)
        return (now - self._start) * blocks * self._schedules / max(1, done)

    def _refuse(self, seconds: float, blocks: int) -> None:
        if self._most is not None and seconds > self._most:
            raise TileWeaveError(
                f"simulate: {self._name} takes an estimated {duration(seconds)} or more for "
                f"{self._schedules} schedules of {blocks} blocks; expected at most "
                f"{duration(self._most)}: smaller sizes, fewer schedules, or --force"
            )

    def _show(self, ended: int, blocks: int, seconds: float) -> None:
        if not self._shown:
            return
        if self._bar is None:
            total = blocks * self._schedules
            self._bar = _Bar(
                total=total, desc=self._name, leave=False, unit="block", disable=None,
                mininterval=_PERIOD,
            )  # fmt: skip
        if not self._has_printed:
            self._has_printed = True
            text = f"simulate: {self._name}: estimated {duration(seconds)} or more"
            tqdm.write(f"{text} for {self._schedules} schedules", file=sys.stderr)
        self._bar.update(self._done + ended - self._bar.n)


def duration(seconds: float) -> str:
    """Return a duration as text: ``40 s``, ``5 min``, ``3 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
