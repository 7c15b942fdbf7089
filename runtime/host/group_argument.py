"""The ``group`` argument of public functions."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...builtins.errors import TileWeaveError

BY = " by "
"""Separator between the names of the two groups of a mesh."""


def name_of(group: Any, axes: int = 1) -> str:
    """Return the name of a group, as ``torch.ops.tileweave.*`` accept it; "" is the default group.

    A mesh of one node is its node.

    Args:
        group: None, a ``ProcessGroup``, its name, or a ``DeviceMesh``.
        axes: most axes of the mesh, 1 or 2; the first of two is that of nodes.

    Raises:
        TileWeaveError: anything else, or this process is not in the group.
    """
    if group is None:
        return ""
    if isinstance(group, DeviceMesh) and group.ndim <= axes:
        if group.get_coordinate() is None:
            raise TileWeaveError(
                f"group={group!r}: this process is not in it; expected only its ranks to call"
            )
        first = 1 if group.ndim == 2 and group.size(0) == 1 else 0
        return BY.join(group.get_group(axis).group_name for axis in range(first, group.ndim))
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, str):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TileWeaveError(
            "group=GroupMember.NON_GROUP_MEMBER, which torch returned for a new group: this "
            "process is not in it; expected only its ranks to call"
        )
    legal = "one axis" if axes == 1 else "one or two axes"
    raise TileWeaveError(
        f"group={group!r}; expected None, a ProcessGroup, its name, or a DeviceMesh with {legal}"
    )


def process_group_of(group: Any) -> dist.ProcessGroup | None:
    """Return the process group of a ``group`` argument with one axis; None for the default group.

    Raises:
        TileWeaveError: as in ``name_of``, or there is no such group.
    """
    if not isinstance(group, dist.ProcessGroup):
        name = name_of(group)
        group = process_group_named(name) if name else None
    return None if group is dist.group.WORLD else group


def process_group_named(name: str) -> dist.ProcessGroup:
    """Return the process group with this name.

    Raises:
        TileWeaveError: there is none in this process.
    """
    try:
        return dist.distributed_c10d._resolve_process_group(cast("Any", name))
    except (RuntimeError, ValueError, KeyError) as error:
        raise TileWeaveError(
            f"group={name!r}: {' '.join(str(error).split())}; expected the name of a process group"
        ) from None


def require_member(group: dist.ProcessGroup) -> int:
    """Return the rank of this process in ``group``.

    Raises:
        TileWeaveError: this process is not in it.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise TileWeaveError(
            f"group={group.group_name!r}: this process is not in it; expected only its ranks "
            "to call"
        )
    return rank


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` is not destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True
