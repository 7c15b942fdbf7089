"""Compiler of device functions: the counterpart of ``frontend.program`` below the tile level."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tvm import tirx

from ...builtins.implicit import CONTEXT, LAUNCH
from ...builtins.ranks import RANK
from ...builtins.symmetric import is_packed
from ...passes.ir.group import heap_tensors
from ..frontend import builtin_ops, copy_ops, debug_ops, ll_ops, matrix_ops, random_ops, warp_ops
from ..frontend.program import Kernel, Program, first_line
from ..report.errors import unsupported
from . import atomics, barriers, copies, reductions, scans, tensor_core
from .block import DeviceBlock
from .lowering import DeviceFunctions, lowered
from .statements import DeviceStatements

OPERATIONS = (
    builtin_ops, copy_ops, debug_ops, ll_ops, warp_ops, atomics, barriers, copies,
    tensor_core, reductions, scans, random_ops, matrix_ops,
)  # fmt: skip
"""Modules whose ``register`` adds operations to the compiler; later ones replace earlier ones."""


_VALUES = {CONTEXT: 0, LAUNCH: -1}
"""Operator that the host binds -> its value in the simulator; the rank has a slot."""

ARCHITECTURES = ("sm_80", "sm_90a")
"""Architectures whose instructions are simulated."""


class DeviceProgram(Program):
    """``func`` lowered to device functions for ``world_size`` ranks.

    Args:
        arch: architecture, such as ``sm_90a``.
        change: applied to each device function before it is compiled.
        below: result of ``lowering.lowered``, maybe with changed kernels; None: lower ``func``.
        stock: lower it as ``tilelang.jit`` does, instead of ``tw.compile``.
        operations: objects whose ``register`` adds operations to the compiler.

    Raises:
        TileWeaveError: ``func`` is not a ``T.prim_func``.
        SimulationError: a device function uses an operation that is not simulated.
    """

    def __init__(
        self, func: Any, world_size: int, arch: str = "sm_90a",
        change: Callable[[tirx.PrimFunc], tirx.PrimFunc] = lambda kernel: kernel,
        below: DeviceFunctions | None = None, operations: Iterable[Any] = OPERATIONS,
        stock: bool = False,
    ) -> None:  # fmt: skip
        self._specialized = None
        below = lowered(func, world_size, arch, stock=stock) if below is None else below
        tiles = below.program
        c = DeviceStatements()
        c.maps, self._bound = below.descriptors, below.bound
        self._start(tiles, world_size, c, operations)
        self._declare(tiles, c.new_slot)
        buffers = list(tiles.buffer_map.values())
        self._tensors = {b.data.name: b for b in buffers} | {b.name: b for b in buffers}
        """Tensors by their names and those of their pointers, which views change."""
        c.maps = {
            param: replace(m, tensor=self._tensors[m.tensor].name) for param, m in c.maps.items()
        }
        self._symmetric = {tensor.name for tensor in heap_tensors(tiles)}
        for buffer in buffers:
            if buffer.name not in self._symmetric and not is_packed(buffer):
                text = f"{buffer.name} with strides {tuple(buffer.strides)} below the tile level"
                raise unsupported(text, self.name)
        slots = (s for s in c.slots.items() if s[1] != self.rank_slot)
        self._named = {variable.name: slot for variable, slot in slots}
        for kernel in below.kernels:
            self.host.append(self._device_kernel(change(kernel)))
        self._finish()

    @property
    def cuts(self) -> set[int]:
        threads = max((k.threads_in_block for k in self.kernels), default=0)
        return self.compiler.thread_cuts | set(range(0, threads, 32))

    @property
    def mbarriers(self) -> int:
        """Number of mbarriers of a block, and of the other asynchronous agents of its threads; see
        ``DeviceBlock``."""
        return self.compiler.mbarriers + 3 * self.thread_groups

    def _device_kernel(self, func: tirx.PrimFunc) -> Kernel:
        c = self.compiler
        c.threads, c.block_axes, c.block_extents = [1, 1, 1], {}, {}
        for param in func.params:
            name = param.name
            if param in c.maps:
                continue
            if param in self._bound:
                self._bind_parameter(param)
            elif name in self._tensors:
                self._declare_tensor(param, self._tensors[name])
            elif name in self._named:
                c.slots[param] = self._named[name]
            else:
                raise unsupported(f"the parameter {name} of a device function", self.name)
        for name in {m.tensor for m in c.maps.values()} - set(c.globals.values()):
            self._declare_tensor(tirx.Var(name, "handle"), self._tensors[name])
        body = c.statement(func.body, str(func.attrs["global_symbol"]))
        axes = sorted(c.block_axes)
        grid = [(c.block_axes[axis], c.block_extents[axis]) for axis in axes]
        return Kernel(
            self.name, grid, tuple(c.threads), body, c.signals, block=DeviceBlock,
            loc=first_line(func.body),
        )  # fmt: skip

    def _bind_parameter(self, param: tirx.Var) -> None:
        """Give ``param`` the value of the operator that the host passes in it."""
        c, operator = self.compiler, self._bound[param]
        if operator == RANK:
            c.slots[param] = self.rank_slot
        else:
            c.pending[param] = tirx.IntImm(param.dtype, _VALUES[operator])

    def _declare_tensor(self, data: tirx.Var, buffer: tirx.Buffer) -> None:
        c = self.compiler
        c.globals[data], c.declared[data] = buffer.name, buffer
        if buffer.name in self._symmetric:
            c.symmetric.add(data)
