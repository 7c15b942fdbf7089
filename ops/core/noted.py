"""Problems of calls that were traced: the next call that compiles, compiles for all of them.

``torch.compile``, and every other tracer with fake tensors, calls the fake functions of operators
for forward and gradients before the first kernel runs. They note their problems here, without
communication: ranks may trace different calls, or at different times. When an operator is created,
which all ranks of its group do in the same call, they compare their notes. Problems that only some
ranks have noted stay noted. They are compiled by their own calls, or when the other ranks have
noted them, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...runtime.host.group import Group
from ...runtime.host.group_argument import is_alive
from ...runtime.host.session import session_name
from .groups import TwoLevels, ranks_of
from .registry import OPERATORS

UNCOMPILED = (None, "nccl")
"""Choices that no kernel of ours computes."""


class Note(NamedTuple):
    """Problem of a traced call.

    Attributes:
        requested: strategy or transport that the caller asks for.
        device: of the tensors.
        choose: returns the choice of the call, see ``ProblemOp.choose``.
    """

    problem: Any
    requested: str
    device: torch.device
    choose: Callable[..., Any]

    @property
    def text(self) -> str:
        """Text that is equal on ranks with equal notes."""
        return f"{self.choose.__qualname__} {self.problem!r} {self.requested} {self.device.type}"


_notes: dict[dist.ProcessGroup | None, dict[str, Note]] = {}
"""Notes of each group by their text; None is the default group."""


def note(
    problem: Any, group: str, requested: str, device: torch.device,
    choose: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Note the problem of a call, unless one of its sizes is unknown, or its group has several
    nodes. Not collective.

    Args:
        group: name of the group.
        requested, device, choose: see ``Note``; the default is that of the operator.
    """
    ranks = ranks_of(group)
    if isinstance(ranks, TwoLevels):
        return
    values = {field.name: _hint(getattr(problem, field.name)) for field in fields(problem)}
    if _UNKNOWN in values.values():
        return
    choose = choose or OPERATORS[problem.op].choose
    noted = Note(replace(problem, **values), requested, device, choose)
    _notes.setdefault(_key(ranks), {})[noted.text] = noted


def _key(ranks: Group) -> dist.ProcessGroup | None:
    return ranks.process_group if session_name(ranks.process_group) else None


_UNKNOWN = object()


def _hint(value: Any) -> Any:
    """Return the size that a tracer has seen in place of a symbolic one."""
    if isinstance(value, tuple):
        hints = tuple(map(_hint, value))
        return _UNKNOWN if _UNKNOWN in hints else hints
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint if value.node.has_hint() else _UNKNOWN
    return value


def noted_groups() -> list[str]:
    """Return the names of the sessions of groups for which this rank has noted problems."""
    for group in [group for group in _notes if group is not None and not is_alive(group)]:
        del _notes[group]
    return [session_name(group) for group, notes in _notes.items() if notes]


def noted_problems(ranks: Group) -> list[tuple[Any, Any]]:
    """Return the problems that all ranks of a group have noted, with the choices for them, and
    forget the notes. Problems that need no kernel of ours are left out. Collective."""
    notes = _notes.get(_key(ranks), {})
    # Other ranks would wait for one that refuses tensors on another rank's GPU.
    usable = [
        text for text, noted in notes.items()
        if noted.device == ranks.device or noted.device.type != ranks.device.type
    ]  # fmt: skip
    first, *others = map(json.loads, ranks.exchange("noted", json.dumps(usable)))
    problems = []
    for text in first:
        if all(text in noted for noted in others):
            problem, requested, device, choose = notes.pop(text)
            with suppress(Exception):  # equal on all ranks; the call raises it
                choice = choose(problem, ranks, requested, device)
                if choice not in UNCOMPILED:
                    problems.append((problem, choice))
    return problems
