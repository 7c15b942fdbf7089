"""Vector clocks of many agents that cost what differs between them, not what there is.

A clock is never changed, so blocks that know the same share it. What is before a whole launch is
common to all its blocks and stands in one base; what a block learns beyond that stands in pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

_PAGE = 512
"""Agents of a page."""


class Base:
    """Times of all agents; there are about as many bases as launches."""

    def __init__(self, times: np.ndarray) -> None:
        self.times = times
        self._joined: dict[Base, Base] = {}

    def joined(self, other: Base) -> Base:
        if self is other:
            return self
        if other not in self._joined:
            times = np.maximum(self.times, other.times)
            same = [b for b in (self, other) if (b.times == times).all()]
            self._joined[other] = same[0] if same else Base(times)
        return self._joined[other]


class Clock(NamedTuple):
    """Up to which of its times each agent is before a point."""

    base: Base
    pages: dict[int, np.ndarray]
    """By number of the page; what is less than the base's does not count."""

    @staticmethod
    def start(agents: int) -> Clock:
        return Clock(Base(np.zeros(agents, np.int32)), {})

    @staticmethod
    def end(clocks: Iterable[Clock]) -> Clock:
        """What is before any of these points, as a base."""
        clocks = list(clocks)
        base = clocks[0].base
        for clock in clocks:
            base = base.joined(clock.base)
        times, done = base.times.copy(), set()
        for clock in clocks:
            for number, page in clock.pages.items():
                if id(page) not in done:
                    done.add(id(page))
                    part = times[number * _PAGE : (number + 1) * _PAGE]
                    np.maximum(part, page[: len(part)], out=part)
        return Clock(Base(times), {})

    def time(self, agent: int) -> int:
        page = self.pages.get(agent // _PAGE)
        at = self.base.times[agent]
        return int(at if page is None else max(at, page[agent % _PAGE]))

    def covers(self, agents: Any, times: Any) -> Any:
        """Whether these agents' times are before; of one agent, or of each of an array."""
        if not np.ndim(agents):
            return times <= self.time(int(agents))
        found = times <= self.base.times[agents]
        if self.pages and not found.all():
            late = np.flatnonzero(~found)
            at, of = agents.flat[late] // _PAGE, agents.flat[late] % _PAGE
            for number in np.unique(at):
                page = self.pages.get(int(number))
                if page is not None:
                    here = late[at == number]
                    found.flat[here] = times.flat[here] <= page[of[at == number]]
        return found

    def joined(self, other: Clock) -> Clock:
        """What is before either."""
        if self.base is other.base and (self.pages is other.pages or not other.pages):
            return self
        pages = dict(self.pages)
        for number, page in other.pages.items():
            mine = pages.get(number)
            if mine is None:
                pages[number] = page
            elif mine is not page:
                pages[number] = np.maximum(mine, page)
        return Clock(self.base.joined(other.base), pages)

    def with_times(self, times: Mapping[int, int]) -> Clock:
        """The same with these agents at least that far."""
        pages, fresh = dict(self.pages), set()
        for agent, time in times.items():
            number = agent // _PAGE
            if number not in fresh:
                fresh.add(number)
                page = pages.get(number)
                pages[number] = np.zeros(_PAGE, np.int32) if page is None else page.copy()
            pages[number][agent % _PAGE] = max(time, pages[number][agent % _PAGE])
        return Clock(self.base, pages)


class View:
    """What is before an access that several classes of threads make together: what is before each.

    Args:
        parts: the clock of each class, and the agent that class is.
        own: agents all of whose accesses so far are before this one.
    """

    def __init__(self, parts: list[tuple[Clock, int]], own: tuple[int, ...]) -> None:
        self.parts, self.own = parts, own

    @cached_property
    def _distinct(self) -> list[tuple[Clock, int]]:
        """Each different clock once; where several classes have it, it speaks for none of them."""
        found: dict[tuple[int, int], tuple[Clock, int]] = {}
        for clock, agent in self.parts:
            key = (id(clock.base), id(clock.pages))
            found[key] = (clock, -1 if key in found else agent)
        return list(found.values())

    def covers(self, agents: Any, times: Any) -> Any:
        """Whether what these agents did at these times is before the access; of one agent, or of
        each of an array."""
        if not np.ndim(agents):
            agent, time = int(agents), int(times)
            return agent in self.own or all(
                agent == own or time <= clock.time(agent) for clock, own in self._distinct
            )
        found: Any = True
        for clock, agent in self._distinct:
            found = found & (clock.covers(agents, times) | (agents == agent))
        for agent in self.own:
            found = found | (agents == agent)
        return found
