"""Kernels that programs for several sizes share, as device functions in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit, substitute

from tests.groups import one_rank
from tileweave.passes import for_group
from tileweave.runtime import Plan
from tileweave.runtime.kernel.shared_kernels import SharedKernel, SharedKernels
from tileweave.simulator.device.lowering import HEAP_STRIDE, DeviceFunctions, lowered
from tileweave.simulator.device.program import DeviceProgram
from tileweave.simulator.frontend.program import lowered as tile_level
from tileweave.simulator.machine.executable import Executable

Steps = tirx.PrimFunc | Plan


class SharedFunctions:
    """Device functions of the kernels that programs for several sizes share.

    Attributes:
        ranks: number of ranks.
        kernels: kernels of the programs so far.
    """

    def __init__(self, ranks: int, arch: str = "sm_90a") -> None:
        self.ranks, self._arch, self._shared = ranks, arch, SharedKernels()
        self._functions: dict[SharedKernel, DeviceFunctions] = {}
        self.kernels: list[SharedKernel] = []

    def add(self, *steps: Steps) -> None:
        """Let the next kernels fit these programs and plans."""
        for program in steps:
            for func in self.kernels_of(program):
                self._shared.add(self._for_group(func), {})

    def prepare(self, steps: Steps, similar: Callable[[], Iterable[Steps]]) -> None:
        """Decide which kernels a program or plan needs, as ``compile_ahead`` does."""
        own = [self._for_group(func) for func in self.kernels_of(steps)]
        if self._shared.has([(func, {}) for func in own], one_rank()):
            return
        self.add(steps, *similar())
        for func in own:
            kernel, _ = self._shared.find(func, {})
            kernel.is_cached = True
            self._note(kernel)

    def find(self, func: tirx.PrimFunc) -> tuple[SharedKernel, tuple[int, ...]]:
        """Return the kernel of a program, and its arguments for the program."""
        kernel, sizes = self._shared.find(self._for_group(func), {})
        self._note(kernel)
        return kernel, sizes

    def executable(self, steps: Steps) -> Executable:
        """Return a program or plan that runs the shared kernels."""
        return Executable(steps, self.ranks, lambda func, _: self.program(func))

    def program(self, func: tirx.PrimFunc, sizes: Sequence[int] | None = None) -> DeviceProgram:
        """Return the device functions of the shared kernel of ``func``.

        Args:
            sizes: arguments of the kernel; None: those for ``func``.
        """
        kernel, own_sizes = self.find(func)
        below = self._functions_of(kernel, func)
        names = [p.name for p in kernel.program.params if isinstance(p, tirx.SizeVar)]
        values = dict(zip(names, own_sizes if sizes is None else sizes, strict=True))
        maps = {
            parameter: replace(
                tensor_map,
                shape=[_at_values(e, values) for e in tensor_map.shape],
                strides=[_at_values(e, values) for e in tensor_map.strides],
            )
            for parameter, tensor_map in below.descriptors.items()
        }
        functions = [_with_values(function, values) for function in below.kernels]
        tiles = tile_level(func, self.ranks)
        below = DeviceFunctions(tiles, functions, maps, below.bound)
        return DeviceProgram(func, self.ranks, self._arch, below=below)

    def _functions_of(self, kernel: SharedKernel, func: tirx.PrimFunc) -> DeviceFunctions:
        if kernel not in self._functions:
            self._functions[kernel] = lowered(func, self.ranks, self._arch, kernel.program)
        return self._functions[kernel]

    def kernels_of(self, steps: Steps) -> list[tirx.PrimFunc]:
        """Return the kernels that a program or plan launches."""
        return steps.kernels(self.ranks) if isinstance(steps, Plan) else [steps]

    def _for_group(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        return for_group(func, self.ranks, HEAP_STRIDE)

    def _note(self, kernel: SharedKernel) -> None:
        if kernel not in self.kernels:
            self.kernels.append(kernel)


def _at_values(expr: Any, values: dict[str, int]) -> Any:
    if not isinstance(expr, tirx.PrimExpr):
        return expr
    variables = {}
    post_order_visit(expr, lambda n: variables.update({n: n}) if isinstance(n, tirx.Var) else None)
    named = {v: tirx.IntImm(v.dtype, values[v.name]) for v in variables if v.name in values}
    return substitute(expr, named)


def _with_values(kernel: tirx.PrimFunc, values: dict[str, int]) -> tirx.PrimFunc:
    """Return a device function with integers in the place of these parameters."""
    numbers = {p: tirx.IntImm(p.dtype, values[p.name]) for p in kernel.params if p.name in values}
    params = [p for p in kernel.params if p.name not in values]
    body = substitute(kernel.body, numbers)
    return tirx.PrimFunc(params, body, kernel.ret_type, kernel.buffer_map, kernel.attrs)
