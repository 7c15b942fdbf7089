"""Measure the ways to compute a problem, on all ranks in lockstep, and keep the fastest right one.

The best so far meets each candidate in rounds of its own, so that no more than two of them hold
symmetric memory at a time, and what they meet is the machine of the same seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ...builtins.errors import TileWeaveError
from ...runtime.executor.compile_ahead import compile_ahead
from ...runtime.host import session
from ...runtime.host.group import Group
from ...runtime.host.heap import HeapExhausted
from ...runtime.host.measure import interleaved, largest
from ...runtime.host.watchdog import DeadlockError
from ...runtime.kernel.kernel import capturing
from ..core.cache import OpCache, prepared
from ..core.groups import group_of, name_of
from ..core.operator import OPERATORS, Choice, Operator
from ..core.problem import Problem, operator_name
from ..core.session_cache import invalidate
from ..core.strategy import obstacle, preferred
from ..core.tiles import SHARED_BYTES
from .store import Measured, agreed, measured_as, save, table_for
from .trial import TOLERANCE, Trial, problem_of, relative_error

_VARIABLE = "TILEWEAVE_TUNE"
_INPUTS = 3
"""Sets of inputs, in turn, so that memory which is reused between calls held other numbers."""
_WARMUPS, _RUNS = 3, 15
"""Rounds of each meeting that do not count, and that do."""


class TrialResult(NamedTuple):
    """What became of one candidate.

    Attributes:
        ms: its time beside the best until then; None if it was left out.
        reason: why it was left out, else "".
    """

    choice: Choice
    ms: float | None
    reason: str


@dataclass(frozen=True)
class Tuned:
    """What ``tw.tune`` found out about one problem.

    Attributes:
        measured: the times, and the fastest fused way.
        attempts: all that was tried, in its order.
    """

    problem: Problem
    measured: Measured
    attempts: tuple[TrialResult, ...]

    def __str__(self) -> str:
        how = "" if self.measured.choice is None else f" ({self.measured.choice})"
        left_out = [f"\n  left out: {a.choice}: {a.reason}" for a in self.attempts if a.reason]
        return f"{self.problem}: {self.measured.strategy}{how}{''.join(left_out)}"


def tune(
    op: Any,
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype = torch.bfloat16,
    group: Any = None,
    *,
    transposed: bool = True,
) -> list[Tuned]:
    """Find the fastest right way to compute products, and let ``strategy="auto"`` take it.

    Every rank calls it with the same arguments. What is found out is used by the calls that follow,
    and kept on disk for processes to come, also where something else is kept already.

    Args:
        op: the operator, such as ``ops.matmul_reduce_scatter``, or its name.
        shapes: (M, N, K) of the whole group, as ``tileweave bench`` takes them.
        dtype: of the operands.
        group: as the operator takes it.
        transposed: whether b is the transpose of a row-major (N, K), as weights are.

    Raises:
        TileWeaveError: there is no such operator, or no other way than NCCL and cuBLAS; or the
            ranks differ in what they ask for.
    """
    name = operator_name("tune", op, OPERATORS)
    if not isinstance(dtype, torch.dtype):
        raise TileWeaveError(f"tune: dtype={dtype!r}; expected a torch.dtype")
    ranks = group_of(name_of(group))
    problems = []
    for shape in shapes:
        if not (
            isinstance(shape, Sequence)
            and len(shape) == 3
            and all(isinstance(n, int) and n > 0 for n in shape)
        ):
            raise TileWeaveError(f"tune: shape={shape!r}; expected (M, N, K)")
        M, N, K = shape
        problems.append(problem_of(name, M, N, K, ranks.world_size, dtype, transposed))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for problem in problems:
        if found := obstacle(problem, device, ranks):
            raise TileWeaveError(f"tune: {problem}: {found}")
    return [tune_problem(problem, ranks) for problem in problems]


def choice_of(asked: str, problem: Problem, group: Group) -> Choice | None:
    """How a problem that can be fused is computed; None for NCCL and cuBLAS. Collective for each
    new problem, which is tuned then if ``TILEWEAVE_TUNE`` is 1.

    Args:
        asked: ``fused`` or ``auto``.
    """
    problem, known = measured_as(problem), table_for(group)
    if problem not in known and not capturing():  # then nothing is compiled, either
        tune = partial(tune_problem, problem, group)
        known[problem] = agreed(problem, group, (lambda: tune().measured) if _wanted() else None)
    return _decided(asked, problem, known.get(problem), OPERATORS[problem.op])


@lru_cache(maxsize=1024)
def _decided(
    asked: str, problem: Problem, measured: Measured | None, operator: type[Operator]
) -> Choice | None:
    """What ``choice_of`` answers, which every call asks for."""
    if preferred(asked, problem, measured).name == "nccl":
        return None
    return operator.table(problem) if measured is None else measured.choice


def tune_problem(problem: Problem, group: Group) -> Tuned:
    """Measure one problem, and let all ranks know; rank 0 puts it on disk. Collective.

    Args:
        group: that of ``tw.init``, which opens the session if there is none.
    """
    kept = prepared(group)
    of_session = session.current().group
    said = of_session.exchange("tune", str(problem))
    if len(set(said)) > 1:
        raise TileWeaveError(f"tune: the ranks disagree, {said}; expected the same on every rank")
    tuned = Autotuner(problem, of_session, kept).run()
    for each in (group, of_session):
        table_for(each)[problem] = tuned.measured
    invalidate()
    if of_session.rank == 0:
        _keep(tuned, of_session)
    return tuned


def _keep(tuned: Tuned, group: Group) -> None:
    """On disk, unless a larger heap might have had another outcome."""
    homeless = [a for a in tuned.attempts if a.reason.startswith(HeapExhausted.__name__)]
    if not homeless:
        save(tuned.problem, group, tuned.measured)
        return
    warnings.warn(
        f"tileweave: {len(homeless)} of {len(tuned.attempts)} ways to compute {tuned.problem} were "
        f"not measured, so nothing is kept on disk: {homeless[0].reason}",
        stacklevel=2,
    )


class Candidate(NamedTuple):
    """A candidate that was made, and was right so far."""

    choice: Choice
    operator: Operator


class Autotuner:
    """The candidates of one problem, one after the other, against the best so far."""

    def __init__(self, problem: Problem, group: Group, kept: OpCache) -> None:
        self.problem, self.group, self.kept = problem, group, kept
        self.operator = OPERATORS[problem.op]
        # The table's first: what is as fast does not replace it.
        every = [self.operator.table(problem), *self.operator.candidates(problem)]
        self.choices = list(dict.fromkeys(every))
        self.trial = Trial(problem, group)
        self.inputs = [self.trial.inputs() for _ in range(_INPUTS)]
        self.rights = [self.trial.right_of(*given) for given in self.inputs]
        self.attempts: list[TrialResult] = []

    def run(self) -> Tuned:
        """Everything; the winner is kept for the calls to come, the others are freed."""
        best: Candidate | None = None
        self._compile_ahead()
        for choice in self._progress(self.choices):
            entrant = self._made(choice)
            if isinstance(entrant, str):
                self.attempts.append(TrialResult(choice, None, entrant))
            else:
                best = self._fastest([entrant] if best is None else [best, entrant])
        times, errors = self._times(
            ({} if best is None else {"fused": best.operator}) | {"nccl": self._nccl}
        )
        if best is not None and (reason := _wrong(errors["fused"])):
            self._leave_out(best, reason)
            best = None
        if best is None:
            return self._tuned(Measured(None, None, times["nccl"]))
        self.kept.keep(self.problem, *best)
        return self._tuned(Measured(best.choice, times["fused"], times["nccl"]))

    def _tuned(self, measured: Measured) -> Tuned:
        return Tuned(self.problem, measured, tuple(self.attempts))

    def _compile_ahead(self) -> None:
        """Many at a time. Those that do not compile are told of when their turn comes."""
        programs = []
        for choice in self.choices:
            if self._shared_bytes(choice) > SHARED_BYTES:
                continue
            with contextlib.suppress(Exception):
                programs += self.operator.launched(self.problem, choice)
        compile_ahead(programs)

    def _progress(self, choices: Iterable[Choice]) -> Iterable[Choice]:
        """The same, with a bar on rank 0."""
        return tqdm(
            choices, f"tuning {self.problem}", leave=False,
            disable=None if self.group.rank == 0 else True,  # None: in a terminal only
        )  # fmt: skip

    def _fastest(self, entrants: list[Candidate]) -> Candidate | None:
        """Of those that stay right while they are measured; the last one has not been before."""
        times, errors = self._times({str(e.choice): e.operator for e in entrants})
        right = []
        for entrant in entrants:
            if reason := _wrong(errors[str(entrant.choice)]):
                self._leave_out(entrant, reason)
            else:
                right.append(entrant)
        if entrants[-1] in right:
            choice = entrants[-1].choice
            self.attempts.append(TrialResult(choice, times[str(choice)], ""))
        best = min(right, key=lambda e: times[str(e.choice)], default=None)
        for loser in right:
            if loser is not best:
                loser.operator.free()
        return best

    def _leave_out(self, entrant: Candidate, reason: str) -> None:
        self.attempts.append(TrialResult(entrant.choice, None, reason))
        entrant.operator.free()

    def _made(self, choice: Choice) -> Candidate | str:
        """One that was called and was right, or why there is none; the same on all ranks."""
        taken = self._shared_bytes(choice)
        if taken > SHARED_BYTES:
            return f"{taken} bytes of shared memory; expected at most {SHARED_BYTES}"
        made: list[Operator] = []
        make = partial(self.kept.made, self.problem, choice, self.operator)
        if reason := self._failure(lambda: made.append(make())):
            return reason
        (operator,) = made
        errors: list[float] = []
        reason = self._failure(lambda: errors.extend(self._called(operator)))
        if not reason:
            reason = _wrong(largest({"error": max(errors)}, self.group)["error"])
        if reason:
            operator.free()
        return reason or Candidate(choice, operator)

    def _shared_bytes(self, choice: Choice) -> int:
        return choice.tiles.shared_bytes(self.problem.dtype.itemsize)

    def _failure(self, attempt: Callable[[], Any]) -> str:
        """What goes wrong in ``attempt`` on any rank, or "". Collective."""
        said = ""
        try:
            attempt()
        except DeadlockError:
            raise
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return next((each for each in self.group.exchange("tune: tried", said) if each), "")

    def _called(self, operator: Operator) -> list[float]:
        """The error of a call with each of the inputs."""
        errors = []
        for number in range(_INPUTS):
            self.trial.c.fill_(float("nan"))
            operator(*self.inputs[number], self.trial.c, *self.trial.epilogue.tensors)
            errors.append(relative_error(self.trial.c, self.rights[number]))
        return errors

    def _nccl(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: torch.Tensor) -> None:
        self.operator.unfused(a, b, c, self.group, self.trial.epilogue)

    def _times(
        self, contenders: Mapping[str, Callable[..., Any]]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """In ms, and the worst errors; the same on all ranks."""
        c, found = self.trial.c, dict.fromkeys(contenders, 0.0)

        def call(operator: Callable[..., Any], number: int) -> None:
            operator(*self.inputs[number], c, *self.trial.epilogue.tensors)

        def after(name: str, number: int, _: None) -> None:
            found[name] = max(found[name], relative_error(c, self.rights[number]))

        times = interleaved(
            {name: partial(call, operator) for name, operator in contenders.items()},
            range(_INPUTS), self.group, warmups=_WARMUPS, runs=_RUNS,
            before=lambda name, number: c.fill_(float("nan")), after=after,
        )  # fmt: skip
        said = json.dumps([times, largest(found, self.group)])
        return tuple(json.loads(self.group.exchange("tune: times", said)[0]))  # as rank 0 has them


def _wrong(error: float) -> str:
    """What is wrong with results of that error, or ""."""
    if error <= TOLERANCE:
        return ""
    return f"relative error {error:.1e}; expected at most {TOLERANCE:g}"


def _wanted() -> bool:
    value = os.environ.get(_VARIABLE, "0")
    if value not in ("0", "1"):
        raise TileWeaveError(f"{_VARIABLE}={value!r}; expected 0 or 1")
    return value == "1"
