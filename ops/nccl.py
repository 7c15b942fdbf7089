"""Rows of all ranks by ``torch.distributed``, alike for a process that is alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..runtime.group import Group
from .problem import packed

# Renamed in torch 2.13; the old names warn there.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(share: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows of all ranks, in their order."""
    if group.process_group is None:
        return share
    rows = share.new_empty(group.world_size * share.shape[0], *share.shape[1:])
    all_gather_into(share, rows, group)
    return rows


def all_gather_into(share: torch.Tensor, rows: torch.Tensor, group: Group) -> None:
    """The rows of all ranks, in their order, into ``rows``."""
    if group.process_group is None:
        rows.copy_(share)
    else:
        _gather(_bytes(rows), _bytes(share), group=group.process_group)


def reduce_scatter(rows: torch.Tensor, out: torch.Tensor, group: Group) -> None:
    """This rank's rows of the sum over ranks, into ``out``."""
    if group.process_group is None:
        out.copy_(rows)
    else:
        _reduce(out, rows, group=group.process_group)


def all_reduce(whole: torch.Tensor, group: Group) -> None:
    """The sum over ranks, in place."""
    if group.process_group is not None:
        dist.all_reduce(whole, group=group.process_group)


def all_to_all(given: torch.Tensor, got: torch.Tensor, group: Group) -> None:
    """Row ``r`` of ``given`` goes to rank ``r``; what this rank gets lies in ``got`` by rank."""
    if group.process_group is None:
        got.copy_(given)
    else:
        dist.all_to_all_single(_bytes(got), _bytes(given), group=group.process_group)


def start_exchange(
    given: torch.Tensor, to: int, got: torch.Tensor, source: int, group: Group
) -> list[dist.Work]:
    """Begin to send ``given`` to rank ``to`` and to fill ``got`` by rank ``source``. What comes
    next in the current stream does not wait for it, but for each of the works that it is told to.
    """
    return start_exchanges([given], to, [got], source, group)


def start_exchanges(
    given: Sequence[torch.Tensor],
    to: int,
    got: Sequence[torch.Tensor],
    source: int,
    group: Group,
) -> list[dist.Work]:
    """``start_exchange`` of several tensors at a time."""
    pairs = [(dist.isend, x, to) for x in given] + [(dist.irecv, x, source) for x in got]
    return dist.batch_isend_irecv([
        dist.P2POp(op, _bytes(tensor), group=group.process_group, group_peer=peer)
        for op, tensor, peer in pairs
    ])  # fmt: skip


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All that is moved is moved so: gloo knows no fp8."""
    return packed(tensor).view(torch.uint8)
