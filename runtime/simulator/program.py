"""A tile program made ready to run: its parameters, and its kernels as steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit

from ... import passes
from ...builtins.errors import TileWeaveError
from ...builtins.symmetric import is_symmetric
from . import block_ops, builtin_ops, copy_ops, tile_ops
from .block_ops import BlockStatements
from .errors import unsupported
from .expressions import Expr
from .steps import Step
from .values import numpy_dtype

_HEAP_STRIDE = 1 << 40


@dataclass
class Parameter:
    """A parameter of the program; a tensor has a shape, a scalar has none."""

    name: str
    dtype: np.dtype
    shape: list | None = None
    symmetric: bool = False
    written: bool = False
    slot: int = -1


@dataclass
class Kernel:
    """One grid of blocks."""

    name: str
    grid: list
    """(slot of the block index, extent of a host frame), x first."""
    threads: tuple[int, int, int]
    body: Step
    classes: int = 0
    class_of: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    @property
    def threads_in_block(self) -> int:
        return self.threads[0] * self.threads[1] * self.threads[2]

    def thread_index(self, axis: int) -> np.ndarray:
        x, y, z = self.threads
        number = np.arange(x * y * z, dtype=np.int32)
        return (number % x, number // x % y, number // (x * y))[axis]

    def extents(self, frame: Any) -> tuple[int, ...]:
        return tuple(int(extent(frame)[0]) for _, extent in self.grid)


class Program:
    """What ``func`` does on each of ``world_size`` ranks.

    Raises:
        TileWeaveError: not a ``T.prim_func``.
        SimulationError: it uses something the simulator does not know.
    """

    def __init__(self, func: Any, world_size: int) -> None:
        if not isinstance(func, tirx.PrimFunc):
            raise TileWeaveError(f"simulate: {func!r}; expected a T.prim_func")
        self.name, self.world_size = str(func.attrs["global_symbol"]), world_size
        symmetric = {b.name for b in func.buffer_map.values() if is_symmetric(b)}
        mod = tvm.IRModule({self.name: func})
        mod = passes.run_group(mod, world_size, _HEAP_STRIDE)
        mod = passes.run(passes.SYNC_PASSES, mod)
        (func,) = mod.functions.values()
        self.compiler = c = BlockStatements()
        for ops in (block_ops, tile_ops, builtin_ops, copy_ops):
            ops.register(c)
        self.rank_slot = c.new_slot(tirx.Var("rank", "int32"))
        c.calls["tileweave.rank"] = lambda c, call, site: Expr(
            lambda frame: frame.env[self.rank_slot]
        )
        c.calls["tileweave.context"] = lambda c, call, site: Expr(lambda frame: 0)
        self.parameters: list[Parameter] = []
        self._declare(func, symmetric)
        self.host: list[Step | Kernel] = []
        self._split(func.body)
        cuts = sorted(c.thread_cuts)
        for kernel in self.kernels:
            threads = np.arange(kernel.threads_in_block)
            kernel.class_of = np.searchsorted(cuts, threads, side="right") - 1
            kernel.classes = int(kernel.class_of.max()) + 1
        self.slots = len(c.slots)
        self.thread_names = tuple(
            _range(low, high) for low, high in zip(cuts, [*cuts[1:], None], strict=True)
        )

    @property
    def kernels(self) -> list[Kernel]:
        return [k for k in self.host if isinstance(k, Kernel)]

    @property
    def classes(self) -> int:
        return max((k.classes for k in self.kernels), default=1)

    def _declare(self, func: tirx.PrimFunc, symmetric: set[str]) -> None:
        c, written = self.compiler, _written(func.body)
        for param in func.params:
            if param not in func.buffer_map:
                slot = c.new_slot(param)
                self.parameters.append(Parameter(param.name, numpy_dtype(param.dtype), slot=slot))
                continue
            buffer = func.buffer_map[param]
            c.globals[buffer.data] = buffer.name
            shape: list[Any] = []
            for extent in buffer.shape:
                if isinstance(extent, tirx.Var):
                    shape.append((c.new_slot(extent), str(extent)))
                else:
                    shape.append(extent)
            for axis, extent in enumerate(shape):
                if not isinstance(extent, tuple):
                    shape[axis] = (
                        int(extent) if isinstance(extent, tirx.IntImm)
                        else c.indices([extent], buffer.name, "")
                    )  # fmt: skip
            self.parameters.append(Parameter(
                buffer.name, numpy_dtype(buffer.dtype), shape, buffer.name in symmetric,
                buffer.data in written,
            ))  # fmt: skip

    def _split(self, stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                self._split(inner)
        elif isinstance(stmt, tirx.AttrStmt):
            self._split(stmt.body)
        elif isinstance(stmt, tirx.SBlockRealize) and not _is_kernel_body(stmt):
            if len(stmt.block.alloc_buffers):
                names = ", ".join(b.name for b in stmt.block.alloc_buffers)
                raise unsupported(f"memory made outside a kernel: {names}", self.name)
            self._split(stmt.block.body)
        elif isinstance(stmt, (tirx.For, tirx.SBlockRealize)):
            self.host.append(self._kernel(stmt))
        else:
            self.host.append(self.compiler.statement(stmt))

    def _kernel(self, stmt: tirx.Stmt) -> Kernel:
        c, grid = self.compiler, []
        while isinstance(stmt, tirx.For) and stmt.thread_binding is not None:
            extent = c.indices([stmt.extent], "the grid", self.name)
            grid.append((c.new_slot(stmt.loop_var), extent))
            stmt = stmt.body
        if isinstance(stmt, tirx.For):
            raise unsupported("a loop outside a kernel", self.name)
        threads = _threads(stmt)
        return Kernel(self.name, grid, threads, c.statement(stmt, self.name))

    def launches(self, rank: int, values: dict[str, Any], shapes: dict[int, int]) -> Iterator:
        """(kernel, environment) of each launch of one call of the program."""
        env: list[Any] = [None] * self.slots
        env[self.rank_slot] = rank
        for slot, extent in shapes.items():
            env[slot] = extent
        for p in self.parameters:
            if p.shape is None:
                value = values[p.name]
                env[p.slot] = int(value) if str(p.dtype) in ("int32", "int64") else (
                    p.dtype.type(value)
                )  # fmt: skip
        frame = SimpleNamespace(env=env, block=None, mask=None, space=None, cache={}, active=None)
        for item in self.host:
            if isinstance(item, Kernel):
                yield item, list(env), item.extents(frame)
            else:
                item.run(frame)

    def extents(self, p: Parameter, shapes: dict[int, int], rank: int) -> tuple[int, ...]:
        """The shape of a tensor, as the kernel sees it."""
        env: list[Any] = [None] * self.slots
        env[self.rank_slot] = rank
        for slot, extent in shapes.items():
            env[slot] = extent
        frame = SimpleNamespace(env=env, block=None, mask=None, space=None, cache={}, active=None)
        out = []
        for extent in p.shape or []:
            if isinstance(extent, tuple):
                if extent[0] not in shapes:
                    raise TileWeaveError(
                        f"simulate: {extent[1]} of {p.name} is dynamic; expected an input that "
                        "shows its size"
                    )
                out.append(shapes[extent[0]])
            else:
                out.append(extent if isinstance(extent, int) else int(extent(frame)[0]))
        return tuple(out)


def _range(low: int, high: int | None) -> str:
    if high is None:
        return "other threads"
    return f"thread {low}" if high == low + 1 else f"threads {low} to {high - 1}"


def _is_kernel_body(stmt: tirx.SBlockRealize) -> bool:
    return stmt.block.name_hint == "tilelang_root"


def _threads(stmt: tirx.Stmt) -> tuple[int, int, int]:
    found: list[tuple] = []

    def visit(node):
        if isinstance(node, tirx.SBlock):
            extents = dict(node.annotations.items()).get("tl.launch_threads")
            if extents is not None:
                found.append(tuple(int(e) for e in extents))

    post_order_visit(stmt, visit)
    return found[0] if found else (128, 1, 1)


def _written(body: tirx.Stmt) -> set:
    """Data pointers of the tensors that the program writes."""
    found = set()

    def visit(node):
        if isinstance(node, tirx.BufferStore):
            found.add(node.buffer.data)
        name = getattr(getattr(node, "op", None), "name", "")
        if name in ("tl.region", "tl.access_ptr"):
            mode = node.args[1] if name == "tl.region" else node.args[-1]
            if int(mode) & 2:
                found.add(node.args[0].buffer.data)

    post_order_visit(body, visit)
    return found
