"""Compiled operators and the symmetric memory they work in, kept for each problem."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from typing import Any, Protocol, TypeVar

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from ...runtime.host.heap import HeapExhausted
from ...runtime.host.session import Session
from ...runtime.kernel.kernel import capturing
from ...runtime.lifecycle import init


class Compiled(Protocol):
    """An ``Operator`` or an ``Collective``.

    Attributes:
        last_used: grows with each use.
    """

    last_used: int

    def free(self) -> None:
        """Give its symmetric memory back. Collective."""


Problem = TypeVar("Problem", bound=Hashable)
Choice = TypeVar("Choice", bound=Hashable)
"""What is asked, and how it is done: for an ``Collective`` a ``CollectiveProblem`` and a transport."""
CompiledOp = TypeVar("Made", bound=Compiled)


class OpCache:
    """The operators and collectives of one session.

    Every rank makes the same calls in the same order, so the same ones are made and freed on all.
    """

    def __init__(self) -> None:
        self.operators: dict[tuple[Any, Any], Any] = {}
        """By problem and choice."""
        self._captured: set[tuple[Any, Any]] = set()
        """Those that a CUDA graph may replay at any time."""
        self._uses = count(1)

    def operator(
        self, problem: Problem, choice: Choice, make: Callable[[Problem, Choice], CompiledOp]
    ) -> CompiledOp:
        """The operator for ``problem`` as ``choice`` says, made if it is new. Collective then.

        Where the symmetric heap is full, those that were not used for longest are freed.

        Raises:
            HeapExhausted: the heap is too small even so.
            TileWeaveError: it is new, and a CUDA graph is being captured.
        """
        key = problem, choice
        operator = self.operators.get(key)
        if operator is None:
            if capturing():
                raise TileWeaveError(
                    f"{problem}: not compiled yet; expected one call before it is captured in a "
                    "CUDA graph"
                )
            operator = self.operators[key] = self.made(problem, choice, make)
        elif capturing():
            self._captured.add(key)
        self.use(operator)
        return operator

    def use(self, operator: Compiled) -> None:
        """Others make room before it does."""
        operator.last_used = next(self._uses)

    def made(
        self, problem: Problem, choice: Choice, make: Callable[[Problem, Choice], CompiledOp]
    ) -> CompiledOp:
        """A new operator, which the caller frees or gives to ``keep``; others make room for it."""
        while True:
            try:
                return make(problem, choice)
            except HeapExhausted as error:
                free = self.operators.keys() - self._captured
                if not free:
                    raise HeapExhausted(f"{problem}: {error}") from None
            old = min(free, key=lambda key: self.operators[key].last_used)
            self.operators.pop(old).free()

    def keep(self, problem: Hashable, choice: Hashable, operator: Compiled) -> None:
        """``operator`` serves ``problem`` from now on; of others that did, those remain which a
        CUDA graph may replay. Collective."""
        for old in [key for key in self.operators if key[0] == problem]:
            if old not in self._captured:
                self.operators.pop(old).free()
        if (problem, choice) in self.operators:  # the graph's is as good
            operator.free()
        else:
            self.operators[problem, choice] = operator
            self.use(operator)

    def free(self) -> None:
        """Free all but those which a CUDA graph may replay. Collective."""
        for key in [key for key in self.operators if key not in self._captured]:
            self.operators.pop(key).free()


_session: Session | None = None
_prepared = OpCache()


def prepared(group: Group) -> OpCache:
    """What is prepared in the current session, which is opened for ``group`` if there is none."""
    global _session, _prepared
    session = init(group.process_group)
    if session is not _session:
        _session, _prepared = session, OpCache()
    return _prepared


def free_prepared() -> None:
    """Free what is prepared in the current session, but for CUDA graphs. Collective."""
    _prepared.free()
