"""Mixtures of experts on several nodes: transfers between nodes around exchanges within the node.

Ranks with the same index in their nodes gather their tokens by ``torch.distributed``, so that a
token crosses to a node once. The ranks of a node dispatch the tokens of all nodes to their experts,
and combine the results. The sums of a node return to the owners of the tokens, which add them::

    transfers | gather tokens |                              | return sums |
    node      |               | dispatch | experts | combine |             | add
"""

from __future__ import annotations

import torch

from ..core.groups import TwoLevels
from .routing import Tables


def over_nodes(values: torch.Tensor, levels: TwoLevels) -> torch.Tensor:
    """Return the rows of the ranks with this rank's index in all nodes, ordered by node."""
    return torch.ops.tileweave.all_gather(values, levels.nodes_name, "nccl")


def node_tables(tables: Tables, levels: TwoLevels) -> Tables:
    """Return the tables of the exchange within this node, where each rank owns the N * T tokens of
    the ranks with its index in all N nodes.

    Args:
        tables: those of all ranks.
    """
    source, slots, place = tables
    (node, nodes), per_node = (levels.nodes.rank, levels.nodes.world_size), levels.node.world_size
    rank, choice = source // place.numel(), source % place.numel()
    owner = rank % per_node * nodes + rank // per_node
    rows = per_node * len(source)
    places = over_nodes(place, levels) - node * rows
    return Tables(
        torch.where(source >= 0, owner * place.numel() + choice, -1),
        slots.view(nodes, per_node, *place.shape).transpose(0, 1).reshape(slots.shape),
        torch.where((places >= 0) & (places < rows), places, -1),
    )


def dispatch_rows(
    x: torch.Tensor, tables: Tables, clear_rest: bool, is_padded: bool, levels: TwoLevels,
    transport: str,
) -> torch.Tensor:  # fmt: skip
    """Return the rows of this rank's experts.

    Args:
        x: (T, H), tokens of this rank.
        tables: those of all ranks.
        clear_rest: whether other rows become zero.
        is_padded: see ``RowProblem``.
        transport: transport within the node.
    """
    tables = node_tables(tables, levels)
    tokens = over_nodes(x, levels)
    return torch.ops.tileweave.dispatch_rows(
        tokens, *tables, clear_rest, is_padded, levels.node_name, transport
    )


def combine_rows(
    y: torch.Tensor, weights: torch.Tensor, tables: Tables, is_padded: bool, levels: TwoLevels,
    transport: str,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sums of the results of this rank's tokens.

    Each node adds as ``combine`` does, and rounds; the sums of the nodes are added in fp32.

    Args:
        y: (C, N), the results for the rows of ``dispatch_rows``.
        weights: (T, k), weights of the choices of this rank's tokens.
        tables, is_padded, transport: see ``dispatch_rows``.
    """
    within, weights = node_tables(tables, levels), over_nodes(weights, levels)
    sums = torch.ops.tileweave.combine(y, weights, *within, is_padded, levels.node_name, transport)
    sums = torch.ops.tileweave.all_to_all(sums, 0, 0, levels.nodes_name, "nccl")
    of_nodes = sums.view(levels.nodes.world_size, len(tables.place), y.shape[1])
    return of_nodes.sum(0, dtype=weights.dtype).to(y.dtype)
