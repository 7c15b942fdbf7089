"""Calls of operators by their programs, which the simulator runs on one rank in place of a GPU."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

import tileweave as tw
from tests.groups import one_rank, open_sessions
from tileweave.ops.core import call, noted
from tileweave.ops.core.compiled import CompiledOp, OpCache
from tileweave.runtime.executor import recorded_calls
from tileweave.runtime.executor.recorded_calls import RecordedCall
from tileweave.runtime.kernel.kernel import Kernel
from tileweave.runtime.plans.parameters import parameters_of

_ROOT = Path(__file__).parents[2]
MEMORY = 0xABC0
"""Address of the memory of a program."""
RESULTS = "residual_out", "scales", "lse", "out"
"""Names of parameters that programs write."""
NARROW = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
}


class Simulated(CompiledOp):
    """Kernel that the simulator runs."""

    enqueued: list
    calls: list

    def __init__(self, steps, session, similar=tuple, others=()):
        self._session, self.memory, self.run = session, [], self._run
        *self._inputs, self._out = parameters = parameters_of(steps)
        self._steps, self._names = steps, [p.name for p in parameters]
        self._kernel = Kernel(None, None, {"counter": torch.zeros(1)})

    def _run(self, *tensors):
        arrays = dict(zip(self._names, map(_array, tensors), strict=True))
        given = {name: array for name, array in arrays.items() if name not in RESULTS}
        results = tw.simulate(self._steps, 1, [given], epochs=1)[0]
        for name in RESULTS:
            if name in arrays:
                arrays[name][...] = results[name]
        Simulated.calls.append(self._steps.attrs["global_symbol"])

    def recorded_call(self, inputs, out):
        def enqueue(*addresses):
            Simulated.enqueued.append(addresses)
            return 0

        recorded = RecordedCall(self._session, None, [], [self._kernel], enqueue)
        return recorded, [*(t.data_ptr() for t in inputs), MEMORY, out.data_ptr()]


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor as an array."""
    tensor = tensor.detach()
    if tensor.dtype in NARROW:
        narrow = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int8)
        return narrow.numpy().view(NARROW[tensor.dtype])
    return tensor.numpy()


@contextmanager
def simulated_calls(monkeypatch, operator: types.ModuleType) -> Iterator[list[str]]:
    """Run the programs of a session of one rank in the simulator. Yield the names of those that
    ran.

    Args:
        operator: module that calls them.
    """
    watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
    session = types.SimpleNamespace(group=one_rank(), watchdog=watchdog, name="")
    open_sessions(monkeypatch, session)
    monkeypatch.setattr(noted, "_notes", {})
    cache = OpCache(session)
    for module in (operator, call):
        monkeypatch.setattr(module, "op_cache_of", lambda _: cache, raising=module is call)
    monkeypatch.setattr(operator, "obstacle_of_ranks", lambda *_, **__: None)
    for name in ("__init__", "recorded_call"):
        monkeypatch.setattr(CompiledOp, name, getattr(Simulated, name))
    monkeypatch.setattr(CompiledOp, "_run", Simulated._run, raising=False)
    Simulated.calls, Simulated.enqueued = [], []
    recorded_calls.invalidate()
    yield Simulated.calls
    recorded_calls.invalidate()


def record_calls(monkeypatch) -> None:
    """Let calls be recorded, and repeated without the simulator."""
    monkeypatch.setattr(call, "has_driver", lambda device: True)
    monkeypatch.setattr(call, "current_stream", lambda device: (7, False))
    monkeypatch.setattr(call, "library", lambda: "native")


REPEATED = [
    "operator", "look_up", "is_observed", "signature", "recorded_calls", "__call__", "is_valid",
    "__call__", "begin_call",
]  # fmt: skip
"""Functions that a repeated call runs after the public one."""


def functions_of(call: Callable[[], object]) -> list[str]:
    """Return the functions of the package that a call runs, without comprehensions."""
    functions = []

    def called(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_ROOT):
            if path.relative_to(_ROOT).parts[0] not in ("tests", ".venv"):
                functions.append(frame.f_code.co_name)

    sys.setprofile(called)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in functions if name.isidentifier()]
