"""``tw.interpret``: TileLang kernels that are called with CPU tensors run in the simulator."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from tilelang import tvm
from tilelang.autotuner.param import AutotuneResult
from tilelang.autotuner.tuner import AutoTuneImpl, AutoTuner
from tilelang.backend.target import determine_target
from tilelang.engine.lower import extrac_params
from tilelang.jit import JITKernel
from tilelang.jit.adapter import BaseKernelAdapter
from tvm import tirx

from .builtins.errors import TileWeaveError, brief_errors
from .builtins.symmetric import is_packed, packed_strides
from .codegen.compile import compiles_for_group
from .emit import lowered
from .passes import split_options
from .runtime.kernel.configured import configured
from .runtime.plans.parameters import bound, parameters_of
from .simulator import LEVELS, Debugger, SimulationWarning, executable_at, simulate
from .simulator.device.program import ARCHITECTURES
from .simulator.inputs.arguments import check_count, check_numbers
from .simulator.inputs.inputs import tensor_of
from .simulator.memory.values import is_float

_jit = import_module("tilelang.jit")  # the attribute `tilelang.jit` is a function
_compile = _jit.cached
_run = JITKernel.__call__
_run_tuned = AutoTuneImpl.__call__


@dataclass(frozen=True, eq=False)
class _Settings:
    level: str
    arch: str
    schedules: int
    nan: bool
    blocks: int | None
    debugger: Debugger | None
    calls: Counter[str]
    """Number of simulated calls by the name of the kernel."""


_active: list[_Settings] = []
"""Settings of the ``tw.interpret`` that are entered, the last one last."""
_hooks = ExitStack()
"""Replaced functions of TileLang, while a ``tw.interpret`` is entered."""


@brief_errors
def interpret(
    level: str = "tile",
    arch: str | None = None,
    schedules: int = 1,
    nan: bool = False,
    blocks: int | None = None,
    debugger: Debugger | None = None,
) -> AbstractContextManager[Counter[str]]:
    """Run kernels of TileLang that are called with CPU tensors in the simulator; needs no GPU.

    Inside of ``with tw.interpret():``, this applies to kernels of ``tilelang.jit`` and
    ``tilelang.compile`` in all threads, also to those compiled before. A call is one launch. It
    writes the tensors and returns outputs as on a GPU. Calls with CUDA tensors, kernels for other
    targets, and ``tw.jit`` and ``tw.compile`` are unchanged. ``tilelang.autotune`` chooses its
    first configuration.

    ``as`` gives the number of simulated calls by the name of the kernel.

    Args:
        level: ``tile``, the program itself; or ``device``, the functions that it is lowered to.
        arch: ``sm_80`` or ``sm_90a``; None: ``sm_90a``.
        schedules: number of interleavings of each call.
        nan: whether a statement that makes a NaN or an infinity is a fault, as in ``tw.simulate``.
        blocks: number of blocks of each call that run, as in ``tw.simulate``. Floats that they do
            not write become NaN in the tensors that the kernel writes; other elements keep their
            values. None: all.
        debugger: shows values of the calls at the level ``tile``.

    Raises:
        SimulationError: (of a call) a fault, as in ``tw.simulate``.
        TileWeaveError: an argument is illegal.
    """
    arch = "sm_90a" if arch is None else arch
    for name, value, legal in (("level", level, LEVELS), ("arch", arch, ARCHITECTURES)):
        if value not in legal:
            expected = " or ".join(map(repr, legal))
            raise TileWeaveError(f"interpret: {name}={value!r}; expected {expected}")
    check_numbers("interpret", 1, schedules, 0, 1, None)
    check_count("interpret", "blocks", blocks)
    return _interpreting(_Settings(level, arch, schedules, nan, blocks, debugger, Counter()))


@contextmanager
def _interpreting(settings: _Settings) -> Iterator[Counter[str]]:
    target = tvm.target.Target({"kind": "cuda", "arch": settings.arch})
    # TileLang finds no target without a GPU.
    with nullcontext() if torch.cuda.is_available() else target:
        if not _active:
            _hooks.enter_context(patch.multiple(_jit, cached=_interpreted_kernel))
            _hooks.enter_context(patch.multiple(JITKernel, __call__=_call))
            _hooks.enter_context(patch.multiple(AutoTuneImpl, __call__=_call_tuned))
            _hooks.enter_context(patch.multiple(AutoTuner, run=_first_configuration))
        _active.append(settings)
        try:
            yield settings.calls
        finally:
            _active.remove(settings)
            if not _active:
                _hooks.close()


class InterpretedAdapter(BaseKernelAdapter):
    """Adapter of a TileLang kernel that simulates calls with CPU tensors inside ``tw.interpret``.

    Args:
        program: a ``T.prim_func`` with its ``pass_configs``.
        out_idx: indices of the outputs, as for ``tilelang.compile``.
        compiled: returns the compiled kernel, for all other calls.
    """

    def __init__(
        self, program: tirx.PrimFunc, out_idx: list[int] | int | None,
        compiled: Callable[[], JITKernel],
    ) -> None:  # fmt: skip
        self._program, self._compiled = program, compiled
        self._executables: dict[tuple[str, str, Debugger | None], Any] = {}
        out_idx = out_idx if out_idx is None or isinstance(out_idx, int) else list(out_idx)
        super().__init__(None, extrac_params(program), out_idx)

    def _convert_torch_func(self) -> Callable[..., Any]:
        return self._dispatch

    def get_kernel_source(self, kernel_only: bool = True) -> str:
        """Return TileLang's CUDA code, inside ``tw.interpret`` for its architecture."""
        if not _active:
            return self._compiled().get_kernel_source(kernel_only)
        program, configs = split_options(self._program, {})
        return lowered(program, _active[-1].arch, configs).kernel_source

    def _dispatch(self, *args: Any) -> Any:
        if not _active or _on_gpu(args):
            return _run(self._compiled(), *args)
        return self._simulate(_active[-1], args)

    @brief_errors
    def _simulate(self, settings: _Settings, args: tuple[Any, ...]) -> Any:
        key = settings.level, settings.arch, settings.debugger
        if key not in self._executables:
            self._executables[key] = executable_at(self._program, 1, *key, stock=True)
        executable = self._executables[key]
        parameters = parameters_of(self._program)
        inputs = [p for i, p in enumerate(parameters) if i not in self.result_idx]
        arguments = bound(executable.plan.name, inputs, args, {})
        values = {p.name: value for p, value in zip(inputs, arguments, strict=True)}
        for buffer in self._program.buffer_map.values():
            _check_strides(executable.plan.name, buffer, values.get(buffer.name))
        settings.calls[executable.plan.name] += 1
        results, *_ = simulate(
            executable, 1, [values], settings.schedules, epochs=1,
            level=settings.level, arch=settings.arch, nan=settings.nan,
            blocks=settings.blocks, debugger=settings.debugger,
        )  # fmt: skip
        results = {name: _with_nan(array) for name, array in results.items()}
        written = set().union(*(program.written for program in executable.programs))
        with torch.no_grad():
            for name in written & values.keys():
                values[name].copy_(tensor_of(results[name], values[name].dtype))
        tensors = [
            tensor_of(results[parameters[i].name], self.params[i].torch_dtype())
            for i in self.result_idx
        ]
        return tensors[0] if len(tensors) == 1 else tensors


