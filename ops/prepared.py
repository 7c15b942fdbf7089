"""Compiled operators and the symmetric memory they work in, kept for each problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..builtins.errors import TileWeaveError
from ..runtime.group import Group
from ..runtime.heap import HeapExhausted
from ..runtime.kernel import capturing
from ..runtime.session import Session, init
from .problem import Problem


class Operator(Protocol):
    """A compiled operator for one problem."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None: ...

    def free(self) -> None:
        """Give its symmetric memory back. Collective."""


class Prepared:
    """The operators of one session, the least recently used first.

    Every rank makes the same calls in the same order, so the same ones are made and freed on all.
    """

    def __init__(self) -> None:
        self.operators: dict[Problem, Operator] = {}
        self._captured: set[Problem] = set()
        """Those that a CUDA graph may replay at any time."""

    def operator(self, problem: Problem, make: Callable[[Problem], Operator]) -> Operator:
        """The operator for ``problem``, made if it is new. Collective then.

        Where the symmetric heap is full, those that were not used for longest are freed.

        Raises:
            HeapExhausted: the heap is too small even so.
            TileWeaveError: it is new, and a CUDA graph is being captured.
        """
        operator = self.operators.pop(problem, None)
        if operator is None:
            if capturing():
                raise TileWeaveError(
                    f"{problem}: not compiled yet; expected one call before it is captured in a "
                    "CUDA graph"
                )
            operator = self._made(problem, make)
        elif capturing():
            self._captured.add(problem)
        self.operators[problem] = operator
        return operator

    def _made(self, problem: Problem, make: Callable[[Problem], Operator]) -> Operator:
        while True:
            try:
                return make(problem)
            except HeapExhausted as error:
                old = next((p for p in self.operators if p not in self._captured), None)
                if old is None:
                    raise HeapExhausted(f"{problem}: {error}") from None
            self.operators.pop(old).free()


_session: Session | None = None
_prepared = Prepared()


def prepared(group: Group) -> Prepared:
    """What is prepared in the current session, which is opened for ``group`` if there is none."""
    global _session, _prepared
    session = init(group.process_group)
    if session is not _session:
        _session, _prepared = session, Prepared()
    return _prepared
