"""Compiler of a tile program: its parameters, and its kernels as steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from tilelang import transform, tvm
from tvm import tirx

from ... import passes
from ...builtins.errors import LanguageError, TileWeaveError, not_a_program
from ...builtins.implicit import CONTEXT
from ...builtins.ranks import RANK
from ...builtins.spec import builtin_of
from ...codegen.hook import refusal
from ...passes.ir.accesses import accesses_of, written_tensors
from ...passes.ir.group import heap_tensors
from ...passes.ir.implicit import implicit_of
from ...passes.ir.spans import get_stmt_span
from ...passes.ir.walk import builtins_in, line_of_span, nodes_in, op_name
from ..machine.block import Block, Frame, Mask
from ..machine.steps import Step
from ..memory.threads import cut
from ..memory.values import numpy_dtype
from ..report.errors import refuse_vectors, unsupported
from . import (
    block_ops,
    builtin_ops,
    copy_ops,
    debug_ops,
    ll_ops,
    matrix_ops,
    multimem_ops,
    random_ops,
    reducer_ops,
    tile_ops,
    warp_ops,
)
from .expressions import Expr
from .statements import Statements
from .workspaces import with_workspaces

_HEAP_STRIDE = 1 << 40
OPERATIONS = (
    block_ops, tile_ops, builtin_ops, copy_ops, warp_ops, debug_ops, reducer_ops,
    multimem_ops, ll_ops, random_ops, matrix_ops,
)  # fmt: skip
"""Modules whose ``register`` adds operations to the compiler."""


@dataclass
class Kernel:
    """One grid of blocks."""

    name: str
    grid: list
    """Slot of the block index and extent of each axis, x first."""
    threads: tuple[int, int, int]
    body: Step
    signals: dict[str, dict[str, str]]
    """Operations that change words of a parameter atomically, by parameter and line."""
    mask: Mask = field(init=False)
    """All threads of a block."""
    thread_groups: list[np.ndarray] = field(default_factory=list)
    """Threads of each thread group."""
    block: type[Block] = Block
    """State of its blocks."""
    loc: str = ""
    """First known line."""

    @property
    def threads_in_block(self) -> int:
        return self.threads[0] * self.threads[1] * self.threads[2]

    @cached_property
    def thread_indices(self) -> tuple[np.ndarray, ...]:
        """Index of each thread of a block, by axis."""
        x, y, z = self.threads
        number = np.arange(x * y * z, dtype=np.int32)
        indices = number % x, number // x % y, number // (x * y)
        for index in indices:
            index.flags.writeable = False
        return indices

    def extents(self, frame: Frame) -> tuple[int, ...]:
        return tuple(int(extent(frame)[0]) for _, extent in self.grid)


def specialized(func: Any, world_size: int) -> tirx.PrimFunc:
    """Return ``func`` specialized for ``world_size`` ranks.

    Raises:
        TileWeaveError: ``func`` is not a ``T.prim_func``.
    """
    if not isinstance(func, tirx.PrimFunc):
        raise not_a_program("simulate", func)
    func = with_workspaces(func)
    is_verified = passes.is_chosen(func, "verify")
    stages = [stage for stage in passes.FOR_GROUP if stage != "verify" or is_verified]
    return passes.for_group(func, world_size, _HEAP_STRIDE, stages)


def synchronized(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a specialized program after the passes that complete its synchronization.

    Raises:
        SimulationError: the elements of a tensor or a tile are vectors.
    """
    mod = passes.run("tile", tvm.IRModule({str(func.attrs["global_symbol"]): func}))
    if hasattr(transform, "CanonicalizeLegacyReducer"):  # TileLang 0.1.14 and later
        mod = transform.CanonicalizeLegacyReducer()(mod)
    (func,) = mod.functions.values()
    tiles = [tile for block in nodes_in(func.body, tirx.SBlock) for tile in block.alloc_buffers]
    for buffer in (*func.buffer_map.values(), *tiles):
        loc = line_of_span(buffer.span) or first_line(func.body)
        refuse_vectors(buffer.name, str(buffer.dtype), loc)
    return func


def lowered(func: Any, world_size: int) -> tirx.PrimFunc:
    """Return ``func`` specialized for ``world_size`` ranks, after the tile passes.

    Raises:
        TileWeaveError: ``func`` is not a ``T.prim_func``.
        SimulationError: the elements of a tensor or a tile are vectors.
    """
    return synchronized(specialized(func, world_size))