def _with_nan(array: np.ndarray) -> np.ndarray:
    """Return an array whose masked elements are NaN, if its type has one."""
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if is_float(array.dtype):
        array.data[array.mask] = np.nan
    return array.data


def _check_strides(kernel: str, buffer: tirx.Buffer, tensor: Any) -> None:
    """Refuse a tensor whose strides TileLang refuses on a GPU."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != len(buffer.shape):
        return
    strides = tensor.stride()
    legal = [
        int(declared) if isinstance(declared, tirx.IntImm) else stride
        for stride, declared in zip(strides, buffer.strides or strides, strict=True)
    ]
    if is_packed(buffer):
        legal = packed_strides(tensor.shape)
    axes = zip(tensor.shape, strides, legal, strict=True)
    if any(extent > 1 and stride != expected for extent, stride, expected in axes):
        raise TileWeaveError(
            f"{kernel}: {buffer.name} has strides {strides}; expected {tuple(legal)}, as on a GPU: "
            "a contiguous tensor, or a T.StridedTensor"
        )


def _is_cuda(target: Any) -> bool:
    """Return whether TileLang compiles for a GPU that the simulator can stand for."""
    is_default = target is None or (isinstance(target, str) and target == "auto")
    return is_default or determine_target(target, return_object=True).kind.name == "cuda"


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.device.type != "cpu" for a in args)


def _interpreted_kernel(
    func: tirx.PrimFunc, out_idx: Any = None, *args: Any, target: Any = None,
    pass_configs: Any = None, **options: Any,
) -> JITKernel:  # fmt: skip
    """Return a kernel that is simulated, instead of ``tilelang.cache.cached``. It is compiled at
    its first call with CUDA tensors."""
    options |= {"target": target, "pass_configs": pass_configs}
    compiled = partial(_compile, func, out_idx, *args, **options)
    if compiles_for_group() or not _is_cuda(target):
        return compiled()
    settings = _active[-1]
    kernel = JITKernel(
        func, out_idx, "tvm_ffi", {"kind": "cuda", "arch": settings.arch},
        pass_configs=pass_configs, from_database=True,
    )  # fmt: skip
    program = configured("interpret", func, pass_configs)
    kernel.adapter = InterpretedAdapter(program, out_idx, cache(compiled))
    kernel.torch_function = kernel.adapter.func
    return kernel


_adapters: WeakKeyDictionary[JITKernel, InterpretedAdapter] = WeakKeyDictionary()
"""Adapters of kernels that were compiled outside of ``tw.interpret``."""


def _call(kernel: JITKernel, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel, instead of ``JITKernel.__call__``."""
    is_stock = not isinstance(kernel.adapter, InterpretedAdapter)
    if is_stock and kernel.target.kind.name == "cuda" and not _on_gpu((*args, *kwargs.values())):
        if kernel not in _adapters:
            program = configured("interpret", kernel.prim_func, kernel.pass_configs)
            _adapters[kernel] = InterpretedAdapter(program, kernel.out_idx, ref(kernel))
        return _adapters[kernel](*args, **kwargs)
    return _run(kernel, *args, **kwargs)


