"""Accesses of a program to symmetric tensors, with the loops and conditions around them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tvm import tirx
from tvm.ir import structural_equal
from tvm.tirx.stmt_functor import ir_transform, substitute

from ....builtins.errors import LanguageError
from ....builtins.spec import Builtin, Pointer, builtin_of
from ...ir.operators import is_mark
from ...ir.uniformity import ThreadControl
from ...ir.walk import (
    arrows,
    base_of,
    calls_in,
    children_of,
    format_expr,
    line_of,
    location,
    nodes_in,
    op_name,
    variables_in,
)
from .space import Loop

Kind = Literal["read", "write", "add"]

ADDS = frozenset(
    {"tl.tileop.atomicadd", "tl.atomic_add_elem_op", "tl.atomic_addx2_elem_op",
     "tl.atomic_addx4_elem_op"}
)  # fmt: skip
"""TileLang's operators that add to memory. Additions to one element need no order."""

LANES = {
    "tl.atomic_addx2_elem_op": tirx.IntImm("int32", 2),
    "tl.atomic_addx4_elem_op": tirx.IntImm("int32", 4),
}
"""Number of elements that a vector operator accesses; its pointers name the first element only."""

JUMPS = {
    "tl.loop_break": "T.loop_break",
    "tirx.break_loop": "break",
    "tirx.continue_loop": "continue",
    "tirx.thread_return": "T.thread_return",
}
"""Operators that skip the statements after them, and their names in a program."""


@dataclass(frozen=True, eq=False)
class Jump:
    """A statement that leaves an iteration of ``loop``, or the kernel if ``loop`` is None."""

    name: str
    loop: Loop | None
    location: str

    def may_skip(self, access: Access) -> bool:
        return self.loop is None or self.loop in (*access.loops, *access.inner)


@dataclass(frozen=True, eq=False)
class EnclosingLoop:
    """A loop or block axis around the anchor of an access.

    Attributes:
        stmt: the statement of the loop; None for a block axis.
        num_outer_conditions: number of the ``conditions`` of the access that are outside of it.
        position: position of the loop among the statements around it.
    """

    loop: Loop
    stmt: tirx.For | None
    num_outer_conditions: int
    position: int


@dataclass(frozen=True)
class RaggedRows:
    """Rows of a ragged tensor that an access touches, and what it stores there.

    Attributes:
        stored: number of elements that a write stores in a segment, each time that the block
            reaches ``anchor``; 0 for a read.
        stored_rows: number of rows of these elements.
        axis: the axis of the rows.
        row: an index of a row as the program writes it: the first row that is accessed or, if loops
            around ``anchor`` do not leave its tile, the tile's first row. None if the row is known,
            or all rows are in one tile.
    """

    stored: int
    stored_rows: int
    axis: int
    row: tirx.PrimExpr | None


