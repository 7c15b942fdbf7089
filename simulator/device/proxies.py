"""The asynchronous proxy: which generic accesses happen before an access of the TMA.

An access of the TMA is ordered after a generic access only if a ``fence.proxy.async`` is between
them. Source: PTX ISA, "Async proxy".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..memory.clock import Clock, View
from ..memory.order import SETS, Layout
from ..report.errors import SimulationError


class ProxyView(View):
    """View of an access of the TMA: accesses that happen before it.

    Args:
        view: what happens before the instruction.
        fenced: clock of what a proxy fence has ordered before it.
    """

    def __init__(self, view: View, fenced: Clock, layout: Layout) -> None:
        super().__init__(view.parts, view.own)
        self._view, self._fenced, self._layout = view, fenced, layout

    def covers(self, agents: Any, times: Any) -> Any:
        fenced = self._fenced.covers(agents, times) | self._is_asynchronous(agents)
        return self._view.covers(agents, times) & fenced

    def _is_asynchronous(self, agents: Any) -> Any:
        _, block, kind = self._layout.place(agents)
        streams = np.isin(block, list(self._layout.first.values()))
        return (kind >= self._layout.thread_groups + SETS) & ~streams & (agents > 0)


@contextmanager
def explain_missing_fence(view: View, block: Any) -> Iterator[None]:
    """Say that a proxy fence is missing if the reported event is ordered otherwise."""
    try:
        yield
    except SimulationError as error:
        events = block.machine.memory.events
        event = error.event
        if not event or not view.covers(int(events.agent[event]), int(events.time[event])):
            raise
        raise SimulationError(
            "race",
            f"{error.report}\nthe two are ordered, but no fence.proxy.async is between them: the "
            "asynchronous proxy may read older data",
            event=event,
        ) from None
