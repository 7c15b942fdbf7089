"""Compiled kernel or plan with its symmetric memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import torch
from tvm import tirx

from ...builtins.errors import SyncWarning
from ...runtime import Plan, SymmetricTensor, symmetric
from ...runtime import compile as compile_program
from ...runtime.executor.recorded_calls import RecordedCall


class CompiledOp:
    """Compiled kernel or plan with the symmetric memory that it works in.

    Attributes:
        memory: symmetric tensors of a plan, in the order of its parameters; a kernel owns its
            symmetric memory.
        given: tensors passed after ``memory``, the same in each call.
        run: the kernel, or the plan.
        last_used: number of the latest use, see ``OpCache``.
    """

    given: tuple[torch.Tensor, ...] = ()
    last_used = 0

    def __init__(self, steps: tirx.PrimFunc | Plan) -> None:
        """Compile, and allocate symmetric memory, that of kernels included. Collective.

        Raises:
            HeapExhausted: the heap is too small; nothing stays allocated.
        """
        self.memory: list[SymmetricTensor] = []
        with warnings.catch_warnings():
            # Tiles that cross the end of a tensor are meant; the user cannot change the program.
            warnings.simplefilter("ignore", SyncWarning)
            self.run = (
                compile_program(steps) if not isinstance(steps, Plan) else self._compile(steps)
            )

    def _compile(self, steps: Plan) -> Plan:
        """Return ``steps``, compiled, after the allocation of its symmetric memory."""
        with ExitStack() as failed:
            for p in steps.parameters:
                if p.symmetric:
                    self.memory.append(symmetric(p.extents, getattr(torch, p.dtype)))
                    failed.callback(self.memory[-1].free)
            steps.compile()
            failed.pop_all()
        return steps

    def enqueue(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Run the kernel or plan on inputs of the shapes and types that it declares."""
        self.run(*inputs, *self.memory, *self.given, out)

    def recorded_call(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor
    ) -> tuple[RecordedCall, list[int]]:
        """Return the recorded call that ``enqueue`` makes for such tensors, and the addresses of
        its tensors; see ``Plan.recorded_call``."""
        return self._plan.recorded_call(*inputs, *self.memory, *self.given, out)

    @cached_property
    def _plan(self) -> Plan:
        return self.run if isinstance(self.run, Plan) else Plan.of_program(self.run)

    def free(self) -> None:
        """Free its symmetric memory. Collective."""
        self.run.free()
        for memory in self.memory:
            memory.free()
