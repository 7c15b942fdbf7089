"""Kernels of one GPU that run in the simulator, for calls with tensors of the CPU."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tilelang
import torch

import tileweave as tw
from tileweave.ops.moe import grouped_matmul as module
from tileweave.ops.moe import local_kernels, quant, routing
from tileweave.runtime.executor import recorded_calls
from tileweave.runtime.plans.parameters import parameters_of


class SimulatedKernel:
    """A compiled kernel that runs in the simulator and writes the tensors of the caller."""

    def __init__(self, program: Any, target: str) -> None:
        self.program, self.names = program, [p.name for p in parameters_of(program)]

    def __call__(self, *arguments: Any) -> None:
        given = dict(zip(self.names, arguments, strict=True))
        tensors = {n: a for n, a in given.items() if isinstance(a, torch.Tensor) and n != "rows"}
        assert all(t.is_contiguous() for t in tensors.values())
        inputs = given | {name: as_numpy(tensor).copy() for name, tensor in tensors.items()}
        (outputs,) = tw.simulate(self.program, 1, [inputs], epochs=1)
        for name, tensor in tensors.items():
            as_numpy(tensor)[...] = outputs[name]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a tensor."""
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.int8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.detach().numpy()


def recorded_launches() -> list[Any]:
    """Return the recorded calls of grouped GEMMs."""
    calls = recorded_calls.recorded_calls().values()
    return [call for call in calls if isinstance(call, module._Call)]


def simulate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let grouped GEMMs, quantization and the routing of few choices run in the simulator."""
    properties = types.SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(local_kernels, "_KERNELS", {})
    monkeypatch.setattr(recorded_calls._here, "cache", recorded_calls.CallCache())
    monkeypatch.setattr(module, "has_kernel", lambda x, w, columns=None: x.dtype in module._DTYPES)
    monkeypatch.setattr(tilelang, "compile", SimulatedKernel)
    monkeypatch.setattr(quant, "has_kernel", lambda x: x.dtype in quant._DTYPES)
    monkeypatch.setattr(routing, "has_kernel", routing.fits)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
