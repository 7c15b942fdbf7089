"""Functions that test_torch.py runs on each rank to tune, in its own process, on a CPU."""

from __future__ import annotations

import contextlib
import types
from typing import Any
from unittest.mock import patch

import torch

from tileweave.ops.autotune import tuner
from tileweave.ops.autotune.trial import Trial, problem_of
from tileweave.ops.core.compiled import OpCache
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import LARGE, Choice
from tileweave.ops.gemm import strategy
from tileweave.ops.gemm.gemm_operator import choice_of


def tune(op: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the result of tuning with three stand-ins for kernels."""

    class StandIn(OPERATORS[op], op=op):
        programs = dict.fromkeys(("right", "wrong", "as right"))

        def __init__(self, problem: Problem, choice: Choice, session: Any) -> None:
            self.wrong = choice.program == "wrong"

        def __call__(self, a, b, *tensors: torch.Tensor) -> None:
            *_, c = tensors
            self.unfused(a, b, c, group, trial.epilogue)
            if self.wrong and group.rank == 1:
                c[0, 0] = torch.nan

        def free(self) -> None:
            pass

        @staticmethod
        def estimates(problem: Problem) -> dict[Choice, float]:
            return {Choice("right", LARGE): 1.0}

        @classmethod
        def candidates(cls, problem: Problem) -> list[Choice]:
            return [Choice(program, LARGE) for program in cls.programs]

    group, real = group_of(""), StandIn.__mro__[1]
    trial = Trial(problem_of(op, 66, 48, 48, group.world_size, dtype), group)
    cache = OpCache(types.SimpleNamespace(group=group))
    patches = [
        patch.object(tuner, "save", lambda *_: None),
        patch.object(tuner, "op_cache_of", lambda _: cache),
        patch.object(strategy, "obstacle", lambda *_: None),
        patch.object(tuner, "compile_ahead", lambda programs, group: None),
    ]
    try:
        with contextlib.ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            (tuned,) = strategy.tune(op, [(66, 48, 48)], dtype)
            choice = choice_of("fused", trial.problem, group)
        a, b = trial.inputs()
        cache.operators[trial.problem, choice](a, b, trial.c)
        return {
            "winner": choice.program,
            "reasons": {a.choice.program: a.reason for a in tuned.attempts},
            "result is right": trial.error_of(a, b, trial.c) < 1e-2,
        }
    finally:
        OPERATORS[op] = real