def _call_tuned(tuned: AutoTuneImpl, *args: Any, **kwargs: Any) -> Any:
    """Call a function of ``tilelang.autotune``, instead of ``AutoTuneImpl.__call__``."""
    with patch.multiple(tuned, _tuner_cache={}):  # the first configuration is no result of tuning
        return _run_tuned(tuned, *args, **kwargs)


def _first_configuration(tuner: AutoTuner, *_: Any, **__: Any) -> AutotuneResult:
    """Return the first configuration, instead of ``AutoTuner.run``; none if the caller has given
    an argument that would be tuned."""
    args, kwargs = tuner._kernel_parameters or ((), ())
    configs = tuner.configs(*args, **dict(kwargs)) if callable(tuner.configs) else tuner.configs
    given = list(inspect.signature(tuner.fn).parameters)[: len(args)] + list(dict(kwargs))
    config = {} if configs[0].keys() & given else configs[0]
    if config and len(configs) > 1:
        warnings.warn(
            f"interpret: autotune chooses the first of {len(configs)} configurations, {config}",
            SimulationWarning,
            stacklevel=4,
        )
    compile_config, _elaborate = tuner._ensure_jit_functions()
    names = {"pass_configs": "__pass_configs__"}
    kernel = compile_config(**{names.get(name, name): v for name, v in config.items()})
    kernel.update_tuner_result(latency=float("nan"), config=config, ref_latency=None)
    return AutotuneResult(
        latency=kernel.latency, config=config, func=kernel.prim_func, kernel=kernel
    )
