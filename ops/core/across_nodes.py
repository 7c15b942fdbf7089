"""Operators on several nodes: transfers between nodes around calls within the node.

An operator on a mesh of nodes and ranks of a node is a composition, which it declares as
``across``: calls of operators by the ranks of a node, which access each other's memory, and
transfers by ``torch.distributed`` between the ranks with the same index in their nodes. Both run at
the same time, here on a rank of node 1 of 3 that gathers, and on one that adds::

    transfers | own piece to 0 and 2, theirs here      |
    node      | own piece | piece of 2 | piece of 0 |
                          ^            ^ the stream waits for a piece

    transfers |           | sum for 0  | sum for 2 |
    node      | sum for 0 | sum for 2  | own sum   | add
                                                   ^ the stream waits for the sums of 0 and 2

The host waits for nothing if the transfers are NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from . import nccl
from .checks import is_contiguous_and_aligned
from .groups import TwoLevels


@dataclass(frozen=True)
class Mesh:
    """Mesh of nodes and ranks of a node, seen by one rank.

    Attributes:
        node, nodes: index of the rank's node, and number of nodes.
        local, ranks_per_node: index of the rank in its node, and number of ranks of each node.
        start: function ``(sent, target, received, source)``: begins to send tensors to the rank
            with this rank's index in node ``target``, and to receive tensors from that in node
            ``source``. It returns works for ``wait_for``.
        broadcast: function ``(tensor, source)``: replaces the values of ``tensor`` by those of the
            rank with this rank's index in node ``source``.
    """

    node: int
    nodes: int
    local: int
    ranks_per_node: int
    start: Callable[..., Sequence[Any]]
    broadcast: Callable[[torch.Tensor, int], None]

    @classmethod
    @contextmanager
    def of(cls, op: str, ranks: TwoLevels, device: torch.device) -> Iterator[Mesh]:
        """Yield the mesh of a call of an operator, whose transfers are those of
        ``torch.distributed``.

        Raises:
            TileWeaveError: a rank has ended; the message names the operator and the ranks that made
                a transfer or a call of their node. Or a CUDA graph is captured, and the transfers
                cannot be.
        """
        nodes, node = ranks.nodes, ranks.node
        nccl.require_capturable(op, nodes, device)
        try:
            yield cls(
                nodes.rank, nodes.world_size, node.rank, node.world_size,
                partial(_start, nodes), partial(nccl.broadcast, group=nodes),
            )  # fmt: skip
        except nccl.PeerError as error:
            failure = f"{op}: {error.call} {_named(error, ranks)}: {error.reason}"
            first = _first_failure(failure)
            raise TileWeaveError(f"{failure}; expected {nccl.EVERY_RANK}{first}") from error

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def _named(error: nccl.PeerError, ranks: TwoLevels) -> str:
    """Return the nodes and ranks of a failed call."""
    members = nccl.global_ranks(error.group, error.peers)
    if error.group.process_group is ranks.node.process_group:
        return f"within node {ranks.nodes.rank} ({members})"
    numbers = sorted(set(error.peers) - {ranks.nodes.rank})
    return f"with node{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} ({members})"


def _first_failure(failure: str) -> str:
    """Return what the first rank has reported that lost another one, if this rank is not the first.

    A rank that ends after its report closes the connections of others, which then fail, too.
    """
    try:
        store = dist.PrefixStore("tileweave", dist.distributed_c10d._get_default_store())
        if store.check(["first failure"]):
            return f" ({store.get('first failure').decode()})"
        store.set("first failure", f"first failure, on global rank {dist.get_rank()}: {failure}")
    except RuntimeError:  # the rank that serves the store has ended
        pass
    return ""


@dataclass(frozen=True)
class _Transfer:
    """Work of a transfer.

    Attributes:
        nodes: the group of the sender and the receiver.
        peers: the nodes to which it sends, and from which it receives.
    """

    work: Any
    nodes: Group
    peers: tuple[int, int]

    def wait(self) -> None:
        with nccl.NamedPeers("transfer", self.nodes, self.peers):
            self.work.wait()


def _start(
    nodes: Group, sent: Sequence[torch.Tensor], target: int, received: Sequence[torch.Tensor],
    source: int,
) -> list[_Transfer]:  # fmt: skip
    peers = target, source
    with nccl.NamedPeers("transfer", nodes, peers):
        works = nccl.start_exchanges(sent, target, received, source, nodes)
    return [_Transfer(work, nodes, peers) for work in works]


def pieces_of_nodes(
    pieces: Sequence[torch.Tensor], mesh: Mesh
) -> Iterator[tuple[int, torch.Tensor]]:
    """Send a piece to each node; yield the number of each node and the piece that it sent.

    All transfers begin at once. This node's own piece comes first. The current stream waits for a
    piece only when it is yielded.

    Args:
        pieces: the piece for each node, contiguous and of equal shapes; this node's own piece is
            not sent.
    """
    me, count = mesh.node, mesh.nodes
    arriving = []
    for step in range(1, count):
        target, source = (me - step) % count, (me + step) % count
        received = torch.empty_like(pieces[me])
        works = mesh.start([pieces[target]], target, [received], source)
        arriving.append((source, received, works))
    yield me, pieces[me]
    for source, received, works in arriving:
        wait_for(works)
        yield source, received


def sum_over_nodes(
    produce: Callable[[int, torch.Tensor], None], out: torch.Tensor, mesh: Mesh,
    bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write to ``out`` the sum of what all nodes produce for this one.

    What another node receives is produced first, and sent while the next is produced; the own sum
    comes last. The sums of the nodes are added in fp32: the own one first, then the right
    neighbor's, and so on.

    Args:
        produce: writes the node's sum for the node with the given number to the given tensor.
        bias: added to the result in fp32.
    """
    me, count = mesh.node, mesh.nodes
    arriving = []
    for step in range(1, count):
        target, source = (me - step) % count, (me + step) % count
        sent, received = torch.empty_like(out), torch.empty_like(out)
        produce(target, sent)
        works = mesh.start([sent], target, [received], source)
        arriving.append((works, sent, received))
    produce(me, out)
    is_narrow = out.dtype.is_floating_point and out.dtype.itemsize < 4
    total = out.to(torch.float32 if is_narrow else out.dtype, copy=True)
    for works, _, received in arriving:
        wait_for(works)
        total += received
    if bias is not None:
        total += bias
    out.copy_(total)


def wait_for(works: Iterable[Any]) -> None:
    """Make the current stream wait for transfers; gloo makes the host wait."""
    for work in works:
        work.wait()


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if kernels cannot read it."""
    return x if is_contiguous_and_aligned(x) else x.clone(memory_format=torch.contiguous_format)


@contextmanager
def writable(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``out``, or memory that kernels can write and that is copied to ``out`` in the end."""
    if is_contiguous_and_aligned(out):
        yield out
        return
    memory = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    yield memory
    out.copy_(memory)
