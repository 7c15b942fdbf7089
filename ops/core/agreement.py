"""Agreement of the ranks of a group on the call that they make."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from .groups import TwoLevels

_agreed: WeakKeyDictionary[Group | TwoLevels, set[tuple[Any, str]]] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Group, tuple[int, str, str, bool]] = WeakKeyDictionary()
"""Latest call of each group: its number, the operator, the text, and whether it is new."""

_PENDING = (
    "a collective of this process group is still pending, so that its other collectives hang, too; "
    "destroy it on every rank"
)


def agree(group: Group | TwoLevels, problem: Any, strategy: str) -> None:
    """Check that all ranks make the same call. Collective for each new problem.

    A rank for which the problem is not new does not wait for the others here. On a CPU,
    ``require_same_call`` finds the difference while ranks wait; on a GPU, the waits of kernels time
    out.

    Args:
        problem: hashable; has ``op``, the name of the operator.
        strategy: name of the strategy or the transport.

    Raises:
        TileWeaveError: the calls differ; the message shows the call of each rank. Or the ranks of
            the group are at different calls since an earlier error.
    """
    for part in (group,) if isinstance(group, Group) else (group.nodes, group.node):
        part.require_in_step(problem.op)
    call = f"{problem}, {strategy}"
    agreed = _agreed.setdefault(group, set())
    is_new = (problem, strategy) not in agreed
    _publish(group, problem.op, call, is_new)
    if not is_new:
        return
    if isinstance(group, Group):
        calls = group.exchange("operators", call, check=lambda: require_same_call(group))
    else:
        calls = group.exchange("operators", call)
    if len(set(calls)) > 1:
        raise _disagreement(problem.op, dict(enumerate(calls)))
    agreed.add((problem, strategy))


def _publish(group: Group | TwoLevels, op: str, call: str, is_new: bool) -> None:
    """Write the number and the text of this rank's call into the store, on a CPU.

    Args:
        is_new: whether an exchange compares the call with those of the other ranks.
    """
    if isinstance(group, Group) and group.store is not None and group.device.type == "cpu":
        number = _calls[group][0] + 1 if group in _calls else 1
        _calls[group] = number, op, call, is_new
        group.store.set(_call_key(group.rank), f"{number} {is_new:d} {call}")


def require_same_call(group: Group) -> None:
    """Compare the call of this rank with the calls of the same number on other ranks.

    A rank that is late has a smaller number and is no error. Calls that are new on both ranks are
    compared by their exchange. After another difference the group has failed: one of the ranks may
    be in a collective, and the other is not.

    Raises:
        TileWeaveError: the calls differ; the message shows the call of each of these ranks.
    """
    if group not in _calls or group.store is None:
        return
    number, op, call, is_new = _calls[group]
    calls = {group.rank: call}
    for rank in range(group.world_size):
        if rank != group.rank and group.store.check([_call_key(rank)]):
            peer_number, is_new_there, text = (
                group.store.get(_call_key(rank)).decode().split(" ", maxsplit=2)
            )
            if int(peer_number) == number and not (is_new and int(is_new_there)):
                calls[rank] = text
    if len(set(calls.values())) > 1:
        error = str(_disagreement(op, calls))
        group.fail(error)
        raise TileWeaveError(f"{error}; {_PENDING}")
    group.raise_if_failed(op)


def _call_key(rank: int) -> str:
    return f"call of rank {rank}"


def _disagreement(op: str, calls: dict[int, str]) -> TileWeaveError:
    details = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return TileWeaveError(
        f"{op}: the ranks disagree ({details}); expected the same shapes, types, memory order and "
        "strategy on every rank"
    )
