"""Vector clocks of many agents, whose size depends on how much the clocks differ.

Clocks are immutable, so blocks with equal clocks share one. The times before a launch are common to
all its blocks and are stored in one base. Pages store what a block has observed since then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

_PAGE = 512
"""Number of agents of a page."""


class Base:
    """Times of all agents. There is about one base for each launch."""

    def __init__(self, times: np.ndarray) -> None:
        self.times = times
        self._joined: dict[Base, Base] = {}

    def joined(self, other: Base) -> Base:
        if self is other:
            return self
        if other not in self._joined:
            times = np.maximum(self.times, other.times)
            equal = [b for b in (self, other) if (b.times == times).all()]
            self._joined[other] = equal[0] if equal else Base(times)
        return self._joined[other]


class Clock(NamedTuple):
    """Vector clock: the last time of each agent that happens before a point."""

    base: Base
    pages: dict[int, np.ndarray]
    """Pages by number. A time below that of the base is ignored."""

    @staticmethod
    def start(agents: int) -> Clock:
        return Clock(Base(np.zeros(agents, np.int32)), {})

    @staticmethod
    def end(clocks: Iterable[Clock]) -> Clock:
        """Join these clocks into one that has only a base."""
        clocks = list(clocks)
        base = clocks[0].base
        for clock in clocks:
            base = base.joined(clock.base)
        times, visited = base.times.copy(), set()
        for clock in clocks:
            for number, page in clock.pages.items():
                if id(page) not in visited:
                    visited.add(id(page))
                    part = times[number * _PAGE : (number + 1) * _PAGE]
                    np.maximum(part, page[: len(part)], out=part)
        return Clock(Base(times), {})

    def time(self, agent: int) -> int:
        time, page = self.base.times.item(agent), self.pages.get(agent // _PAGE)
        if page is not None:
            later = page.item(agent % _PAGE)
            return later if later > time else time
        return time

    def range(self, first: int, count: int) -> list[int]:
        """Return the last time of each of ``count`` consecutive agents."""
        if self.pages:
            return self.times(np.arange(first, first + count)).tolist()
        return self.base.times[first : first + count].tolist()

    def times(self, agents: np.ndarray) -> np.ndarray:
        """Return the last time of each of these agents."""
        times = self.base.times[agents].copy()
        numbers = agents // _PAGE
        for number in set(numbers.tolist()):
            page = self.pages.get(number)
            if page is not None:
                in_page = numbers == number
                times[in_page] = np.maximum(times[in_page], page[agents[in_page] % _PAGE])
        return times

    def covers(self, agents: Any, times: Any) -> Any:
        """Return whether these times happen before the point, for one agent or for an array."""
        if not isinstance(agents, np.ndarray):
            return times <= self.time(int(agents))
        covered = times <= self.base.times[agents]
        if self.pages and not covered.all():
            late = np.flatnonzero(~covered)
            pages, offsets = agents.flat[late] // _PAGE, agents.flat[late] % _PAGE
            for number in np.unique(pages):
                page = self.pages.get(int(number))
                if page is not None:
                    in_page = late[pages == number]
                    covered.flat[in_page] = times.flat[in_page] <= page[offsets[pages == number]]
        return covered

    def joined(self, other: Clock) -> Clock:
        """Return the join of both clocks."""
        if self.base is other.base and (self.pages is other.pages or not other.pages):
            return self
        pages = dict(self.pages)
        for number, page in other.pages.items():
            own_page = pages.get(number)
            if own_page is None:
                pages[number] = page
            elif own_page is not page:
                pages[number] = np.maximum(own_page, page)
        return Clock(self.base.joined(other.base), pages)

    def with_times(self, times: Mapping[int, int]) -> Clock:
        """Return a copy in which these agents have at least these times."""
        pages, copied = dict(self.pages), set()
        for agent, time in times.items():
            number = agent // _PAGE
            if number not in copied:
                copied.add(number)
                page = pages.get(number)
                pages[number] = np.zeros(_PAGE, np.int32) if page is None else page.copy()
            if time > pages[number].item(agent % _PAGE):
                pages[number][agent % _PAGE] = time
        return Clock(self.base, pages)


class View:
    """Accesses that happen before an access of several thread groups: before that of each group.

    Args:
        parts: clock and agent of each thread group.
        own: agents whose accesses so far all happen before this one.
    """

    def __init__(self, parts: list[tuple[Clock, int]], own: tuple[int, ...]) -> None:
        self.parts, self.own = parts, own
        self._clocks: list[tuple[Clock, int]] | None = None

    def _distinct(self) -> list[tuple[Clock, int]]:
        """Distinct clocks, each with its agent, or -1 if several thread groups share the clock."""
        if self._clocks is None:
            distinct: dict[tuple[int, int], tuple[Clock, int]] = {}
            for clock, agent in self.parts:
                key = (id(clock.base), id(clock.pages))
                distinct[key] = (clock, -1 if key in distinct else agent)
            self._clocks = list(distinct.values())
        return self._clocks

    def covers(self, agents: Any, times: Any) -> Any:
        """Return whether what these agents did at these times happens before the access, for one
        agent or for an array."""
        if not isinstance(agents, np.ndarray):
            return agents in self.own or self._covers(int(agents), int(times))
        covered: Any = True
        for clock, agent in self._distinct():
            covered = covered & (clock.covers(agents, times) | (agents == agent))
        for agent in self.own:
            covered = covered | (agents == agent)
        return covered

    def _covers(self, agent: int, time: int) -> bool:
        for clock, own in self._clocks or self._distinct():
            if agent != own and time > clock.time(agent):
                return False
        return True
