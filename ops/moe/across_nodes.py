"""Mixtures of experts on several nodes: transfers between nodes around exchanges within the node.

Ranks with the same index in their nodes gather their tokens by ``torch.distributed``, so that a
token crosses to a node once. The ranks of a node dispatch the tokens of all nodes to their experts,
and combine the results. The sums of a node return to the owners of the tokens, which add them::

    transfers | gather tokens |                              | return sums |
    node      |               | dispatch | experts | combine |             | add
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.groups import TwoLevels


class NodeTables(NamedTuple):
    """Tables of an exchange within a node, where each rank owns the N * T tokens of the ranks with
    its index in all N nodes. Attributes as in ``Routing``, with N * T for T."""

    source: torch.Tensor
    place: torch.Tensor


def over_nodes(values: torch.Tensor, levels: TwoLevels) -> torch.Tensor:
    """Return the rows of the ranks with this rank's index in all nodes, ordered by node."""
    return torch.ops.tileweave.all_gather(values, levels.nodes_name, "nccl")


def node_tables(source: torch.Tensor, place: torch.Tensor, levels: TwoLevels) -> NodeTables:
    """Return the tables for the ranks of this node.

    Args:
        source, place: tables of ``Routing`` for the ranks of all nodes.
    """
    nodes, per_node, capacity = levels.nodes, levels.node.world_size, len(source)
    rank, choice = source // place.numel(), source % place.numel()
    owner = rank % per_node * nodes.world_size + rank // per_node
    source = torch.where(source >= 0, owner * place.numel() + choice, -1)
    rows = capacity * per_node
    place = over_nodes(place, levels) - nodes.rank * rows
    return NodeTables(source, torch.where((place >= 0) & (place < rows), place, -1))


def dispatch_rows(
    x: torch.Tensor, source: torch.Tensor, place: torch.Tensor, levels: TwoLevels, transport: str
) -> torch.Tensor:
    """Return the rows of this rank's experts.

    Args:
        x: (T, H), tokens of this rank.
        source, place: as for ``node_tables``.
        transport: transport within the node.
    """
    tables = node_tables(source, place, levels)
    tokens = over_nodes(x, levels)
    return torch.ops.tileweave.dispatch_rows(tokens, *tables, levels.node_name, transport)


def combine_rows(
    y: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, place: torch.Tensor,
    levels: TwoLevels, transport: str,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sums of the results of this rank's tokens.

    Each node adds in the order of the choices, in fp32, and rounds; the sums of the nodes are added
    in fp32.

    Args:
        y: (C, N), the results for the rows of ``dispatch_rows``.
        weights: (T, k), weights of the choices of this rank's tokens.
        source, place, transport: as for ``dispatch_rows``.
    """
    tables, weights = node_tables(source, place, levels), over_nodes(weights, levels)
    sums = torch.ops.tileweave.combine(y, weights, *tables, levels.node_name, transport)
    sums = torch.ops.tileweave.all_to_all(sums, 0, 0, levels.nodes_name, "nccl")
    of_nodes = sums.view(levels.nodes.world_size, *place.shape[:1], y.shape[1])
    return of_nodes.sum(0, dtype=weights.dtype).to(y.dtype)
