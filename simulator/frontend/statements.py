"""Compiler of IR statements to steps over a frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import DataType, tirx

from ...builtins.spec import builtin_of
from ...passes.ir.accesses import READS, touches_in
from ...passes.ir.block_barrier import SYNC_THREADS, is_sync_threads
from ...passes.ir.pipelined_loops import is_pipelined
from ...passes.ir.thread_sets import disjoint
from ...passes.ir.walk import (
    MBARRIER_WAIT,
    has_effect,
    is_parallel,
    line_of,
    nodes_in,
    op_name,
    uses_op,
    variables_in,
)
from ..machine.block import Frame, MBarrier, Tile
from ..machine.steps import (
    SPIN,
    Meeting,
    Step,
    before_barrier,
    each,
    end_iteration,
    go,
    scope_of_exits,
    sequence,
    together,
)
from ..memory.values import numpy_dtype
from ..report.errors import SimulationError, uninitialized, unsupported
from .accesses import is_poisoned, load_tile, store_global, store_tile, uniform
from .executors import executors_of
from .expressions import Expr, Expressions, narrowed
from .numbers import literals_in

_ACCESSES = tirx.BufferLoad, tirx.BufferStore
_MAX_ITERATIONS = 1_000_000
"""Iterations after which a while loop is reported as a deadlock."""


THREAD_AXES = {"threadIdx.x": 0, "threadIdx.y": 1, "threadIdx.z": 2}
"""Axis of each thread index."""
StepOf = Callable[[Any, tirx.Call, str], Step]
"""Compiles a call that is a statement; otherwise as ``ValueOf``."""


RowsOfThreads = Callable[[Frame, np.ndarray], tuple[np.ndarray, np.ndarray | None]]
"""Loads a row of 8 16-bit words by each of some threads; returns them and their poison mask."""


class Statements(Expressions):
    """Compiler of the statements of one program."""

    widens = True
    """True if atomics of TileLang on symmetric tensors have system scope, which ``make_coherent``
    gives them later."""

    guards = True
    """True if accesses of global memory have no guards yet, which TileLang gives them later."""

    def __init__(self) -> None:
        super().__init__()
        self.symmetric: set[tirx.Var] = set()
        """Data pointers of the symmetric tensors."""
        self.pipelined = False
        """True in a pipelined loop."""
        self.barriers: dict[tirx.Var, int] = {}
        self.mbarriers = 0
        self.has_pointers = False
        """True if the program makes tensors of addresses."""
        self.loop: str | None = None
        """Kind of the innermost loop: ``loop`` or ``T.Parallel``."""
        self.reducers: dict[tirx.Var, str] = {}
        """Reduction of each reducer."""
        self.counted: set[str] = set()
        """Names of the tensors whose words barriers use."""
        self.steps: dict[str, StepOf] = {}
        """Compilers of calls that are statements, by operator."""
        self.thread_cuts: set[int] = {0, 1}
        """Thread numbers at which conditions divide the threads of a block."""
        self.thread_slots: dict[tirx.Var, int] = {}
        """Axis of each thread index."""
        self.reducer: tirx.CommReducer | None = None
        """Combiner of the enclosing reduction of threads."""
        self.polls: list[Callable[[Frame], Iterator[Any]]] = []
        """Polls in the expressions of the current statement, which precede it."""

    def shared_atomic(self, kind: str, lanes: int, call: tirx.Call, loc: str) -> Expr | None:
        """Compile an atomic operation in shared memory with addresses; None: it is elsewhere."""
        return None

    def statement(self, stmt: tirx.Stmt, loc: str = "") -> Step:
        loc = line_of(stmt) or loc
        if self.polls:
            raise unsupported("a poll in the condition or the range of another statement", loc)
        handler = getattr(self, f"_on_{type(stmt).__name__}", None)
        if handler is None:
            raise unsupported(f"statement {type(stmt).__name__}", loc)
        step = handler(stmt, loc)
        if self.pipelined and isinstance(stmt, tirx.IfThenElse | tirx.For):
            step = self._after_loads(stmt, step)
        return self.observe(stmt, step, loc)

    def observe(self, stmt: tirx.Stmt, step: Step, loc: str) -> Step:
        """Return the step of a statement. A debugger replaces it."""
        return step

    def _after_loads(self, stmt: tirx.Stmt, step: Step) -> Step:
        """Return a step that first waits for the loads of the tiles that ``stmt`` reads. TileLang
        waits for them even if the branch or loop that reads a tile does not run."""
        read = [buffer for _, buffer, mode in touches_in(stmt) if mode & READS]
        tiles = self._slots_of_shared(read)
        if not tiles:
            return step

        def wait(frame: Frame):
            for slot in tiles:
                frame.block.await_load(frame.tile(slot), frame.mask.overlapping)

        return sequence([Step(wait), step])

    def pointee(self, node: Any, loc: str) -> tuple[tirx.Buffer, list[Any]]:
        """Return the buffer and the indices of the element that a pointer operand points to."""
        load = node.args[0]
        return load.buffer, list(load.indices)

    def rows_of_matrices(self, node: Any, op: str, loc: str) -> RowsOfThreads:
        """Compile the loads of rows of 16 bytes at a pointer of each thread to shared memory."""
        buffer, indices = self.pointee(node, loc)
        slot = self.tiles.get(buffer.data)
        if slot is None or not buffer.scope().startswith("shared"):
            raise unsupported(f"{op} of {buffer.name} in {self.memory_of(buffer)} memory", loc)
        values = self.in_whole(buffer, self.indices(indices, buffer.name, loc), loc)

        def load(frame: Frame, threads: np.ndarray):
            tile, lanes = frame.tile(slot), frame.mask.on.shape
            index = [np.broadcast_to(i, lanes)[:, None] for i in values(frame)]
            index[-1] = index[-1] + np.arange(16 // tile.dtype.itemsize)
            loaded, bad = load_tile(frame, tile, index, loc)
            if bad is not None:
                bad = bad[threads].reshape(len(threads), 8, -1).any(axis=-1)
            return np.ascontiguousarray(loaded[threads]).view(np.uint16), bad

        return load

    def mbarrier(self, load: Any, loc: str) -> Callable[[Frame], Any]:
        """Return a function from a frame to the mbarrier that a BufferLoad names."""
        if not isinstance(load, tirx.BufferLoad) or load.buffer.data not in self.barriers:
            raise unsupported(f"mbarrier {load}", loc)
        slot = self.barriers[load.buffer.data]
        index = self.indices(load.indices, load.buffer.name, loc)

        def barrier(frame: Frame):
            number = index(frame)[0]
            if isinstance(number, np.ndarray):
                number = number[frame.mask.threads[0]]
            return frame.block.barriers[slot][int(number)]

        return barrier

    def is_shared_between_blocks(self, *nodes: Any) -> bool:
        """Return whether these nodes access global memory."""
        return any(
            access.buffer.data in self.globals or access.buffer.data in self.multicasts
            for node in nodes
            for access in nodes_in(node, tirx.BufferLoad, tirx.BufferStore)
        )

    def preempted(self, run: Callable[[Frame], Any], *nodes: Any) -> Step:
        """Return a step before which other blocks may run, if these nodes access global memory, and
        which the polls in their expressions precede."""
        run = _noting(run, nodes)
        if self.polls:
            polls, self.polls = self.polls, []

            def after_polls(frame: Frame):
                for poll in polls:
                    yield from poll(frame)
                run(frame)

            return Step(after_polls, True)
        if not self.is_shared_between_blocks(*nodes):
            return Step(run)

        def step(frame: Frame):
            yield None
            run(frame)

        return Step(step, True)

    def _on_SeqStmt(self, stmt, loc: str) -> Step:
        return sequence(self._sequence(stmt.seq, loc))

    def _sequence(self, stmts: Any, loc: str) -> list[Step]:
        """Compile consecutive statements.

        Branches of different threads (``with T.ws``) run interleaved, so that one does not wait
        for another that only precedes it in the text. So do the statements between them if threads
        of a branch may wait for others.
        """
        steps: list[Step] = []
        branch: int | None = None  # position of the last branch, if no loop follows it
        at = 0
        while at < len(stmts):
            stmt, end = stmts[at], at
            while end < len(stmts) and self._is_branch_of_threads(stmts[end]):
                end += 1
            if any(map(_may_wait, stmts[at:end])):
                end = 1 + max(n for n, s in enumerate(stmts) if self._is_branch_of_threads(s))
            if is_sync_threads(stmt):
                # At the tile level, one without a line is a part of a builtin, which is named.
                if branch is not None and (line_of(stmt) or not self.guards):
                    steps[branch] = before_barrier(steps[branch], _barrier(stmts[at:]))
                branch = None
            elif isinstance(stmt, tirx.IfThenElse):
                branch = len(steps)
            elif isinstance(stmt, tirx.For | tirx.While):
                branch = None
            if end > at + 1:
                steps += self._interleaved(stmts[at:end], loc)
            else:
                end = at + 1
                steps.append(self.statement(stmt, loc))
            at = end
        return steps

    def _is_branch_of_threads(self, stmt: tirx.Stmt) -> bool:
        """Return whether a statement is one case, and the thread decides about it."""
        is_case = isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None
        return is_case and self._is_of_threads(stmt.condition)

    def _interleaved(self, stmts: Any, loc: str) -> list[Step]:
        """Compile branches of threads, and the statements between them. Parts of the threads that
        share no branch run interleaved.

        A part executes a statement between the branches on its own, or together with the others.
        """
        steps, branches = [], {}
        for number, stmt in enumerate(stmts):
            steps.append(self.statement(stmt, loc))
            if self._is_branch_of_threads(stmt):
                branches[number] = self.compile(stmt.condition, loc).value
        if not any(step.waits for step in steps):
            return steps
        between = [number for number in range(len(stmts)) if number not in branches]
        versions = {n: self._versions(stmts[n], steps[n], 1 + len(branches), loc) for n in between}
        lines = [line_of(stmt) or loc for stmt in stmts]

        def wait(frame: Frame):
            shape = frame.mask.on.shape
            parts = disjoint((np.broadcast_to(c(frame), shape), n) for n, c in branches.items())
            if frame.space is not None or len(parts) == 1:
                yield from go(sequence(steps), frame)
                return
            if between:
                parts.append((~np.logical_or.reduce([threads for threads, _ in parts]), []))
            masks = [(frame.mask.where(threads), own) for threads, own in parts]
            forks = [(frame.fork(mask), own) for mask, own in masks if mask.count]
            remaining = [fork for fork, _ in forks]

            def of_all(number: int) -> Step:
                step = steps[number]
                if _is_computed(stmts[number]):
                    return Step(lambda _: step.run(frame))
                needs_all = uses_op(stmts[number], SYNC_THREADS)
                meeting = Meeting(step, frame, remaining, needs_all, lines[number])
                return Step(meeting.run, True)

            chosen = {n: version or [of_all(n)] * len(forks) for n, version in versions.items()}
            running = []
            for number, (fork, own) in enumerate(forks):
                mine = {n: chosen[n][number] for n in between} | {n: steps[n] for n in own}
                running.append((_until_end([mine[n] for n in sorted(mine)], remaining), fork))
            yield from together(running, frame)

        return [Step(wait, True)]

    def _versions(self, stmt: tirx.Stmt, step: Step, count: int, loc: str) -> list[Step]:
        """Return ``count`` steps for parts of the threads that execute a statement on their own;
        none if they execute it together. Each has variables of its own."""
        if not self.is_of_each_thread(stmt):
            return []
        variables = [loop.loop_var for loop in nodes_in(stmt, tirx.For)]
        variables += [bind.var for bind in nodes_in(stmt, tirx.Bind)]
        if not variables:
            return [step] * count
        steps = []
        for _ in range(count):
            for var in filter(self.slots.__contains__, variables):
                self.slots[tirx.Var(var.name, var.dtype)] = self.slots.pop(var)
            steps.append(self.statement(stmt, loc))
        return steps

    def is_of_each_thread(self, stmt: tirx.Stmt) -> bool:
        """Return whether each thread executes a statement on its own, which needs no others."""
        calls = nodes_in(stmt, tirx.Call)
        levels = {spec.level for spec in map(builtin_of, calls) if spec is not None}
        names = {op_name(call) for call in calls}
        return (
            levels <= {"thread"}
            and not nodes_in(stmt, tirx.SBlock)
            and not any(map(is_parallel, nodes_in(stmt, tirx.For)))
            and not any(name.startswith("tl.tileop.") or name == SYNC_THREADS for name in names)
            and not isinstance(stmt, tirx.Bind)
        )

    def _is_of_threads(self, expr: tirx.PrimExpr) -> bool:
        """Return whether a condition depends on the thread only."""
        inputs = nodes_in(expr, tirx.Var, tirx.BufferLoad, tirx.Call)
        return bool(inputs) and all(node in self.thread_slots for node in inputs)

    def _on_Evaluate(self, stmt, loc: str) -> Step:
        call = stmt.value
        if not isinstance(call, tirx.Call):
            return Step(lambda frame: None)
        name = getattr(call.op, "name", str(call.op))
        if name in self.steps:
            return self.steps[name](self, call, loc)
        value = self.compile(call, loc).value
        return self.preempted(value, call)

    def _on_Bind(self, stmt, loc: str) -> Step:
        name = getattr(getattr(stmt.value, "op", None), "name", "")
        if name == "tl.launch_thread_idx":
            return self._bind_thread(stmt.var, int(stmt.value.args[0]))
        if name == "tirx.reinterpret" and str(stmt.var.dtype) == "handle":
            return self._bind_pointer(stmt.var, stmt.value.args[0], loc)
        if str(stmt.var.dtype) == "handle":
            return Step(lambda frame: None)
        if self._mentions_later(stmt.value):
            self.pending[stmt.var] = stmt.value
            return Step(lambda frame: None)
        expr, slot = self.compile(stmt.value, loc), self.new_slot(stmt.var)
        if not expr.varies:
            self.uniform.add(stmt.var)
        if expr.poison is None:
            self.sound.add(stmt.var)
        is_plain = not expr.varies and expr.poison is None
        bind = self._bind_uniform(expr, slot) if is_plain else self._bind(expr, slot, stmt.var)
        return self.preempted(bind, stmt.value)

    def _bind_pointer(self, var: tirx.Var, address: tirx.PrimExpr, loc: str) -> Step:
        """Compile a binding of a pointer to the tensor at an address (T.make_tensor)."""
        kind = var.type_annotation.element_type.dtype
        name, dtype = f"*{var.name}", numpy_dtype(kind)
        while name in self.globals.values():
            name = f"*{name}"
        self.globals[var] = name
        self.declared[var] = tirx.decl_buffer((1,), kind, name)  # all others are views of it
        self.has_pointers = True
        addresses = self.indices([address], name, loc)

        def run(frame: Frame):
            block, at = frame.block, uniform(addresses(frame)[0], frame, loc)
            tensor = block.machine.pointed.at(at, name, dtype)
            if tensor is None:
                raise SimulationError(
                    "bounds",
                    f"{name} at the address {at:#x}, by {block.place}; expected that of a CPU "
                    f"tensor of torch\n --> {loc}",
                )
            block.tensors = {**block.tensors, name: tensor}

        return self.preempted(run, address)

    @staticmethod
    def _bind_uniform(expr: Expr, slot: int) -> Callable[[Frame], None]:
        value = expr.value

        def run(frame: Frame):
            frame.env[slot] = value(frame)

        return run

    @staticmethod
    def _bind(expr: Expr, slot: int, var: tirx.Var) -> Callable[[Frame], None]:
        # The vector of one thread has an axis, too.
        axes = int(DataType(str(var.dtype)).lanes > 1)

        def run(frame: Frame):
            value = expr.value(frame)
            block = frame.block
            frame.env[slot] = value
            if block is not None:
                is_array = isinstance(value, np.ndarray) and value.ndim > axes
                block.by_thread[slot] = frame.space is None and is_array
                if frame.operands is not None:
                    block.operands[slot] = frame.operands
                block.poisoned[slot] = expr.poison(frame) if expr.poison else None
                if block.poisoned[slot] is not None:
                    block.explanations[slot] = block.machine.memory.unwritten

        return run

    def _mentions_later(self, expr) -> bool:
        return any(
            str(v.dtype) != "handle" and v not in self.slots and v not in self.pending
            for v in variables_in(expr)
        )

    def _bind_thread(self, var: tirx.Var, axis: int) -> Step:
        slot = self.new_slot(var)
        self.thread_slots[var] = axis
        self.sound.add(var)

        def run(frame: Frame):
            frame.env[slot] = frame.block.kernel.thread_indices[axis]
            frame.block.by_thread[slot] = True

        return Step(run)

    def _on_BufferStore(self, stmt, loc: str) -> Step:
        buffer = stmt.buffer
        index = self.indices(stmt.indices, buffer.name, loc)
        expr = self.compile(stmt.value, loc)
        value, poison = expr.value, expr.poison or (lambda frame: None)
        read = self._shared_tiles(stmt.value)
        if buffer.data in self.globals:
            ref = self.guarded(buffer, stmt.indices, "store", loc)
            index = self.in_whole(buffer, index, loc)

            def run(frame: Frame):
                frame.block.barrier_before(read)
                indices, stored = index(frame), value(frame)
                store_global(frame, ref, indices, stored, poison(frame))
        elif buffer.data in self.tiles:
            slot = self.tiles[buffer.data]
            index = self.in_whole(buffer, index, loc)

            def run(frame: Frame):
                indices, stored = index(frame), value(frame)
                frame.block.note_store(slot, frame.mask.overlapping, loc)
                store_tile(frame, frame.tile(slot), indices, stored, poison(frame), loc)
        else:
            raise unsupported(f"store to {buffer.name} in {self.memory_of(buffer)} memory", loc)
        return self.preempted(run, stmt)

    def _shared_tiles(self, node: Any) -> list[int]:
        """Return the tiles in shared memory with elements that a node names."""
        return self._slots_of_shared(load.buffer for load in nodes_in(node, tirx.BufferLoad))

    def _slots_of_shared(self, buffers: Iterable[tirx.Buffer]) -> list[int]:
        """Return the slots of the tiles in shared memory among ``buffers``."""
        data = [buffer.data for buffer in buffers if buffer.scope().startswith("shared")]
        return list(dict.fromkeys(self.tiles[d] for d in data if d in self.tiles))

    def _on_AttrStmt(self, stmt, loc: str) -> Step:
        if stmt.attr_key == "reduce_scope":
            self.reducer = stmt.node
        return self.statement(stmt.body, loc)

    def _on_SBlockRealize(self, stmt, loc: str) -> Step:
        block = stmt.block
        allocations: list[tuple[int, tuple[str, tuple, np.dtype, str]]] = []
        divided = _divided_in(block)
        for buffer in block.alloc_buffers:
            scope = buffer.scope()
            if scope == "local.fragment" and buffer.data not in divided:
                scope = "local"
            if scope == "shared.barrier":
                self.barriers.setdefault(buffer.data, len(self.barriers))
                continue
            slot = self.tiles.setdefault(buffer.data, len(self.tiles))
            shape = tuple(int(n) for n in buffer.shape)
            self.made[slot] = shape, numpy_dtype(buffer.dtype)
            allocations.append((slot, (buffer.name, shape, numpy_dtype(buffer.dtype), scope)))
        for data, info in dict(block.annotations.items()).get("reducer_info_v2", {}).items():
            self.reducers[data] = str(info["op"])
        mbarriers: list[tuple[int, list[tuple[int, str, int]]]] = []
        for data, counts in dict(block.annotations.items()).get("barrier_init", {}).items():
            first = self.mbarriers + 1
            numbered = [(first + i, f"{data.name}[{i}]", int(n)) for i, n in enumerate(counts)]
            self.mbarriers += len(numbered)
            mbarriers.append((self.barriers.setdefault(data, len(self.barriers)), numbered))
        body = self.statement(block.body, loc)

        def prepare(frame: Frame):
            for slot, arguments in allocations:
                frame.block.tiles[slot] = Tile(*arguments)
            for slot, numbered in mbarriers:
                frame.block.barriers[slot] = [MBarrier(*arguments) for arguments in numbered]

        return sequence([Step(prepare), body])

    def _on_For(self, stmt, loc: str) -> Step:
        if stmt.kind == tirx.ForKind.PARALLEL:
            return self._parallel(stmt, loc)
        if stmt.kind == tirx.ForKind.THREAD_BINDING:
            return self._thread_binding(stmt, loc)
        slot = self.new_slot(stmt.loop_var)
        bounds = stmt.min, stmt.extent, stmt.step or tirx.IntImm("int32", 1)
        first, extent, step = (self.indices([e], "a loop", loc) for e in bounds)
        if not any(self.compile(e, loc).varies for e in bounds):
            self.uniform.add(stmt.loop_var)
        self.sound.add(stmt.loop_var)
        was_pipelined, self.pipelined = self.pipelined, self.pipelined or is_pipelined(stmt)
        body = self._body_of_loop(stmt.body, "loop", loc)
        self.pipelined = was_pipelined

        def iterations(frame: Frame) -> Iterator[Step]:
            with scope_of_exits(frame):
                start, count, stride = (_plain(f(frame)[0], frame) for f in (first, extent, step))
                diverges = any(isinstance(v, np.ndarray) for v in (start, count, stride))
                lanes = frame.shape
                frame.block.by_thread[slot] = diverges and frame.space is None
                for iteration in range(int(np.max(count))):
                    value = start + iteration * stride
                    if diverges:
                        if not frame.narrow(iteration < count):
                            break
                        value = np.broadcast_to(value, lanes)
                    frame.env[slot] = value
                    mask, active = frame.mask, frame.active
                    yield body
                    if not end_iteration(frame, mask, active):
                        break
                frame.block.by_thread[slot] = False

        return each(iterations, body.waits)

    def _thread_binding(self, stmt, loc: str) -> Step:
        """Compile a loop whose iterations are the threads of the block."""
        tag, extent = stmt.thread_binding.thread_tag, self.constant(stmt.extent)
        if tag not in THREAD_AXES:
            raise unsupported(f"thread binding {tag} here", loc)
        axis = THREAD_AXES[tag]

        def check(frame: Frame):
            threads = frame.block.kernel.threads[axis]
            if threads != extent:
                raise unsupported(f"a binding of {extent} threads of {tag} in {threads}", loc)

        bind = self._bind_thread(stmt.loop_var, axis)
        return sequence([Step(check), bind, self.statement(stmt.body, loc)])

    def _parallel(self, stmt, loc: str) -> Step:
        loops, inner = [], stmt
        while isinstance(inner, tirx.For) and inner.kind == tirx.ForKind.PARALLEL:
            slot = self.new_uniform_slot(inner.loop_var)
            extent = self.indices([inner.extent], "T.Parallel", loc)
            first = self.indices([inner.min], "T.Parallel", loc)
            loops.append((slot, first, extent))
            inner = inner.body
        body = self._body_of_loop(inner, "T.Parallel", loc)
        executors = executors_of(self, stmt, inner, loc)
        read = self._shared_tiles(inner)

        def enter(frame: Frame):
            """Enter the T.Parallel. Return whether it has points."""
            if frame.space is not None:
                raise unsupported("T.Parallel inside a T.Parallel with statements between", loc)
            frame.block.barrier_before(read)
            sizes = [int(extent(frame)[0]) for _, _, extent in loops]
            frame.ranges = {}
            for axis, (slot, first, _) in enumerate(loops):
                low = int(first(frame)[0])
                values = _points(low, sizes[axis], axis, len(sizes))
                frame.env[slot] = values
                frame.block.by_thread[slot] = False
                frame.ranges[id(values)] = axis, slice(low, low + sizes[axis])
            frame.space = tuple(sizes)
            frame.loop, frame.loop_points = executors(frame)
            return 0 not in sizes

        def inside(frame: Frame) -> Iterator[Step]:
            with scope_of_exits(frame):
                if enter(frame):
                    yield body
                frame.leave_space()

        step = each(inside, body.waits)
        return step if body.waits else self.preempted(step.run, stmt)

    def _on_While(self, stmt, loc: str) -> Step:
        condition = self.condition(stmt.condition, loc)
        body = self._body_of_loop(stmt.body, "loop", loc)
        polls = self.is_shared_between_blocks(stmt)

        def wait(frame: Frame):
            polled, frame.polls = frame.polls, True
            with scope_of_exits(frame):
                for _ in range(_MAX_ITERATIONS):
                    if polls:
                        yield SPIN
                    chosen = condition(frame)
                    if isinstance(chosen, np.ndarray):
                        chosen = frame.narrow(chosen)
                    if not chosen:
                        break
                    mask, active = frame.mask, frame.active
                    yield from go(body, frame)
                    if not end_iteration(frame, mask, active):
                        break
                else:
                    raise SimulationError(
                        "deadlock",
                        f"a loop does not end after {_MAX_ITERATIONS} iterations in "
                        f"{frame.block.name()}\n --> {loc}",
                    )
            frame.polls = polled

        return Step(wait, True)

    def _body_of_loop(self, stmt: tirx.Stmt, loop: str, loc: str) -> Step:
        """Compile the body of a loop, which ``break`` and ``continue`` leave."""
        outer, self.loop = self.loop, loop
        body = self.statement(stmt, loc)
        self.loop = outer
        return body

    def condition(self, expr: tirx.PrimExpr, loc: str) -> Callable[[Frame], Any]:
        """Compile a condition, which must not be poison."""
        self._note_cuts(expr)
        compiled = self.compile(expr, loc)

        if compiled.poison is None:
            return self._once_per_mask(compiled) if self._is_of_threads(expr) else compiled.value

        def value(frame: Frame):
            chosen = compiled.value(frame)
            if is_poisoned(compiled.poison(frame), frame):
                raise uninitialized("a condition is computed from", frame.block, loc)
            return chosen

        return value

    def _once_per_mask(self, expr: Expr) -> Callable[[Frame], Any]:
        """Evaluate a condition on the thread once for each mask."""
        node = self.node()

        def value(frame: Frame):
            known, key = frame.mask.conditions, (node, frame.space is None)
            if key not in known:
                known[key] = expr.value(frame)
            return known[key]

        return value

    def _note_cuts(self, expr: tirx.PrimExpr) -> None:
        for node in nodes_in(expr, tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE):
            a, b = (node.a, node.b) if isinstance(node.b, tirx.IntImm) else (node.b, node.a)
            if a in self.thread_slots and isinstance(b, tirx.IntImm):
                self.thread_cuts.update((int(b), int(b) + 1))

    def _on_IfThenElse(self, stmt, loc: str) -> Step:
        condition = self.condition(stmt.condition, loc)
        then_case = self.statement(stmt.then_case, loc)
        else_case = self.statement(stmt.else_case, loc) if stmt.else_case is not None else None
        is_shared = self.is_shared_between_blocks(stmt.condition)
        waits = is_shared or then_case.waits or (else_case is not None and else_case.waits)

        def cases(frame: Frame) -> Iterator[Step]:
            chosen = condition(frame)
            if not isinstance(chosen, np.ndarray):
                if (case := then_case if chosen else else_case) is not None:
                    yield case
                return
            parts = [(then_case, chosen), (else_case, ~chosen)]
            if frame.space is None:
                masks = [(case, frame.mask.where(mask)) for case, mask in parts]
                masks = [(case, mask) for case, mask in masks if mask.count]
                if len(masks) == 1:
                    yield from (case for case, _ in masks if case is not None)
                    return
                if waits:
                    forks = [(case, frame.fork(m)) for case, m in masks if case is not None]
                    yield Step(lambda frame: together(forks, frame), True)
                    return
                parts = [(case, mask.on) for case, mask in masks]
            for case, mask in parts:
                if case is not None:
                    with narrowed(frame, mask):
                        yield case

        step = each(cases, waits)
        return sequence([Step(_pause, True), step]) if is_shared else step


def _noting(run: Callable[[Frame], Any], nodes: Iterable[Any]) -> Callable[[Frame], Any]:
    """Return a statement that notes its operands, if numbers are checked."""
    literals = literals_in(*nodes)

    def noting(frame: Frame):
        if frame.block is None or not frame.block.machine.nan:
            return run(frame)
        frame.operands = list(literals)
        run(frame)
        frame.operands = None

    return noting


def _divided_in(block: tirx.SBlock) -> set[tirx.Var]:
    """Return the fragments that TileLang divides among threads: those of operations on tiles, of
    T.Parallel, and with a layout. Each thread has its own copy of the others."""
    operations = nodes_in(block.body, tirx.For, tirx.Call)
    divided = set(block.annotations.get("layout_map", {}))
    for node in operations:
        if is_parallel(node) or op_name(node).startswith("tl.tileop."):
            divided.update(access.buffer.data for access in nodes_in(node, *_ACCESSES))
    return divided


def nothing(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile an operation that has no effect in the simulator."""
    return Step(lambda frame: None)


