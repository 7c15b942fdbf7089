"""Collectives on several nodes: the node's transport moves data within a node while
``torch.distributed`` moves data between nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ...runtime.host.group import Group
from ..core.problem import is_laid_out

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Collective of one node: computes its second argument from the first; all ranks of a node call
it."""


class AcrossNodes(ABC):
    """Interface of collectives that also accept a mesh of nodes and ranks of a node."""

    @staticmethod
    @abstractmethod
    def part(x: torch.Tensor, nodes: int) -> torch.Tensor:
        """Return the part of a rank's input that one collective within the node moves."""

    @staticmethod
    @abstractmethod
    def across(move: Move, x: torch.Tensor, out: torch.Tensor, nodes: Group) -> None:
        """Compute ``out`` on the ranks of all nodes.

        Args:
            move: the collective within the node, for one ``part``.
            nodes: the ranks with this rank's index in their nodes.
        """


def at_any_place(move: Move) -> Move:
    """Return ``move`` for tensors of any alignment: it copies those that kernels cannot read or
    write."""

    def moved(x: torch.Tensor, out: torch.Tensor) -> None:
        aligned = out if is_laid_out(out) else torch.empty_like(out)
        move(x if is_laid_out(x) else x.clone(), aligned)
        if aligned is not out:
            out.copy_(aligned)

    return moved
