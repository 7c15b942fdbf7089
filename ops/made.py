"""A kernel or a plan made ready, with the symmetric memory that a plan works in."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from tvm import tirx

from ..runtime import Plan, SymmetricTensor, symmetric
from ..runtime import compile as compiled


class Made:
    """What an operator runs.

    Attributes:
        memory: the symmetric tensors that a plan takes, in the order of its parameters; a kernel
            has its own.
        run: the kernel, or the plan.
    """

    def __init__(self, steps: tirx.PrimFunc | Plan) -> None:
        """Compile a kernel, which a plan does in its first call; take symmetric memory. Collective.

        Raises:
            HeapExhausted: there is not enough of it; nothing is taken then.
        """
        planned = isinstance(steps, Plan)
        self.memory: list[SymmetricTensor] = []
        with ExitStack() as failed:
            for p in steps.parameters if planned else ():
                if p.symmetric:
                    self.memory.append(symmetric(p.extents, getattr(torch, p.dtype)))
                    failed.callback(self.memory[-1].free)
            self.run = steps if planned else compiled(steps)
            failed.pop_all()

    def free(self) -> None:
        """Give its symmetric memory back. Collective."""
        self.run.free()
        for memory in self.memory:
            memory.free()
