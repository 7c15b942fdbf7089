"""Collectives on several nodes: what is moved within a node by the node's own transport goes
between nodes by ``torch.distributed``, both at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ...runtime.host.group import Group
from ..core.problem import is_laid_out

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Computes its second argument from the first; all ranks of a node call it."""


class AcrossNodes(ABC):
    """What a collective knows that also takes a mesh of nodes and ranks of a node."""

    @staticmethod
    @abstractmethod
    def part(x: torch.Tensor, nodes: int) -> torch.Tensor:
        """What a rank gives the others of its node at a time, of all that it gives."""

    @staticmethod
    @abstractmethod
    def across(move: Move, x: torch.Tensor, out: torch.Tensor, nodes: Group) -> None:
        """Compute ``out`` on the ranks of all nodes.

        Args:
            move: the collective of such a part within the node.
            nodes: the ranks that have this one's place in their nodes.
        """


def at_any_place(move: Move) -> Move:
    """``move``, also for tensors that begin where kernels cannot read or write: by copies."""

    def moved(x: torch.Tensor, out: torch.Tensor) -> None:
        got = out if is_laid_out(out) else torch.empty_like(out)
        move(x if is_laid_out(x) else x.clone(), got)
        if got is not out:
            out.copy_(got)

    return moved