@lru_cache
def _points(first: int, count: int, axis: int, axes: int) -> np.ndarray:
    """Return the values of a variable of T.Parallel, along its axis of the space."""
    values = np.arange(count, dtype=np.int32) + first
    values.flags.writeable = False
    return values.reshape([count if a == axis else 1 for a in range(axes)])


def _barrier(stmts: Any) -> str:
    """Return the place of the barrier that is the first of these statements. TileLang inserts
    barriers without a line."""
    if line := line_of(stmts[0]):
        return f"barrier --> {line}"
    nodes = (n for stmt in stmts[1:] for n in nodes_in(stmt, tirx.BufferStore, tirx.Evaluate))
    line = next(filter(None, map(line_of, nodes)), None)
    return f"barrier before --> {line}" if line else "next barrier"


def _may_wait(stmt: tirx.Stmt) -> bool:
    """Return whether threads may wait in a statement for others of the block: at an mbarrier, or at
    a barrier with a number."""
    return any(
        op_name(call) == MBARRIER_WAIT or (op_name(call) == SYNC_THREADS and len(call.args) > 1)
        for call in nodes_in(stmt, tirx.Call)
    )


def _is_computed(stmt: tirx.Stmt) -> bool:
    """Return whether a statement only computes a value, which depends on no memory."""
    if not isinstance(stmt, tirx.Bind) or nodes_in(stmt.value, tirx.BufferLoad):
        return False
    return not any(map(has_effect, nodes_in(stmt.value, tirx.Call)))


def _until_end(steps: list[Step], remaining: list[Frame]) -> Step:
    """Return a step that runs ``steps``, and then removes its frame from ``remaining``."""

    def run(frame: Frame):
        yield from go(sequence(steps), frame)
        remaining.remove(frame)

    return Step(run, True)


def _pause(frame: Frame) -> Iterator[None]:
    """Let other blocks run."""
    yield None


def _plain(value: Any, frame: Frame) -> Any:
    """Return a Python integer if all active lanes agree, else the value of each lane."""
    if not isinstance(value, np.ndarray):
        return int(value)
    lanes, active = frame.on, value
    if lanes.any():
        active = np.broadcast_to(value, lanes.shape)[lanes]
    return int(active.flat[0]) if (active == active.flat[0]).all() else value
