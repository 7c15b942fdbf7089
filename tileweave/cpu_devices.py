"""The device ``cuda`` of torch becomes the CPU, for scripts that ``tileweave run`` simulates."""

from __future__ import annotations

import atexit
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from tilelang import profiler
from tilelang.carver.arch.driver import cuda_driver
from torch.overrides import TorchFunctionMode
from tvm.runtime import Device

from .builtins.errors import TileWeaveError
from .interpreter import interpret
from .simulator import LEVELS, SimulationWarning

INTERPRET = "TILEWEAVE_INTERPRET"
"""Environment variable: 1 or a level."""
_SM_COUNTS = {"sm_80": 108, "sm_90a": 132}


@contextmanager
def cuda_is_cpu(arch: str) -> Iterator[None]:
    """Let torch and TVM report one GPU of ``arch`` whose tensors are in CPU memory, in this thread.

    Moves between CPU and ``cuda`` copy. TileLang's ``do_bench`` runs its function once and returns
    NaN. Not covered: CUDA graphs, kernels of Triton.
    """
    capability = (int(arch[3]), int(arch[4]))
    properties = SimpleNamespace(
        name=f"TileWeave simulator ({arch})",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=_SM_COUNTS[arch],
        total_memory=80 << 30,
        warp_size=32,
    )
    values = {
        "current_device": 0,
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        "device": nullcontext(),
        "device_count": 1,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "get_rng_state": torch.get_rng_state(),
        "is_available": True,
        "is_bf16_supported": True,
        "max_memory_allocated": 0,
        "memory_allocated": 0,
        "stream": nullcontext(),
    }
    values |= dict.fromkeys(
        ("empty_cache", "init", "manual_seed", "manual_seed_all", "reset_peak_memory_stats",
         "set_device", "set_rng_state", "set_stream", "synchronize")
    )  # fmt: skip
    functions = {name: _constant(value) for name, value in values.items()}
    attributes = {
        "exist": True,
        "compute_version": "{}.{}".format(*capability),
        "multi_processor_count": properties.multi_processor_count,
        "warp_size": properties.warp_size,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, Event=_Event, Stream=_Stream, **functions))
        stack.enter_context(
            patch.multiple(torch, set_default_device=_constant(None), Generator=_Generator)
        )
        stack.enter_context(
            patch.multiple(
                cuda_driver, get_cuda_device_properties=functions["get_device_properties"]
            )
        )
        stack.enter_context(
            patch.multiple(Device, **{n: _of_cuda(n, value) for n, value in attributes.items()})
        )
        for module in (profiler, profiler.bench):
            stack.enter_context(patch.multiple(module, do_bench=_run_once))
        stack.enter_context(_CpuMode())
        yield


def interpret_process() -> None:
    """Enter ``tw.interpret`` and ``cuda_is_cpu`` until the process ends, as the environment
    variable TILEWEAVE_INTERPRET requires.

    Raises:
        TileWeaveError: the value is unknown.
    """
    value = os.environ[INTERPRET]
    levels = {"1": "tile", **{level: level for level in LEVELS}}
    if value not in levels:
        raise TileWeaveError(f"{INTERPRET}={value}; expected {' or '.join(levels)}, or 0 for none")
    stack = ExitStack()
    stack.enter_context(interpret(levels[value]))
    stack.enter_context(cuda_is_cpu("sm_90a"))
    atexit.register(stack.close)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _of_cuda(name: str, value: Any) -> property:
    """Return an attribute of TVM's devices that has this value for the first CUDA device."""
    others = getattr(Device, name).fget
    return property(lambda d: value if (d.type, d.index) == ("cuda", 0) else others(d))


class _CpuMode(TorchFunctionMode):
    """Replaces the device ``cuda`` in the arguments of torch functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0].clone()
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if func is torch.Tensor.to:
            others = [_on_cpu(a) for a in args[1:]]
            is_move = "device" in kwargs or any(isinstance(a, torch.device) for a in others)
            return func(args[0], *others, **kwargs, **({"copy": True} if is_move else {}))
        return func(*(_on_cpu(a) if isinstance(a, torch.device) else a for a in args), **kwargs)


def _on_cpu(device: Any) -> Any:
    """Return the CPU for a device, and other values unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str):
        device = torch.device(device)
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if is_cuda else device


class _Generator(torch.Generator):
    """Generator of the CPU, which stands for one of any device."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class _Stream:
    """Stream of a GPU that executes each call before it returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None: ...

    wait_stream = wait_event = record_event = record = wait = synchronize


class _Event(_Stream):
    """Event of a stream. It measures no time."""

    def elapsed_time(self, _: _Event) -> float:
        return math.nan


def _run_once(
    fn: Callable[[], Any], *_: Any, quantiles: list[float] | None = None, **__: Any
) -> float | list[float]:
    """Run a function once, instead of ``do_bench``."""
    fn()
    warnings.warn(
        "do_bench: the simulator measures no time; the function ran once, and its time is nan",
        SimulationWarning,
        stacklevel=2,
    )
    return [math.nan] * len(quantiles) if quantiles else math.nan
