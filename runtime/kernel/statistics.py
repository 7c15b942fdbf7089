"""Counts of what this process has done, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stats:
    """Counts since the process began.

    Attributes:
        kernels: kernels that were compiled, or loaded from TileLang's cache. A call with a new size
            adds none if a kernel for other sizes computes it, too.
        compiled: those of them that TileLang's cache did not have, on any rank.
    """

    kernels: int = 0
    compiled: int = 0


_stats = Stats()


def stats() -> Stats:
    """Return the counts of this process."""
    return _stats


def count_kernel() -> None:
    """Count a kernel that is compiled or loaded."""
    global _stats
    _stats = replace(_stats, kernels=_stats.kernels + 1)


def count_compiled(number: int) -> None:
    """Count kernels that the cache did not have."""
    global _stats
    _stats = replace(_stats, compiled=_stats.compiled + number)
