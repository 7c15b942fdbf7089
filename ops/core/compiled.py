"""A kernel or a plan made ready, with the symmetric memory that a plan works in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import torch
from tvm import tirx

from ...runtime import Plan, SymmetricTensor, symmetric
from ...runtime import compile as compiled
from ...runtime.executor.recorded_call import RecordedCall


class CompiledOp:
    """What an operator runs.

    Attributes:
        memory: the symmetric tensors that a plan takes, in the order of its parameters; a kernel
            has its own.
        given: what it takes behind them, the same in each call.
        run: the kernel, or the plan.
        last_used: grows with each use, see ``OpCache``.
    """

    given: tuple[torch.Tensor, ...] = ()
    last_used = 0

    def __init__(self, steps: tirx.PrimFunc | Plan) -> None:
        """Compile, and take symmetric memory, that of kernels included. Collective.

        Raises:
            HeapExhausted: there is not enough of it; nothing is taken then.
        """
        self.memory: list[SymmetricTensor] = []
        if not isinstance(steps, Plan):
            self.run = compiled(steps)
            return
        self.run = steps
        with ExitStack() as failed:
            for p in steps.parameters:
                if p.symmetric:
                    self.memory.append(symmetric(p.extents, getattr(torch, p.dtype)))
                    failed.callback(self.memory[-1].free)
            steps.compile()
            failed.pop_all()

    def enqueue(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Run it on what a call brings, in the shapes and types that it declares."""
        self.run(*inputs, *self.memory, *self.given, out)

    def ready(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor
    ) -> tuple[RecordedCall, list[int]]:
        """What ``enqueue`` does with such tensors, see ``Plan.ready``."""
        return self._plan.ready(*inputs, *self.memory, *self.given, out)

    @cached_property
    def _plan(self) -> Plan:
        return self.run if isinstance(self.run, Plan) else Plan.of_program(self.run)

    def free(self) -> None:
        """Give its symmetric memory back. Collective."""
        self.run.free()
        for memory in self.memory:
            memory.free()
