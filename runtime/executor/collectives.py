"""Collectives of a plan, by ``torch.distributed``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..host.collectives import all_gather_single, reduce_scatter_single, run_by_gloo, uses_gloo
from ..plans.collectives import CollectiveKind


def enqueue(
    kind: CollectiveKind, dst: torch.Tensor, src: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Run a collective in torch's current stream, which waits for it. The host waits only for
    gloo.

    Args:
        dst, src: contiguous, of the shapes that ``kind`` demands.
        group: None for this process alone.
    """
    dst, src = dst.reshape(-1), src.reshape(-1)
    in_place = not (kind.gathers or kind.scatters)
    if (group is None or in_place) and dst.data_ptr() != src.data_ptr():
        dst.copy_(src)
    if group is None:
        return
    collective, tensors = dist.all_reduce, [dst]
    if kind.gathers:
        # As bytes, because gloo does not support fp8.
        collective, tensors = all_gather_single, [t.view(torch.uint8) for t in (dst, src)]
    elif kind.scatters:
        collective, tensors = reduce_scatter_single, [dst, src]
    if uses_gloo(group, dst.device):
        run_by_gloo(collective, tensors, group)
    else:
        # NCCL's own stream runs it in all releases of torch, and the current stream waits.
        collective(*tensors, group=group, async_op=True).wait()
