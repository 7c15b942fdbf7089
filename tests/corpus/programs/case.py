"""One program of the corpus, and the registry of all programs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tileweave as tw

F32 = "float32"


@dataclass(frozen=True)
class Case:
    """A program with its inputs and expected results.

    Attributes:
        make: world size -> T.prim_func or plan.
        inputs: (random generator, world size) -> one dict for each rank.
        expected: inputs -> one dict for each rank, with the tensors to compare.
        ranks: world sizes to test.
        resident: number of blocks that must run at the same time, because they wait for each other.
        unread: symmetric parameters that the caller does not read.
        mutated: smallest world size in which every operation orders something.
        sizes: values of a dynamic extent; ``inputs`` accepts one as ``size``, or chooses one.
        recorded: whether ``called`` uses the steps that CUDA graphs record.
    """

    make: Callable[[int], Any]
    inputs: Callable[[np.random.Generator, int], list[dict[str, Any]]]
    expected: Callable[[list[dict[str, Any]]], list[dict[str, np.ndarray]]]
    ranks: tuple[int, ...] = (1, 2, 3, 4, 5)
    tolerance: float = 0.0
    resident: int = 1
    unread: tuple[str, ...] = ()
    mutated: int = 2
    sizes: tuple[int, ...] = ()
    recorded: bool = False

    def called(self, ranks: int) -> tw.Plan:
        """Return a plan that runs the program, then copies each rank's own symmetric memory.

        The copy of ``S`` is ``S_after``: it is what a caller reads after the call.
        """
        program = self.make(ranks)
        plan = program if isinstance(program, tw.Plan) else tw.Plan.of_program(program)
        symmetric = [p for p in plan.parameters if p.symmetric and p.name not in self.unread]
        copies = [replace(p, name=f"{p.name}_after", symmetric=False) for p in symmetric]

        def body(p: tw.PlanBuilder, *args: Any) -> None:
            plan.body(p, *args[: len(plan.parameters)])
            tensors = dict(zip([*plan.parameters, *copies], args, strict=True))
            for source, copy in zip(symmetric, copies, strict=True):
                p.copy(tensors[copy], tensors[source][p.rank])

        parameters = [*plan.parameters, *copies]
        kind = Recorded if self.recorded else tw.Plan
        return kind(plan.name, parameters, body, plan.loc, plan.pass_configs)


class Recorded(tw.Plan):
    """A plan whose steps are those that CUDA graphs record."""

    def trace(self, *arguments: Any, **_: Any) -> list:
        return super().trace(*arguments, recorded=True)


PROGRAMS: dict[str, Case] = {}


def case(**more):
    """Register the class below: its functions are the functions of the case."""

    def register(cls):
        PROGRAMS[cls.__name__] = Case(cls.make, cls.inputs, cls.expected, **more)
        return cls

    return register


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return small integers, which float32 adds without rounding."""
    return rng.integers(-8, 8, shape).astype(np.float32)


def given(**shapes: tuple[int, ...]):
    """Return a function that draws tensors of small integers, with these shapes on each rank."""

    def inputs(rng: np.random.Generator, ranks: int) -> list[dict[str, np.ndarray]]:
        return [{n: integers(rng, *shape) for n, shape in shapes.items()} for _ in range(ranks)]

    return inputs
