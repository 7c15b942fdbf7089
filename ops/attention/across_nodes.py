"""Attention over a sequence that is sharded over several nodes.

The ranks of a node attend to the keys of one node after the other, as ``sp_attention`` of the node:
to their own first. Meanwhile each rank receives the keys of the next node from the rank with its
index there. Results are merged by their log-sum-exps, here on a rank of node 1 of 3::

    transfers | keys of 0   | keys of 2   |
    node      | own keys    | keys of 0   | keys of 2 |
              |             ^ merge       ^ merge     ^ merge

In causal attention a node attends to another one without a mask: its queries see all keys of a
chunk or none. Keys that no query of a node sees are not sent to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from ..core.across_nodes import Mesh, wait_for
from ..core.checks import refused
from .problem import AttentionProblem

Attend: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]
]
"""Function ``(q, k, v, causal)``: the result of the ranks of a node, and the log-sum-exps."""


class VisibleSlices(NamedTuple):
    """Queries of each rank of a node that see keys of another node, and these keys of each of its
    ranks."""

    queries: slice
    keys: slice


def visible_slices(problem: AttentionProblem, node: int, owner: int) -> VisibleSlices | None:
    """Return what the ranks of a node see of another node's keys; None if that is nothing.

    A rank of a zigzag holds a chunk from the front and one from the back of the sequence. The
    chunks of the front are ordered by node, those of the back in reverse.
    """
    if not problem.causal:
        return VisibleSlices(slice(0, problem.q_rows), slice(0, problem.k_rows))
    parts = problem.sharding.parts
    if owner < node:  # the keys of the front come before all queries, those of the back after them
        return VisibleSlices(slice(0, problem.q_rows), slice(0, problem.k_rows // parts))
    if parts == 1:
        return None
    # All keys come before the queries of the back, and after those of the front.
    return VisibleSlices(slice(problem.q_rows // parts, problem.q_rows), slice(0, problem.k_rows))


def require_supported(problem: AttentionProblem) -> None:
    """Refuse what attention on several nodes does not support."""
    where = "on several nodes"
    if problem.packed:
        raise refused(problem.op, f"cu_seqlens_q is given {where}", "None")
    if problem.causal and problem.q_rows != problem.k_rows:
        raise refused(
            problem.op,
            f"q has {problem.q_rows} rows and k has {problem.k_rows} on each rank and causal=True "
            f"{where}",
            "equal numbers",
        )


class _Arriving(NamedTuple):
    """Keys and values in transfer from a node, those that it receives, and the transfers."""

    seen: VisibleSlices | None
    received: list[torch.Tensor]
    sent: list[torch.Tensor]
    works: list[Any]


def _start(
    problem: AttentionProblem, k: torch.Tensor, v: torch.Tensor, step: int, mesh: Mesh
) -> _Arriving | None:
    """Begin to send own keys and values to node ``me + step``, and to receive those of node
    ``me - step``; None after the last step."""
    me, count = mesh.node, mesh.nodes
    if step == count:
        return None
    target, source = (me + step) % count, (me - step) % count
    needed_by_target = visible_slices(problem, target, me)
    needed_here = visible_slices(problem, me, source)
    sent = [x[:, needed_by_target.keys].contiguous() for x in (k, v)] if needed_by_target else []
    received = []
    if needed_here:
        rows = needed_here.keys.stop - needed_here.keys.start
        received = [x.new_empty(x.shape[0], rows, *x.shape[2:]) for x in (k, v)]
    works = []
    if sent or received:
        works = [*mesh.start(sent, target, received, source)]
    return _Arriving(needed_here, received, sent, works)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add to a result the attention of the same queries to other keys.

    Args:
        out, lse: (B, rows, Hq, Dv) and (B, Hq, rows); overwritten.
        part, part_lse: the other result, in the same shapes.
    """
    total = torch.logaddexp(lse, part_lse)
    weight, part_weight = ((x - total).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(weight).add_(part * part_weight)
    lse.copy_(total)


def attend_across(
    attend: Attend, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mesh: Mesh, merge: Callable[..., None] = merge,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the result of this rank, in fp32 or fp64, and the log-sum-exps.

    Args:
        attend: attends to keys of one node. Every rank of the node calls it.
        merge: adds the results for the keys of another node; the cost model skips this.
    """
    step, arriving = 1, _start(problem, k, v, 1, mesh)
    out, lse = attend(q, k, v, problem.causal)
    out = out.to(problem.wide_dtype)
    while arriving is not None:
        step, current = step + 1, arriving
        arriving = _start(problem, k, v, step, mesh)
        wait_for(current.works)
        if current.seen is not None:
            queries = current.seen.queries
            part = attend(q[:, queries].contiguous(), *current.received, False)
            merge(out[:, queries], lse[..., queries], *part)
    return out, lse
