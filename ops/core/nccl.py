"""Collectives by ``torch.distributed``, which also work in a group of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from ...runtime.host.collectives import (
    all_gather_single,
    reduce_scatter_single,
    run_by_gloo,
    uses_gloo,
)
from ...runtime.host.group import Group
from ...runtime.kernel.kernel import capturing
from .agreement import require_same_call
from .checks import refused, with_packed_strides


class PeerError(TileWeaveError, RuntimeError):
    """Failure of ``torch.distributed``, which has lost a rank.

    Attributes:
        call: what this rank did.
        group: its group.
        peers: the ranks of the group with which it did that.
        reason: what ``torch.distributed`` says.
    """

    def __init__(self, call: str, group: Group, peers: Sequence[int], reason: str) -> None:
        self.call, self.group, self.peers, self.reason = call, group, peers, reason
        who = f"{call} of {global_ranks(group, peers)}"
        super().__init__(f"{who}: {reason}; expected {EVERY_RANK}")

    def __reduce__(self) -> tuple:  # a process group cannot be pickled
        return TileWeaveError, (str(self),)


ADDED = frozenset((
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
))  # fmt: skip
"""Types that both gloo and NCCL add. With others they raise an error of their own on each rank."""
EVERY_RANK = "every rank to run and to make the same calls"


def global_ranks(group: Group, ranks: Sequence[int]) -> str:
    """Return the ranks of a group in messages, by their numbers among all processes."""
    process_group = cast("dist.ProcessGroup", group.process_group)
    numbers = sorted({dist.get_global_rank(process_group, rank) for rank in ranks})
    return f"global rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


class NamedPeers:
    """Context that raises a ``PeerError`` instead of an error of ``torch.distributed``."""

    def __init__(self, call: str, group: Group, peers: Sequence[int]) -> None:
        self._arguments = call, group, peers

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PeerError):
            raise PeerError(*self._arguments, " ".join(str(error).split())) from error


def require_capturable(op: str, group: Group, device: torch.device) -> None:
    """Refuse a group whose transfers a CUDA graph cannot capture."""
    ranks = group.process_group
    if ranks is not None and uses_gloo(ranks, device) and capturing():
        numbers = global_ranks(group, range(group.world_size))
        raise refused(
            op, f"gloo connects the {numbers}, while a CUDA graph is captured",
            "NCCL between them, or no capture",
        )  # fmt: skip


def all_gather(shard: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the rows of all ranks, in rank order."""
    if group.process_group is None:
        return shard
    rows = shard.new_empty(group.world_size * shard.shape[0], *shard.shape[1:])
    all_gather_into(shard, rows, group)
    return rows


def all_gather_into(shard: torch.Tensor, rows: torch.Tensor, group: Group) -> None:
    """Write the rows of all ranks, in rank order, into ``rows``."""
    if group.process_group is None:
        rows.copy_(shard)
    else:
        rows, shard = _bytes(rows), _bytes(shard)
        _complete(all_gather_single, [rows, shard], group)


def reduce_scatter(rows: torch.Tensor, out: torch.Tensor, group: Group) -> None:
    """Write this rank's rows of the sum over ranks into ``out``."""
    if group.process_group is None:
        out.copy_(rows)
    else:
        _complete(reduce_scatter_single, [out, rows], group)


def all_reduce(tensor: torch.Tensor, group: Group) -> None:
    """Sum over ranks, in place."""
    if group.process_group is not None:
        _complete(dist.all_reduce, [tensor], group)


def broadcast(tensor: torch.Tensor, root: int, group: Group) -> None:
    """Replace the values of ``tensor`` by those of the root, in place."""
    if group.process_group is not None:
        _complete(partial(dist.broadcast, group_src=root), [_bytes(tensor)], group)


def all_to_all(sent: torch.Tensor, received: torch.Tensor, group: Group) -> None:
    """Send row ``r`` of ``sent`` to rank ``r``, and write what rank ``r`` sends to row ``r`` of
    ``received``."""
    if group.process_group is None:
        received.copy_(sent)
    else:
        received, sent = _bytes(received), _bytes(sent)
        _complete(dist.all_to_all_single, [received, sent], group)


def all_to_all_rows(
    sent: torch.Tensor, sent_rows: list[int], received: torch.Tensor, received_rows: list[int],
    group: Group,
) -> None:  # fmt: skip
    """Send ``sent_rows[r]`` rows to rank ``r``, and write ``received_rows[r]`` rows from it to
    ``received``, in rank order."""
    if group.process_group is None:
        received.copy_(sent)
    else:
        move = partial(
            dist.all_to_all_single,
            output_split_sizes=received_rows, input_split_sizes=sent_rows,
        )  # fmt: skip
        received, sent = _bytes(received), _bytes(sent)
        _complete(move, [received, sent], group)


def start_exchanges(
    sent: Sequence[torch.Tensor],
    target: int,
    received: Sequence[torch.Tensor],
    source: int,
    group: Group,
) -> list[dist.Work]:
    """Begin to send tensors to rank ``target`` and to receive tensors from rank ``source``. The
    current stream waits for neither until ``wait`` of the returned works."""
    pairs = [(dist.isend, x, target) for x in sent] + [(dist.irecv, x, source) for x in received]
    return dist.batch_isend_irecv([
        dist.P2POp(op, _bytes(tensor), group=group.process_group, group_peer=peer)
        for op, tensor, peer in pairs
    ])  # fmt: skip


def _complete(
    collective: Callable[..., Any], tensors: Sequence[torch.Tensor], group: Group
) -> None:
    """Run a collective to its end.

    Raises:
        PeerError: a rank has ended.
        TileWeaveError: the ranks make different calls; gloo would wait until its timeout. Or a CUDA
            graph is captured, and gloo would not be part of it.
    """
    ranks, device = cast("dist.ProcessGroup", group.process_group), tensors[0].device
    name = getattr(collective, "func", collective).__name__
    is_gloo = uses_gloo(ranks, device)
    if is_gloo:
        require_capturable(name, group, device)
    with NamedPeers(name, group, range(group.world_size)):
        if is_gloo:
            run_by_gloo(collective, tensors, ranks, partial(require_same_call, group))
        else:
            collective(*tensors, group=ranks)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the tensor as bytes if its type is not one of ``ADDED``: gloo does not support fp8."""
    return tensor if tensor.dtype in ADDED else with_packed_strides(tensor).view(torch.uint8)
