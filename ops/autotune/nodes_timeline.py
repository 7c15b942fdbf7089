"""Timelines of several nodes that compute and exchange messages, in virtual time.

Each node performs its actions in order: a call within the node takes time, a transfer is started,
and a wait lasts until its transfer is complete. The transfers of a node follow each other, as those
of one NCCL communicator do. A message begins when both nodes have reached it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ...builtins.errors import TileWeaveError


class Phase(NamedTuple):
    """One call within the node, or one transfer; times in us from the beginning.

    Attributes:
        targets, sources: nodes to which a transfer sends, and from which it receives.
    """

    what: str
    begin: float
    end: float
    targets: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


@dataclass
class Prediction:
    """Predicted timeline of one rank.

    Attributes:
        total: time in us until the result is complete.
        calls: calls within the node.
        transfers: transfers between nodes, until their data can be used.
        exposed: time in us in which the node waits for transfers.
    """

    total: float = 0.0
    calls: list[Phase] = field(default_factory=list)
    transfers: list[Phase] = field(default_factory=list)
    exposed: float = 0.0

    @property
    def network(self) -> float:
        """Time in us in which transfers are in flight."""
        return sum(end - begin for begin, end in self._in_flight())

    @property
    def hidden(self) -> float:
        """Share of ``network`` in which the node works; 1 if nothing is transferred."""
        network = self.network
        busy = sum(
            max(min(end, call.end) - max(begin, call.begin), 0.0)
            for begin, end in self._in_flight()
            for call in self.calls
        )
        return busy / network if network else 1.0

    def _in_flight(self) -> Iterator[tuple[float, float]]:
        """Yield the times in which transfers are in flight, without overlap."""
        until = 0.0
        for phase in sorted(self.transfers, key=lambda phase: phase.begin):
            if phase.end > until:
                yield max(phase.begin, until), phase.end
                until = phase.end


class Call(NamedTuple):
    """Call within the node, which lasts ``us``."""

    what: str
    us: float


@dataclass(eq=False)
class Transfer:
    """Messages that begin together on a node.

    Attributes:
        sent, received: bytes for each other node, and from each.
        partners: the transfer of another node at the other end of each message, and its bytes.
        started: time in us at which the node starts it.
        ready: time in us at which earlier transfers of the node are complete, too; None if unknown.
        free: time in us at which all is sent and received; None if unknown.
    """

    sent: dict[int, int]
    received: dict[int, int]
    partners: list[tuple[Transfer, int]] = field(default_factory=list)
    started: float = 0.0
    ready: float | None = None
    free: float | None = None


class Wait(NamedTuple):
    """Wait of the node for a transfer."""

    transfer: Transfer


Action: TypeAlias = Call | Transfer | Wait


def timelines(
    nodes: Sequence[Sequence[Action]], network: float, latency: float
) -> list[Prediction]:
    """Return the timeline of each node.

    Args:
        nodes: the actions of each node.
        network: bytes per us of a message.
        latency: us from the end of a transfer until the node continues.

    Raises:
        TileWeaveError: the nodes wait for each other, or a message has no receiver or no sender.
    """
    _match(nodes)
    all_timelines = [_Timeline(actions, network, latency) for actions in nodes]
    while any([timeline.advance() for timeline in all_timelines]):
        pass
    if stuck := [number for number, timeline in enumerate(all_timelines) if not timeline.is_over]:
        raise TileWeaveError(
            f"timelines: the nodes {', '.join(map(str, stuck))} wait for each other; expected "
            "transfers in an order in which each can end"
        )
    return [timeline.prediction for timeline in all_timelines]


def _match(nodes: Sequence[Sequence[Action]]) -> None:
    """Find the partners of all transfers: the n-th message from a node to another one is the n-th
    that the other one receives from it."""
    sends, receives = defaultdict(list), defaultdict(list)
    for node, actions in enumerate(nodes):
        for transfer in (action for action in actions if isinstance(action, Transfer)):
            for target in transfer.sent:
                sends[node, target].append(transfer)
            for source in transfer.received:
                receives[source, node].append(transfer)
    for source, target in sends.keys() | receives.keys():
        sent, received = sends[source, target], receives[source, target]
        if len(sent) != len(received):
            raise TileWeaveError(
                f"timelines: node {source} sends {len(sent)} messages to node {target}, which "
                f"receives {len(received)}; expected equal numbers"
            )
        for sender, receiver in zip(sent, received, strict=True):
            sender.partners.append((receiver, sender.sent[target]))
            receiver.partners.append((sender, sender.sent[target]))


class _Timeline:
    """Progress of a node."""

    def __init__(self, actions: Sequence[Action], network: float, latency: float) -> None:
        self.prediction = Prediction()
        self._network, self._latency = network, latency
        self._actions, self._free = deque(actions), 0.0
        self._queue: deque[Transfer] = deque()
        """Transfers that are started and not complete, in order."""

    @property
    def is_over(self) -> bool:
        return not self._actions and not self._queue

    def advance(self) -> bool:
        """Continue as far as the other nodes allow; return whether anything happened."""
        happened = False
        while self._actions and self._perform(self._actions[0]):
            self._actions.popleft()
            happened = True
        if self._queue and self._queue[0].ready is None:
            self._queue[0].ready = max(self._queue[0].started, self._free)
            happened = True
        if self._queue and self._complete(self._queue[0]):
            self._queue.popleft()
            happened = True
        return happened

    def _perform(self, action: Action) -> bool:
        """Return False if the end of the action is not known yet."""
        prediction = self.prediction
        if isinstance(action, Call):
            begin, prediction.total = prediction.total, prediction.total + action.us
            prediction.calls.append(Phase(action.what, begin, prediction.total))
        elif isinstance(action, Transfer):
            action.started = prediction.total
            self._queue.append(action)
        elif action.transfer.free is None:
            return False
        else:
            end = action.transfer.free + self._latency
            prediction.exposed += max(end - prediction.total, 0.0)
            prediction.total = max(end, prediction.total)
        return True

    def _complete(self, transfer: Transfer) -> bool:
        """Return False if not all other nodes have reached the transfer yet."""
        begins, ends = [], []
        for partner, nbytes in transfer.partners:
            if partner.ready is None or transfer.ready is None:
                return False
            begins.append(max(transfer.ready, partner.ready))
            ends.append(begins[-1] + nbytes / self._network)
        transfer.free = self._free = max(ends)
        self.prediction.transfers.append(
            Phase(
                "transfer", min(begins), transfer.free + self._latency,
                tuple(transfer.sent), tuple(transfer.received),
            )
        )  # fmt: skip
        return True