class Program:
    """``func`` compiled for ``world_size`` ranks.

    Args:
        changed: function to run in place of ``lowered(func, world_size)``.
        operations: objects whose ``register`` adds operations to the compiler.

    Raises:
        TileWeaveError: ``func`` is not a ``T.prim_func``.
        SimulationError: it uses an operation that is not simulated.
    """

    def __init__(
        self, func: Any, world_size: int, changed: tirx.PrimFunc | None = None,
        operations: Iterable[Any] = OPERATIONS,
    ) -> None:  # fmt: skip
        self._specialized = None if changed is not None else specialized(func, world_size)
        func = changed if self._specialized is None else synchronized(self._specialized)
        self._start(func, world_size, Statements(), operations)
        c = self.compiler
        c.calls[RANK] = lambda c, call, loc: Expr(
            lambda frame: frame.env[self.rank_slot], varies=False
        )
        c.calls[CONTEXT] = lambda c, call, loc: Expr(lambda frame: 0)
        self._declare(func, c.new_uniform_slot)
        self._declare_tensors(func)
        self._split(func.body)
        self._finish()

    def _start(
        self, func: tirx.PrimFunc, world_size: int, compiler: Statements, operations: Iterable[Any]
    ) -> None:
        """Note the name and the implicit parameters of ``func``, and prepare its compiler."""
        self.name, self.world_size = str(func.attrs["global_symbol"]), world_size
        self.implicit = implicit_of(func)
        """Implicit parameters, whose tensors live as long as the program."""
        self.compiler: Any = compiler
        compiler.extents = {
            tile.name: tuple(map(int, tile.shape))
            for block in nodes_in(func.body, tirx.SBlock)
            for tile in block.alloc_buffers
        }
        for ops in operations:
            ops.register(compiler)
        self.rank_slot = compiler.new_slot(tirx.Var("rank", "int32"))
        self.scalars: dict[str, tuple[int, np.dtype]] = {}
        """Slot and type of each scalar, by name."""
        self.sizes: dict[int, tuple[str, int]] = {}
        """Tensor and axis that define each dynamic extent, by slot."""
        self.written: set[str] = set()
        """Names of the tensors that the program writes."""
        self.exchanges = _exchanges(func)
        """Text of how blocks may communicate; "" if they do not."""
        self.host: list[Step | Kernel] = []

    def _finish(self) -> None:
        self.slots = len(self.compiler.slots)
        self.multicasts = set(self.compiler.multicasts.values())
        """Names of the tensors that are multicast addresses."""
        self.counted: set[str] = self.compiler.counted
        """Names of the tensors whose words the barriers use."""
        self.has_pointers: bool = self.compiler.has_pointers
        """True if it makes tensors of addresses."""
        self.divide(cut(self.cuts))

    def refusal(self, arch: str) -> LanguageError | None:
        """Return the error of a check of the compiler that needs an architecture, or None."""
        if self._specialized is None:
            return None
        return refusal(self._specialized, tvm.target.Target({"kind": "cuda", "arch": arch}))

    def divide(self, group_of: np.ndarray) -> None:
        """Set the thread groups of the blocks."""
        for kernel in self.kernels:
            own = group_of[: kernel.threads_in_block]
            kernel.mask = Mask(np.ones(kernel.threads_in_block, np.bool_), own)
            kernel.thread_groups = [np.flatnonzero(own == i) for i in range(int(own.max()) + 1)]

    @property
    def kernels(self) -> list[Kernel]:
        return [k for k in self.host if isinstance(k, Kernel)]

    @property
    def cuts(self) -> set[int]:
        """Thread numbers at which conditions divide the threads of a block."""
        return self.compiler.thread_cuts

    @property
    def thread_groups(self) -> int:
        return max((len(k.thread_groups) for k in self.kernels), default=1)

    @property
    def mbarriers(self) -> int:
        """Number of mbarriers of a block."""
        return self.compiler.mbarriers

    def _declare(self, func: tirx.PrimFunc, new_slot: Callable[[tirx.Var], int]) -> None:
        """Note the tensors and scalars of the program."""
        written = written_tensors(func.body)
        for param in func.params:
            if param not in func.buffer_map:
                self.scalars[param.name] = new_slot(param), numpy_dtype(param.dtype)
                continue
            buffer = func.buffer_map[param]
            if buffer.data in written:
                self.written.add(buffer.name)
            for axis, extent in enumerate(buffer.shape):
                if isinstance(extent, tirx.Var):
                    self.sizes[new_slot(extent)] = buffer.name, axis

    def _declare_tensors(self, func: tirx.PrimFunc) -> None:
        c = self.compiler
        calls = [call for call in builtins_in(func.body) if builtin_of(call).multicast]
        multicast = {call.args[0].args[0].buffer.data for call in calls}
        c.symmetric = {tensor.data for tensor in heap_tensors(func)}
        for buffer in func.buffer_map.values():
            (c.multicasts if buffer.data in multicast else c.globals)[buffer.data] = buffer.name
            c.declared[buffer.data] = buffer

    def _split(self, stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                self._split(inner)
        elif isinstance(stmt, tirx.AttrStmt):
            self._split(stmt.body)
        elif isinstance(stmt, tirx.SBlockRealize) and stmt.block.name_hint != "tilelang_root":
            self._split(stmt.block.body)
        elif isinstance(stmt, (tirx.For, tirx.SBlockRealize)):
            self.host.append(self._kernel(stmt))
        else:
            self.host.append(self.compiler.statement(stmt))

    def _kernel(self, stmt: tirx.Stmt) -> Kernel:
        c, grid = self.compiler, []
        while isinstance(stmt, tirx.For) and stmt.thread_binding is not None:
            extent = c.indices([stmt.extent], "the grid", self.name)
            grid.append((c.new_uniform_slot(stmt.loop_var), extent))
            stmt = stmt.body
        if isinstance(stmt, tirx.For):
            raise unsupported("a loop outside a kernel", first_line(stmt) or self.name)
        body = c.statement(stmt, self.name)
        return Kernel(self.name, grid, _threads(stmt), body, c.signals, loc=first_line(stmt))

    def launches(
        self, rank: int, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Any]
    ) -> Iterator[tuple[Kernel, list, tuple[int, ...]]]:
        """Yield kernel, environment and grid extents of each launch of one call of the program.

        Args:
            shapes: shapes of the tensors, including the rank axis.
            scalars: values of the other parameters.
        """
        env: list[Any] = [None] * self.slots
        env[self.rank_slot] = rank
        for slot, (name, axis) in self.sizes.items():
            env[slot] = shapes[name][axis]
        for name, (slot, dtype) in self.scalars.items():
            value = scalars[name]
            if np.issubdtype(dtype, np.integer):
                legal = np.iinfo(dtype)
                if not legal.min <= value <= legal.max:
                    raise TileWeaveError(
                        f"simulate: {name}={value}; expected {legal.min} to {legal.max} ({dtype})"
                    )
            env[slot] = int(value) if str(dtype) in ("int32", "int64") else dtype.type(value)
        frame = Frame(None, None, env)
        for item in self.host:
            if isinstance(item, Kernel):
                yield item, list(env), item.extents(frame)
            else:
                item.run(frame)


