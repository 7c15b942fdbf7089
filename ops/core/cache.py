"""Compiled operators and the symmetric memory they work in, kept for each problem."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from typing import Any, Protocol, TypeVar

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from ...runtime.host.heap import HeapExhausted
from ...runtime.host.session import Session, opened
from ...runtime.kernel.kernel import capturing
from ...runtime.lifecycle import init


class CachedOp(Protocol):
    """An ``Operator`` or a ``Collective``.

    Attributes:
        last_used: number of the latest use; larger is more recent.
    """

    last_used: int

    def free(self) -> None:
        """Free its symmetric memory. Collective."""


Problem = TypeVar("Problem", bound=Hashable)
Choice = TypeVar("Choice", bound=Hashable)
"""Key of an operator: the problem and how it is computed. For a ``Collective`` these are a
``CollectiveProblem`` and a transport."""
Op = TypeVar("Op", bound=CachedOp)


class OpCache:
    """Operators and collectives of one session.

    All ranks of its group make the same calls in the same order, so they create and free the same
    operators.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.operators: dict[tuple[Any, Any], Any] = {}
        """Operators by problem and choice."""
        self._captured: set[tuple[Any, Any]] = set()
        """Keys of operators that a CUDA graph may replay at any time."""
        self.uses = count(1)
        """Counter from which ``CachedOp.last_used`` is set."""

    def operator(
        self, problem: Problem, choice: Choice, make: Callable[[Problem, Choice, Session], Op]
    ) -> Op:
        """Return the operator for ``problem`` and ``choice``; create it if it is new.

        Collective if it is new. If the symmetric heap is full, the least recently used operators
        are freed.

        Raises:
            HeapExhausted: the heap is too small even after all evictions.
            TileWeaveError: the operator is new while a CUDA graph is being captured.
        """
        key = problem, choice
        operator = self.operators.get(key)
        if operator is None:
            if capturing():
                raise TileWeaveError(
                    f"{problem}: not compiled yet; expected one call before it is captured in a "
                    "CUDA graph"
                )
            operator = self.operators[key] = self.create(problem, choice, make)
        elif capturing():
            self._captured.add(key)
        self.use(operator)
        return operator

    def use(self, operator: CachedOp) -> None:
        """Mark ``operator`` as the most recently used, so that it is evicted last."""
        operator.last_used = next(self.uses)

    def create(
        self, problem: Problem, choice: Choice, make: Callable[[Problem, Choice, Session], Op]
    ) -> Op:
        """Create an operator; evict others if the heap is full. The caller frees it or passes it to
        ``keep``."""
        while True:
            try:
                return make(problem, choice, self.session)
            except HeapExhausted as error:
                evictable = self.operators.keys() - self._captured
                if not evictable:
                    raise HeapExhausted(f"{problem}: {error}") from None
            old = min(evictable, key=lambda key: self.operators[key].last_used)
            self.operators.pop(old).free()

    def keep(self, problem: Hashable, choice: Hashable, operator: CachedOp) -> None:
        """Use ``operator`` for ``problem`` from now on. Free the others of this problem, except
        those that a CUDA graph may replay. Collective."""
        for old in [key for key in self.operators if key[0] == problem]:
            if old not in self._captured:
                self.operators.pop(old).free()
        if (problem, choice) in self.operators:  # one that a graph holds: equivalent
            operator.free()
        else:
            self.operators[problem, choice] = operator
            self.use(operator)

    def free(self) -> None:
        """Free all operators, except those that a CUDA graph may replay. Collective."""
        for key in [key for key in self.operators if key not in self._captured]:
            self.operators.pop(key).free()


_caches: dict[str, OpCache] = {}
"""Caches of the sessions, by the name of the session."""


def op_cache_of(group: Group) -> OpCache:
    """Return the cache of the session of ``group``. Open the session if it is not open."""
    session = init(group.process_group)
    cache = _caches.get(session.name)
    if cache is None or cache.session is not session:
        cache = _caches[session.name] = OpCache(session)
    return cache


def free_caches() -> None:
    """Free the operators of all open sessions, except those in CUDA graphs. Collective."""
    for session in opened():
        cache = _caches.get(session.name)
        if cache is not None and cache.session is session:
            cache.free()
