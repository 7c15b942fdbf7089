"""Groups of ranks: the ``group`` argument of operators."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from ...runtime.host import session
from ...runtime.host.group import Group, from_torchrun
from ...runtime.host.group_argument import (
    BY,
    is_alive,
    process_group_named,
    require_member,
)
from ...runtime.host.group_argument import name_of as _name_of

__all__ = ["TwoLevels", "group_of", "name_of", "ranks_of"]

_groups: dict[dist.ProcessGroup, Group] = {}
"""Groups whose session is not open, such as those of CPU tensors."""
_meshes: dict[tuple[Group, Group], TwoLevels] = {}
_SINGLE_PROCESS = Group(0, 1, 0, torch.device("cpu"), None, None)
_generations: Counter[str] = Counter()
"""Number of groups of a name that have exchanged something. torch reuses the names of destroyed
groups, and the new group must not read what the old one left in the store."""


@dataclass(frozen=True)
class TwoLevels:
    """Ranks of several nodes, with the same number on each, ordered by node.

    Attributes:
        nodes: the ranks with this rank's index in their nodes, ordered by node.
        node: the ranks of this node.
    """

    nodes: Group
    node: Group

    @property
    def nodes_name(self) -> str:
        """Name of the group ``nodes``, as ``group_of`` accepts it."""
        return _name(self.nodes)

    @property
    def node_name(self) -> str:
        """Name of the group of this node, as ``group_of`` accepts it."""
        return _name(self.node)

    @property
    def world_size(self) -> int:
        return self.nodes.world_size * self.node.world_size

    @property
    def rank(self) -> int:
        return self.nodes.rank * self.node.world_size + self.node.rank

    @cached_property
    def all_ranks(self) -> Group:
        """Group of all these ranks. Collective the first time.

        Raises:
            TileWeaveError: the ranks do not ascend, as those of each group of torch.
        """
        ranks = [int(rank) for rank in self.exchange("global rank", str(dist.get_rank()))]
        if ranks != sorted(ranks):
            raise TileWeaveError(
                f"group: the mesh has the ranks {', '.join(map(str, ranks))}; expected ascending "
                "ranks, such as [[0, 1], [2, 3]]"
            )
        if len(ranks) == dist.get_world_size():
            return group_of("")
        group = dist.new_group(ranks, use_local_synchronization=True)
        return group_of(group.group_name)

    def exchange(self, topic: str, value: str) -> list[str]:
        """Exchange a value like ``Group.exchange``.

        Raises:
            TileWeaveError: ranks along one axis have different indices along the other: torch sorts
                the ranks of a group and ignores their order in the mesh.
        """
        for ranks, other in ((self.nodes, self.node), (self.node, self.nodes)):
            if len(places := set(ranks.exchange("place", str(other.rank)))) > 1:
                among = ", ".join(map(str, dist.get_process_group_ranks(ranks.process_group)))
                raise TileWeaveError(
                    f"group: the ranks {among} along one axis of the mesh are numbers "
                    f"{', '.join(sorted(places))} along the other; expected the same order of "
                    "ranks in each row and each column, such as [[0, 1], [2, 3]]"
                )
        values = self.nodes.exchange(topic, json.dumps(self.node.exchange(topic, value)))
        return [value for node in values for value in json.loads(node)]


def _name(group: Group) -> str:
    assert group.process_group is not None
    return group.process_group.group_name


def name_of(group: Any) -> str:
    """Return the name of the ``group`` argument of an operator, a mesh with two axes included.

    Raises:
        TileWeaveError: as in ``group_argument.name_of``.
    """
    return _name_of(group, axes=2)


def ranks_of(name: str) -> Group | TwoLevels:
    """Return the group of a name, or both groups of a mesh with two axes.

    Raises:
        TileWeaveError: as in ``group_of``.
    """
    nodes, _, node = name.partition(BY)
    if not node:
        return group_of(name)
    pair = group_of(nodes), group_of(node)
    if pair not in _meshes:
        _meshes[pair] = TwoLevels(*pair)
    return _meshes[pair]


def group_of(name: str) -> Group:
    """Return the group of a name; this process must be a member.

    A group whose session is open is the group of that session. The default is torch's default
    group, or a group of this process only.

    Raises:
        TileWeaveError: no such group, this process is not in it, a rank has forked it, or torchrun
            started several processes that have no process group yet.
    """
    session.require_own_process()
    if (opened := session.find_named(name)) is not None:
        return opened.group
    if name:
        return _group(process_group_named(name))
    if (world := dist.group.WORLD) is not None:
        return _group(world)
    if from_torchrun("WORLD_SIZE", 1) > 1:
        raise TileWeaveError(
            "group=None: the processes have not met; expected tw.init() or "
            "torch.distributed.init_process_group() before this"
        )
    return _SINGLE_PROCESS


def _group(group: dist.ProcessGroup) -> Group:
    if group not in _groups:
        rank = require_member(group)
        _forget_destroyed()
        store = cast("dist.Store", _StoreOf(group.group_name))
        local_rank = from_torchrun("LOCAL_RANK", 0)
        _groups[group] = Group(
            rank, dist.get_world_size(group), local_rank, torch.device("cpu"), group, store
        )
    return _groups[group]


class _StoreOf:
    """Part of torch's store for one group.

    A destroyed group may have had the same name, so the key contains a count. It is taken in the
    first exchange, the first call in which all ranks take part.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _store(self) -> dist.Store:
        _generations[self._name] += 1
        default = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"tileweave/ops/{self._name}/{_generations[self._name]}", default)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._store, method)


def _forget_destroyed() -> None:
    """Drop destroyed groups, so that their sockets are closed."""
    for group in [group for group in _groups if not is_alive(group)]:
        destroyed = _groups.pop(group)
        for pair in [pair for pair in _meshes if destroyed in pair]:
            del _meshes[pair]
