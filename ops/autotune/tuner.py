"""Autotuner: measures the candidates of a problem on all ranks in lockstep and keeps the fastest
correct one.

Each candidate is measured interleaved with the best so far. So at most two operators hold symmetric
memory at a time, and both see the same state of the machine.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ...builtins.errors import TileWeaveError
from ...runtime.executor.compile_ahead import compile_ahead
from ...runtime.executor.recorded_calls import invalidate
from ...runtime.host.group import Group
from ...runtime.host.heap import HeapExhausted
from ...runtime.host.measure import interleaved, largest
from ...runtime.host.watchdog import DeadlockError
from ..core.compiled import CompiledOp, OpCache, op_cache_of
from ..core.problem import Problem
from ..core.registry import OPERATORS
from ..core.tiles import SHARED_BYTES, Choice
from .store import Measurement, save, table_for
from .trial import TOLERANCE, Trial, error_number

_INPUTS = 3
"""Number of input sets used in turn, so that memory that is reused between calls held other
values."""
_WARMUPS, _RUNS = 3, 15
"""Uncounted and counted runs of each comparison."""


class TrialResult(NamedTuple):
    """Result of one candidate.

    Attributes:
        ms: its time, interleaved with the best so far; None if it was left out.
        reason: why it was left out, else "".
    """

    choice: Choice
    ms: float | None
    reason: str


@dataclass(frozen=True)
class Tuned:
    """Result of ``tw.tune`` for one problem.

    Attributes:
        measured: the times and the fastest fused choice.
        attempts: all candidates, in order.
    """

    problem: Problem
    measured: Measurement
    attempts: tuple[TrialResult, ...]

    def __str__(self) -> str:
        choice = "" if self.measured.choice is None else f" ({self.measured.choice})"
        left_out = [f"\n  left out: {a.choice}: {a.reason}" for a in self.attempts if a.reason]
        return f"{self.problem}: {self.measured.strategy}{choice}{''.join(left_out)}"


def tune_problem(problem: Problem, group: Group) -> Tuned:
    """Measure one problem and publish the result to all ranks; rank 0 stores it on disk.
    Collective.

    Args:
        group: ranks that compute it; opens their session if it is not open.
    """
    cache = op_cache_of(group)
    session_group = cache.session.group
    problems = session_group.exchange("tune", str(problem))
    if len(set(problems)) > 1:
        raise TileWeaveError(
            f"tune: the ranks disagree, {problems}; expected the same on every rank"
        )
    tuned = Autotuner(problem, session_group, cache).run()
    for ranks in (group, session_group):
        table_for(ranks)[problem] = tuned.measured
    invalidate()
    if session_group.rank == 0:
        _save_unless_out_of_memory(tuned, session_group)
    return tuned


def _save_unless_out_of_memory(tuned: Tuned, group: Group) -> None:
    """Store a result on disk, unless a larger heap might change it."""
    out_of_memory = [a for a in tuned.attempts if a.reason.startswith(HeapExhausted.__name__)]
    if not out_of_memory:
        save(tuned.problem, group, tuned.measured)
        return
    warnings.warn(
        f"tileweave: {len(out_of_memory)} of {len(tuned.attempts)} candidates of {tuned.problem} "
        f"were not measured, so the result is not stored on disk: {out_of_memory[0].reason}",
        stacklevel=2,
    )


class Candidate(NamedTuple):
    """Compiled candidate whose results were correct so far."""

    choice: Choice
    operator: CompiledOp


class Autotuner:
    """Candidates of one problem, measured one after the other against the best so far."""

    def __init__(self, problem: Problem, group: Group, cache: OpCache) -> None:
        self.problem, self.group, self.cache = problem, group, cache
        self.operator = OPERATORS[problem.op]
        # The table's choice is first, so that an equally fast candidate does not replace it.
        candidates = [self.operator.table(problem), *self.operator.candidates(problem)]
        self.choices = list(dict.fromkeys(candidates))
        self.trial = Trial(problem, group)
        self.inputs = [self.trial.inputs() for _ in range(_INPUTS)]
        self.expected = [self.trial.expected_of(*inputs) for inputs in self.inputs]
        self.attempts: list[TrialResult] = []

    def run(self) -> Tuned:
        """Measure all candidates. Keep the winner for later calls, and free the others."""
        best: Candidate | None = None
        self._compile_ahead()
        for choice in self._progress(self.choices):
            candidate = self._compile_candidate(choice)
            if isinstance(candidate, str):
                self.attempts.append(TrialResult(choice, None, candidate))
            else:
                best = self._fastest([candidate] if best is None else [best, candidate])
        times, errors = self._times(
            ({} if best is None else {"fused": best.operator}) | {"nccl": self._nccl}
        )
        if best is not None and (reason := _why_wrong(errors["fused"])):
            self._leave_out(best, reason)
            best = None
        if best is None:
            return self._tuned(Measurement(None, None, times["nccl"]))
        self.cache.keep(self.problem, *best)
        return self._tuned(Measurement(best.choice, times["fused"], times["nccl"]))

    def _tuned(self, measured: Measurement) -> Tuned:
        return Tuned(self.problem, measured, tuple(self.attempts))

    def _compile_ahead(self) -> None:
        """Compile many programs at a time. The errors of those that fail are reported when they are
        measured."""
        programs = []
        for choice in self.choices:
            if self._shared_bytes(choice) > SHARED_BYTES:
                continue
            with contextlib.suppress(Exception):
                programs += self.operator.compiled_programs(self.problem, choice)
        compile_ahead(programs, self.group.process_group)

    def _progress(self, choices: Iterable[Choice]) -> Iterable[Choice]:
        """Return ``choices`` with a progress bar on rank 0."""
        return tqdm(
            choices, f"tuning {self.problem}", leave=False,
            disable=None if self.group.rank == 0 else True,  # None: in a terminal only
        )  # fmt: skip

    def _fastest(self, candidates: list[Candidate]) -> Candidate | None:
        """Measure ``candidates``, of which the last one is new. Return the fastest one with correct
        results, and free the others."""
        times, errors = self._times({str(c.choice): c.operator for c in candidates})
        correct = []
        for candidate in candidates:
            if reason := _why_wrong(errors[str(candidate.choice)]):
                self._leave_out(candidate, reason)
            else:
                correct.append(candidate)
        if candidates[-1] in correct:
            choice = candidates[-1].choice
            self.attempts.append(TrialResult(choice, times[str(choice)], ""))
        best = min(correct, key=lambda candidate: times[str(candidate.choice)], default=None)
        for loser in correct:
            if loser is not best:
                loser.operator.free()
        return best

    def _leave_out(self, candidate: Candidate, reason: str) -> None:
        self.attempts.append(TrialResult(candidate.choice, None, reason))
        candidate.operator.free()

    def _compile_candidate(self, choice: Choice) -> Candidate | str:
        """Compile a candidate and call it. Return it, or why it is left out; equal on all ranks."""
        nbytes = self._shared_bytes(choice)
        if nbytes > SHARED_BYTES:
            return f"{nbytes} bytes of shared memory; expected at most {SHARED_BYTES}"
        operators: list[CompiledOp] = []
        make = partial(self.cache.create, self.problem, choice, self.operator)
        if reason := self._failure(lambda: operators.append(make())):
            return reason
        (operator,) = operators
        errors: list[float] = []
        reason = self._failure(lambda: errors.extend(self._call_errors(operator)))
        if not reason:
            reason = _why_wrong(largest({"error": max(errors)}, self.group)["error"])
        if reason:
            operator.free()
        return reason or Candidate(choice, operator)

    def _shared_bytes(self, choice: Choice) -> int:
        return choice.tiles.shared_bytes(self.problem.dtype.itemsize)

    def _failure(self, attempt: Callable[[], Any]) -> str:
        """Return the error of ``attempt`` on any rank, or "". Collective."""
        reason = ""
        try:
            attempt()
        except DeadlockError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return next(filter(None, self.group.exchange("tune: tried", reason)), "")

    def _call_errors(self, operator: CompiledOp) -> list[float]:
        """Return the error of a call for each set of inputs."""
        errors = []
        for number in range(_INPUTS):
            self.trial.c.fill_(float("nan"))
            operator(*self.inputs[number], *self.trial.epilogue.tensors, self.trial.c)
            errors.append(error_number(self.trial.c, self.expected[number]))
        return errors

    def _nccl(self, a: torch.Tensor, b: torch.Tensor, *tensors: torch.Tensor) -> None:
        *_, c = tensors
        self.operator.unfused(a, b, c, self.group, self.trial.epilogue)

    def _times(
        self, calls: Mapping[str, Callable[..., Any]]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the times in ms and the worst errors, equal on all ranks."""
        c, errors = self.trial.c, dict.fromkeys(calls, 0.0)

        def call(operator: Callable[..., Any], number: int) -> None:
            operator(*self.inputs[number], *self.trial.epilogue.tensors, c)

        def after(name: str, number: int, _: None) -> None:
            errors[name] = max(errors[name], error_number(c, self.expected[number]))

        times = interleaved(
            {name: partial(call, operator) for name, operator in calls.items()},
            range(_INPUTS), self.group, warmups=_WARMUPS, runs=_RUNS,
            before=lambda name, number: c.fill_(float("nan")), after=after,
        )  # fmt: skip
        measured = json.dumps([times, largest(errors, self.group)])
        return tuple(json.loads(self.group.exchange("tune: times", measured)[0]))  # rank 0's


def _why_wrong(error: float) -> str:
    """Return why results with this error are wrong, or ""."""
    if error <= TOLERANCE:
        return ""
    return f"relative error {error:.1e}; expected at most {TOLERANCE:g}"