@dataclass(frozen=True, eq=False)
class Access:
    """One statement or operand of the program that accesses a box of a symmetric tensor.

    Attributes:
        starts, extents: the box; axis 0 is the rank axis.
        enclosing: loops around ``anchor``, block axes first.
        position: position of ``anchor`` among the statements of the innermost of these loops.
        inner: loops and thread axes inside ``anchor`` over which the box extends.
        conditions: conditions that all hold when the access happens.
        anchor: the statement that the whole block reaches. Signals and waits go before or after it.
        branches: number of leading ``conditions`` that come from an ``if`` around ``anchor`` whose
            condition is the same for the whole block.
        node: the part of ``anchor`` that names the first element of the box.
        unknown_count: reason why the number of repetitions is not known, or "".
        ragged: the rows of a ragged tensor, if the box consists of whole rows or tiles of one.
    """

    tensor: tirx.Buffer
    kind: Kind
    op: str
    starts: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]
    enclosing: tuple[EnclosingLoop, ...]
    position: int
    inner: tuple[Loop, ...]
    conditions: tuple[tirx.PrimExpr, ...]
    anchor: tirx.Stmt
    node: tirx.BufferLoad | tirx.BufferStore
    branches: int
    unknown_count: str
    ragged: RaggedRows | None = None

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(enclosing.loop for enclosing in self.enclosing)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Position of each of ``enclosing`` and of ``anchor``, for the order of accesses."""
        return (*(enclosing.position for enclosing in self.enclosing), self.position)

    @property
    def stored(self) -> int:
        """``RaggedRows.stored``, or 0 for an access to a tensor that is not ragged."""
        return self.ragged.stored if self.ragged is not None else 0

    @property
    def first_iteration(self) -> dict[tirx.Var, tirx.PrimExpr]:
        """Values of the variables of ``inner`` in the first iteration."""
        return {loop.var: loop.min for loop in self.inner}

    @property
    def combines(self) -> bool:
        """True for an atomic operation that reads and writes an element, and is no addition."""
        return self.op in ("T.atomic_max", "T.atomic_min", "T.atomic_or")

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are contiguous in memory and never clipped at the end of an axis."""
        return self.op.startswith("W.") and self.ragged is None

    def written_index(self, axis: int) -> tirx.PrimExpr:
        """Return the index that selects the box on an axis, as the program writes it there."""
        if self.ragged is not None and self.ragged.row is not None and axis == self.ragged.axis:
            return self.ragged.row
        return base_of(self.node.indices[axis])

    @property
    def location(self) -> str:
        return location(self.anchor)

    @property
    def line(self) -> str:
        return line_of(self.anchor)

    @property
    def text(self) -> str:
        """``T.copy writes S[dst, row, 0]``, for messages."""
        verb = {"read": "reads", "write": "writes", "add": "adds to"}[self.kind]
        return f"{self.op} {verb} {self.tensor.name}[{', '.join(map(format_expr, self.starts))}]"


@dataclass(frozen=True)
class UnorderedAccess:
    """An access that ``W.unordered`` exempts from synchronization."""

    tensor: str
    line: str
    reason: str


@dataclass
class Program:
    """Accesses and structure of a program, as input for inference and verification.

    Attributes:
        grid: the block axes of the kernel.
        threads: the thread axes of the kernel.
        kernel: the statement of the kernel, with the source line of ``T.Kernel``.
        body: the body of the kernel; statements can be inserted before and after it.
        values: values of the variables that the program binds, and of ``registers``.
        bound_in: for each of these variables, the variables of the loops around its binding.
        registers: variables that represent the value of a T.alloc_var at some place.
        jumps: statements that leave the kernel, or a loop with a known number of iterations.
        unordered: accesses that are not in ``accesses`` because of ``W.unordered``.
        func: the program itself.
        is_shared: whether programs of other sizes may share the kernel. What is inserted then has
            one form: it is not simplified by the sizes.
    """

    accesses: list[Access] = field(default_factory=list)
    unordered: list[UnorderedAccess] = field(default_factory=list)
    grid: list[Loop] = field(default_factory=list)
    threads: list[Loop] = field(default_factory=list)
    kernel: tirx.Stmt | None = None
    body: tirx.Stmt | None = None
    values: dict[tirx.Var, tirx.PrimExpr] = field(default_factory=dict)
    bound_in: dict[tirx.Var, frozenset[tirx.Var]] = field(default_factory=dict)
    registers: set[tirx.Var] = field(default_factory=set)
    jumps: list[Jump] = field(default_factory=list)
    func: tirx.PrimFunc | None = None
    is_shared: bool = False

    def dependencies(self, exprs: Iterable[tirx.PrimExpr]) -> list[tirx.Var]:
        """Return the variables in these expressions, and those in the values of these variables."""
        variables: dict[tirx.Var, None] = {}
        worklist = [*exprs]
        while worklist:
            for variable in variables_in(worklist.pop()):
                if variable not in variables:
                    variables[variable] = None
                    worklist += [self.values[variable]] if variable in self.values else []
        return list(variables)

    def inline_bindings(
        self, expr: tirx.PrimExpr, variables: Container[tirx.Var] | None = None
    ) -> tirx.PrimExpr:
        """Return ``expr`` with the variables that the program binds replaced by their values.

        The index of a thread stays a variable: ``threads`` has its range, its value has none.

        Args:
            variables: replace only these; by default all.
        """
        bound = {
            v: self.values[v]
            for v in variables_in(expr)
            if v in self.values
            and (variables is None or v in variables)
            and op_name(self.values[v]) != "tl.launch_thread_idx"
        }
        return self.inline_bindings(substitute(expr, bound), variables) if bound else expr

    @cached_property
    def thread_control(self) -> ThreadControl:
        """Analysis of the values that may differ between the threads of a block."""
        assert self.func is not None
        return ThreadControl(self.func)