def _exchanges(func: tirx.PrimFunc) -> str:
    """Return how blocks of a program may communicate; "" if they do not."""
    accesses = accesses_of(func.body)
    tensors = func.buffer_map.values()
    both = [b.name for b in tensors if b.data in accesses.reads and b.data in accesses.writes]
    names = {op_name(call) for call in nodes_in(func.body, tirx.Call)}
    shared = (name for name in names if "atomic" in name or name == "tl.sync_grid")
    calls = sorted(name.rpartition(".")[2] for name in shared)
    builtins = sorted({builtin_of(call).text for call in builtins_in(func.body)})
    return ", ".join([*(f"{name}, which it reads and writes" for name in both), *calls, *builtins])


def first_line(stmt: tirx.Stmt) -> str:
    """Return the first known line in a statement, because loops around kernels have none."""
    spans = [get_stmt_span(inner) for inner in nodes_in(stmt, tirx.Stmt)]
    lines = [(span.source_name.name, span.line) for span in spans if span is not None]
    return ":".join(map(str, min(lines))) if lines else ""


def _threads(stmt: tirx.Stmt) -> tuple[int, int, int]:
    for block in nodes_in(stmt, tirx.SBlock):
        extents = dict(block.annotations.items()).get("tl.launch_threads")
        if extents is not None:
            x, y, z = map(int, extents)
            return x, y, z
    return 128, 1, 1
