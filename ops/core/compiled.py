"""Compiled kernel or plan with its symmetric memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import torch
from tvm import tirx

from ...builtins.errors import SyncWarning
from ...runtime import Plan, SymmetricTensor
from ...runtime import compile as compile_program
from ...runtime.executor.recorded_calls import RecordedCall
from ...runtime.host.session import Session
from ...runtime.plans.parameters import Parameter, parameters_of
from .checks import with_packed_strides


class CompiledOp:
    """Compiled kernel or plan with the symmetric memory that it works in.

    Attributes:
        memory: symmetric tensors of a plan, in the order of its parameters; a kernel owns its
            symmetric memory.
        fixed_inputs: tensors passed after ``memory``, the same in each call.
        run: the kernel, or the plan.
        last_used: number of the latest use, see ``OpCache``.
    """

    fixed_inputs: tuple[torch.Tensor, ...] = ()
    last_used = 0

    def __init__(self, steps: tirx.PrimFunc | Plan, session: Session) -> None:
        """Compile, and allocate symmetric memory, that of kernels included. Collective.

        Args:
            session: of the group that runs it.

        Raises:
            HeapExhausted: the heap is too small; nothing stays allocated.
        """
        self._session = session
        parameters = steps.parameters if isinstance(steps, Plan) else parameters_of(steps)
        *self._inputs, self._out = (p for p in parameters if not p.symmetric)
        self.memory: list[SymmetricTensor] = []
        with warnings.catch_warnings():
            # Tiles that cross the end of a tensor are meant; the user cannot change the program.
            warnings.simplefilter("ignore", SyncWarning)
            self.run = (
                self._compile(steps)
                if isinstance(steps, Plan)
                else compile_program(steps, group=session.group.process_group)
            )

    def _compile(self, steps: Plan) -> Plan:
        """Return ``steps``, compiled, after the allocation of its symmetric memory."""
        heap, plan = self._session.heap, steps.on(self._session.group.process_group)
        with ExitStack() as failed:
            for p in plan.parameters:
                if p.symmetric:
                    self.memory.append(heap.allocate(tuple(p.extents), getattr(torch, p.dtype)))
                    failed.callback(self.memory[-1].free)
            plan.compile()
            failed.pop_all()
        return plan

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Compute the result, the last of ``tensors``, from the inputs. Every rank calls it."""
        self.enqueue(*self.declared(*tensors))

    def declared(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the arguments of ``enqueue`` for inputs and a result, all contiguous."""
        *inputs, out = tensors
        pairs = zip(inputs, self._inputs, strict=True)
        return [as_declared(tensor, p) for tensor, p in pairs], as_declared(out, self._out)

    def enqueue(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Run the kernel or plan on inputs of the shapes and types that it declares."""
        self.run(*inputs, *self.memory, *self.fixed_inputs, out)

    def recorded_call(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor
    ) -> tuple[RecordedCall, list[int]]:
        """Return the recorded call that ``enqueue`` makes for such tensors, and the addresses of
        its tensors; see ``Plan.recorded_call``."""
        return self._plan.recorded_call(*inputs, *self.memory, *self.fixed_inputs, out)

    @cached_property
    def _plan(self) -> Plan:
        if isinstance(self.run, Plan):
            return self.run
        return Plan.of_program(self.run).on(self._session.group.process_group)

    def free(self) -> None:
        """Free its symmetric memory. Collective."""
        self.run.free()
        for memory in self.memory:
            memory.free()


def as_declared(tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """Return a contiguous tensor in the type and shape of a parameter."""
    flat = with_packed_strides(tensor).view(-1)
    dtype = getattr(torch, parameter.dtype)
    if flat.dtype != dtype:
        flat = flat.view(torch.uint8).view(dtype)
    return flat.view(parameter.extents)