def collect_accesses(func: tirx.PrimFunc, tensors: Iterable[tirx.Buffer]) -> Program:
    """Collect the accesses of ``func`` to ``tensors``.

    Raises:
        LanguageError: a kernel begins after an access, or an access has a wrong number of extents.
    """
    collector = AccessCollector({t.data: t for t in tensors})
    collector.program.func = func
    collector.visit(func.body)
    return collector.program


class AccessCollector:
    """Visit a program in the order of its statements and record its accesses."""

    def __init__(self, tensors: dict[tirx.Var, tirx.Buffer]) -> None:
        self.program = Program()
        self._tensors = tensors
        self._enclosing: list[EnclosingLoop] = []
        self._position = 0
        self._inner: list[Loop] = []
        self._conditions: list[tirx.PrimExpr] = []
        self._anchor: tirx.Stmt | None = None
        self._branches = 0
        self._unknown_count = ""
        self._registers: dict[tirx.Var, tirx.Var] = {}
        """For each T.alloc_var, the variable of ``values`` that is its value at this statement."""
        self._marks: list[tuple[tirx.BufferLoad, str]] = []
        """Elements marked by ``W.unordered`` whose access comes later."""

    @property
    def _loops(self) -> tuple[Loop, ...]:
        """Loops around the current statement, outside and inside its anchor."""
        return (*(enclosing.loop for enclosing in self._enclosing), *self._inner)

    def visit(self, stmt: tirx.Stmt) -> None:
        if self._anchor is None and not isinstance(stmt, tirx.SeqStmt):
            self._position += 1
        if isinstance(stmt, (tirx.SeqStmt, tirx.SBlockRealize, tirx.AttrStmt)):
            if isinstance(stmt, tirx.SBlockRealize) and stmt.block.name_hint == "tilelang_root":
                self.program.body = stmt.block.body
                self._add_threads(stmt.block)
            self._visit_children(stmt)
        elif isinstance(stmt, tirx.For):
            self._visit_anchored(stmt, lambda: self._element_loads(stmt.min, stmt.extent))
            self._visit_loop(stmt)
        elif isinstance(stmt, tirx.IfThenElse):
            self._visit_anchored(stmt, lambda: self._element_loads(stmt.condition))
            self._visit_branch(stmt)
        elif isinstance(stmt, tirx.While):
            outer_reason = self._unknown_count
            self._unknown_count = f"the condition {format_expr(stmt.condition)} of its loop"
            self._visit_anchored(stmt, lambda: self._element_loads(stmt.condition))
            self._forget_registers(stmt)
            self._visit_children(stmt)
            self._forget_registers(stmt)
            self._unknown_count = outer_reason
        else:
            if isinstance(stmt, tirx.Bind):
                self.program.values[stmt.var] = self._resolve(stmt.value)
                self.program.bound_in[stmt.var] = frozenset(loop.var for loop in self._loops)
            self._visit_anchored(stmt, lambda: self._visit_leaf(stmt))
            if isinstance(stmt, tirx.BufferStore) and stmt.buffer.scope() == "local.var":
                value = tirx.Var(stmt.buffer.name, stmt.value.dtype)
                self.program.values[value] = self._resolve(stmt.value)
                self.program.registers.add(value)
                self._registers[stmt.buffer.data] = value

    def _visit_children(self, stmt: tirx.Stmt) -> None:
        for child in children_of(stmt):
            self.visit(child)

    def _visit_anchored(self, stmt: tirx.Stmt, visit) -> None:
        """Call ``visit`` with ``stmt`` as anchor, unless an anchor encloses it."""
        outer = self._anchor
        self._anchor = outer if outer is not None else stmt
        visit()
        self._anchor = outer

    def _visit_loop(self, stmt: tirx.For) -> None:
        loop = Loop(stmt.loop_var, self._resolve(stmt.min), self._resolve(stmt.extent))
        tag = stmt.thread_binding.thread_tag if stmt.thread_binding is not None else ""
        if tag.startswith("blockIdx"):
            if tag == "blockIdx.x":
                self._enter_kernel(stmt)
            self.program.grid.append(loop)
            self._visit_serial_loop(loop, stmt)
            return
        self._forget_registers(stmt)
        parallel = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)
        if self._anchor is not None or stmt.kind in parallel:
            self._inner.append(loop)
            self._visit_anchored(stmt, lambda: self._visit_children(stmt))
            self._inner.pop()
        else:
            self._visit_serial_loop(loop, stmt)
        self._forget_registers(stmt)

    def _enter_kernel(self, stmt: tirx.For) -> None:
        if self.program.accesses:
            first = self.program.accesses[0]
            raise LanguageError(
                f"{first.text}, and a second kernel of the program begins; expected one T.Kernel "
                "in a program that accesses symmetric tensors, or explicit signals and waits"
                f"{arrows([(first.kind, first.line), ('T.Kernel', line_of(stmt))])}"
            )
        self.program.grid, self.program.threads = [], []
        self.program.kernel = stmt

    def _visit_serial_loop(self, loop: Loop, stmt: tirx.For) -> None:
        position, self._position = self._position, 0
        statement = None if loop in self.program.grid else stmt
        self._enclosing.append(EnclosingLoop(loop, statement, len(self._conditions), position))
        self._visit_children(stmt)
        self._enclosing.pop()
        self._position = position

    def _add_threads(self, block: tirx.SBlock) -> None:
        """Record the thread axes of the kernel and their extents."""
        extents = dict(block.annotations.items()).get("tl.launch_threads", (128, 1, 1))
        for var, value in self.program.values.items():
            if op_name(value) == "tl.launch_thread_idx":
                extent = tirx.IntImm("int32", int(extents[int(value.args[0])]))
                self.program.threads.append(Loop(var, tirx.IntImm("int32", 0), extent))

    def _visit_branch(self, stmt: tirx.IfThenElse) -> None:
        condition = self._resolve(stmt.condition)

        def visit() -> None:
            before = dict(self._registers)
            for case, holds in ((stmt.then_case, condition), (stmt.else_case, tirx.Not(condition))):
                if case is not None:
                    self._registers = dict(before)
                    self._conditions.append(holds)
                    self.visit(case)
                    self._conditions.pop()
            self._registers = before
            self._forget_registers(stmt)

        if self._anchor is not None or self._threads_in([condition]):
            self._visit_anchored(stmt, visit)
        else:
            self._branches += 1
            visit()
            self._branches -= 1

    def _forget_registers(self, stmt: tirx.Stmt) -> None:
        """Drop the values of all registers that ``stmt`` stores to."""
        for store in nodes_in(stmt, tirx.BufferStore):
            if store.buffer.scope() == "local.var":
                self._registers.pop(store.buffer.data, None)

    def _resolve(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return ``expr`` with registers replaced by their values."""
        if not self._registers:
            return expr

        def value(node):
            return self._registers.get(node.buffer.data)

        return ir_transform(tirx.Evaluate(expr), None, value, ["tirx.BufferLoad"]).value

    def _visit_leaf(self, stmt: tirx.Stmt) -> None:
        if is_mark(stmt):
            element, reason = stmt.value.args
            self._marks.append((element, reason.value))
            return
        if isinstance(stmt, tirx.BufferStore) and stmt.buffer.data in self._tensors:
            self._add_access("write", "a store", stmt)
        for call in calls_in(stmt, lambda c: True):
            spec, operator = builtin_of(call), op_name(call)
            if operator in JUMPS:
                self._add_jump(JUMPS[operator])
            elif spec is None:
                for argument in call.args:
                    self._add_accesses_of_argument(operator, argument)
            elif spec.moves or spec.announces:
                self._add_moves(call, spec)
        self._element_loads(stmt)

    def _add_accesses_of_argument(self, operator: str, argument) -> None:
        """Record the accesses of one of TileLang's operators to the memory of an argument."""
        is_region = op_name(argument) == "tl.region"
        if not is_region and (
            op_name(argument) != "tl.access_ptr" or operator.startswith("tl.tileop")
        ):
            return
        load, *box = argument.args
        if load.buffer.data not in self._tensors:
            return
        if is_region:
            mode, *extents = box
        else:
            size, mode = box
            extents = _contiguous_extents(load, LANES.get(operator, size))
        for kind in _kinds(operator, int(mode)):
            self._add_access(kind, _text_of(operator), load, extents)

    def _add_jump(self, name: str) -> None:
        """Record a jump that leaves the kernel, or a loop with a known number of iterations."""
        if name == "T.thread_return":
            self.program.jumps.append(Jump(name, None, location(self._anchor)))
        elif self._loops and not self._unknown_count:
            self.program.jumps.append(Jump(name, self._loops[-1], location(self._anchor)))

    def _add_moves(self, call: tirx.Call, spec: Builtin) -> None:
        """Record the accesses of a builtin that moves data or announces rows."""
        adds = spec.combination(call) != "set"
        for (_, kind), pointer in zip(spec.operands, call.args, strict=False):
            if not isinstance(kind, Pointer) or op_name(pointer) != "tl.access_ptr":
                continue
            load = pointer.args[0]
            if load.buffer.data not in self._tensors:
                continue
            size = spec.operand(call, spec.moves) if spec.moves else pointer.args[1]
            written = "w" in kind.access
            effect: Kind = "read" if not written else "add" if adds else "write"
            self._add_access(effect, spec.text, load, _contiguous_extents(load, size))

    def _element_loads(self, *nodes: tirx.Stmt | tirx.PrimExpr) -> None:
        """Record a read of each element that ``nodes`` load.

        Loads that only name the start of a region are skipped. Loads in an arm of
        ``T.if_then_else`` happen under its condition.
        """
        starts: list[tirx.BufferLoad] = []
        loads: list[tirx.BufferLoad] = []
        choices: list[tirx.Call] = []

        def visit(node):
            if op_name(node) == "tirx.if_then_else":
                choices.append(node)
                return node
            if op_name(node) in ("tl.region", "tl.access_ptr"):
                starts.append(node.args[0])
            elif isinstance(node, tirx.BufferLoad) and node.buffer.data in self._tensors:
                loads.append(node)
            return None

        for node in nodes:
            stmt = node if isinstance(node, tirx.Stmt) else tirx.Evaluate(node)
            ir_transform(stmt, visit, None, ["tirx.Call", "tirx.BufferLoad"])
        for load in loads:
            if not any(load.same_as(s) for s in starts):
                self._add_access("read", "a load", load)
        for choice in choices:
            condition, then, other = choice.args
            self._element_loads(condition)
            for arm, holds in ((then, condition), (other, tirx.Not(condition))):
                self._conditions.append(self._resolve(holds))
                self._element_loads(arm)
                self._conditions.pop()

    def _add_access(
        self, kind: Kind, op: str, node: tirx.BufferLoad | tirx.BufferStore,
        extents: Sequence | None = None,
    ) -> None:  # fmt: skip
        """Record an access to the box of ``extents`` from ``node`` on, by default one element."""
        buffer, starts = node.buffer, node.indices
        if extents is None:
            extents = [tirx.IntImm("int32", 1)] * len(starts)
        if len(extents) != len(buffer.shape):
            raise LanguageError(
                f"{op}: accesses {buffer.name} through {len(extents)} extents; expected "
                f"{len(buffer.shape)}{location(self._anchor)}"
            )
        if self._is_unordered(op, buffer, starts):
            return
        used = self._threads_in([*starts, *self._conditions])
        access = Access(
            tensor=self._tensors[buffer.data],
            kind=kind,
            op=op,
            starts=tuple(self._resolve(base_of(i)) for i in starts),
            extents=tuple(_vector_extent(i, e) for i, e in zip(starts, extents, strict=True)),
            enclosing=tuple(self._enclosing),
            position=self._position,
            inner=(*self._inner, *used),
            conditions=tuple(self._conditions),
            anchor=self._anchor,
            node=node,
            branches=self._branches,
            unknown_count=self._unknown_count,
        )
        self.program.accesses.append(access)

    def _is_unordered(self, op: str, buffer: tirx.Buffer, starts) -> bool:
        axes = slice(op.startswith("W."), None)  # builtins may take the rank from ``peer``
        for number, (element, reason) in enumerate(self._marks):
            if element.buffer.data.same_as(buffer.data) and all(
                structural_equal(base_of(a), base_of(b))
                for a, b in list(zip(element.indices, starts, strict=True))[axes]
            ):
                del self._marks[number]
                mark = UnorderedAccess(buffer.name, line_of(self._anchor), reason)
                self.program.unordered.append(mark)
                return True
        return False

    def _threads_in(self, exprs: Iterable[tirx.PrimExpr]) -> list[Loop]:
        """Return the thread axes that the expressions depend on."""
        variables = set(self.program.dependencies(exprs))
        return [t for t in self.program.threads if t.var in variables]


def _kinds(op: str, mode: int) -> list[Kind]:
    if op in ADDS and mode & 2:
        return ["add"]
    return [kind for kind, bit in (("read", 1), ("write", 2)) if mode & bit]  # type: ignore[misc]


def _vector_extent(index: tirx.PrimExpr, extent: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.IntImm("int32", int(index.lanes)) if isinstance(index, tirx.Ramp) else extent


def _contiguous_extents(load: tirx.BufferLoad, size: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    """Return the extents of the box of ``size`` contiguous elements from ``load`` on.

    The box is a part of a row, or whole rows.
    """
    one = tirx.IntImm("int32", 1)
    extents: list[tirx.PrimExpr] = [one] * len(load.indices)
    if not isinstance(size, tirx.IntImm):
        extents[-1] = size
        return extents
    remaining = int(size)
    for axis in reversed(range(len(load.indices))):
        extent = load.buffer.shape[axis]
        is_whole = isinstance(extent, tirx.IntImm) and remaining >= int(extent)
        if not is_whole or remaining % int(extent):
            extents[axis] = tirx.IntImm("int32", remaining)
            break
        extents[axis] = extent
        remaining //= int(extent)
    return extents


def _text_of(operator: str) -> str:
    """Return an operator of TileLang as a program names it: ``T.atomic_max``."""
    name = operator.split(".")[-1].removesuffix("_elem_op").removesuffix("_ret")
    return f"T.{re.sub(r'^atomic(?=[a-z])', 'atomic_', name)}"
