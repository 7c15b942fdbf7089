"""Mutants of shared kernels: calls with one wrong argument for a size."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from tvm import tirx

from tests.shared_kernels import SharedFunctions
from tileweave.simulator import Mutant
from tileweave.simulator.machine.executable import Executable
from tileweave.simulator.memory.memory import Memory, Tensor
from tileweave.simulator.mutation.mutate import _Runs

from .sized_calls import SizedCall

SAME = "proven: the same accesses, values and targets"
SEEDS, EPOCHS = range(1), 2


def mutants_of(shared: SharedFunctions, calls: list[SizedCall], other: SizedCall) -> list[Mutant]:
    """Return the mutants of the kernels of a size, in the order of kernels and arguments.

    An argument becomes one too small, one too large, and that of another size. A mutant that
    survives is equivalent for these inputs if all blocks make the same accesses in the same order,
    with the same values of words, and wait for the same targets.

    Args:
        calls: calls of one size with different inputs. One of them must kill a mutant.
        other: call of the other size.
    """
    changes = list(_changes(shared, calls[0], other))
    mutants = {at: Mutant(*at, "", 0, "explained", SAME) for *_, at in changes}
    for inputs in (call.inputs for call in calls):
        run = _Runs(shared.ranks, inputs, SEEDS, EPOCHS, None)
        with recorded() as right:
            run.reference(shared.executable(calls[0].steps))
        for func, sizes, at in changes:
            if mutants[at].verdict != "killed":
                executable = _changed(shared, calls[0].steps, func, sizes)
                with recorded() as actual:
                    judged = run.judge(replace(mutants[at], verdict="survived"), executable)
                if judged.verdict == "killed" or actual.digest() != right.digest():
                    mutants[at] = judged
    return list(mutants.values())


def _changes(
    shared: SharedFunctions, call: SizedCall, other: SizedCall
) -> Iterator[tuple[tirx.PrimFunc, tuple[int, ...], tuple[str, str]]]:
    """Yield a kernel, wrong arguments, and the names of the argument and of the change."""
    pairs = zip(shared.kernels_of(call.steps), shared.kernels_of(other.steps), strict=True)
    for func, other_func in pairs:
        kernel, sizes = shared.find(func)
        other_kernel, other_sizes = shared.find(other_func)
        assert kernel is other_kernel
        names = [p.name for p in kernel.program.params if isinstance(p, tirx.SizeVar)]
        for n, name in enumerate(names):
            for change, value in (
                ("-1", sizes[n] - 1), ("+1", sizes[n] + 1), ("other", other_sizes[n])
            ):  # fmt: skip
                if value != sizes[n]:
                    wrong = *sizes[:n], value, *sizes[n + 1 :]
                    label = f"{func.attrs['global_symbol']} {name}={sizes[n]}"
                    yield func, wrong, (label, change)


def _changed(
    shared: SharedFunctions, steps: Any, changed: tirx.PrimFunc, sizes: tuple[int, ...]
) -> Executable:
    """Return a program or plan of which one kernel has other arguments."""

    def make(func: tirx.PrimFunc, _: int) -> Any:
        return shared.program(func, sizes if func.same_as(changed) else None)

    return Executable(steps, shared.ranks, make)


@contextlib.contextmanager
def recorded() -> Iterator[Any]:
    """Add all accesses of simulations to a hash: regions, values of words, and targets of waits."""
    digest = hashlib.blake2b()
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (Memory, "note"), (Tensor, "write"), (Tensor, "update"), (Tensor, "_store"),
            (Tensor, "note_wait"), (Tensor, "count"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, _hashing(owner, name, digest)))
        yield digest


def _hashing(owner: type, name: str, digest: Any) -> Any:
    original = getattr(owner, name)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        _add(digest, (name, *args))
        return original(self, *args, **options)

    return call


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, tuple | list):
        for item in value:
            _add(digest, item)
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Tensor):
        digest.update(value.name.encode())
    elif hasattr(value, "agent"):
        digest.update(f"{value.agent} {value.op} {value.loc} {value.epoch} {value.scope}".encode())
    elif isinstance(value, int | str | slice | None):
        digest.update(repr(value).encode())
