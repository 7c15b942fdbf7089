"""Record the events of a kernel: its blocks, pipelined loops, waits, signals and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tilelang import tvm
from tvm import IRModule, tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from ...builtins.debug import globaltimer
from ...builtins.memory import ld
from ...builtins.spec import ElementOf, Pointer, builtin_of, declaration_of
from ..ir.events import RECORD, Event, encode_events, record_call
from ..ir.host import BEGIN_LAUNCH
from ..ir.marks import NumberedCall, calls_of, mark_of
from ..ir.memory_order import releases
from ..ir.pipelined_loops import is_pipelined
from ..ir.thread_sets import Block, ThreadSet, follow_threads
from ..ir.walk import (
    TMA_STORES,
    bound_in,
    calls_in,
    children_of,
    flatten,
    line_of,
    op_name,
    rewrite_children,
    statements_of,
    variables_in,
)
from ..ir.warp_roles import is_specialized, roles_of

MAIN, PRODUCER = "", "producer"
"""Roles of threads. A warp-specialized kernel also has producers."""
_GROUP_ENDS = ("tl.tma_store_arrive", "tl.tma_store_wait")


def record_events(
    lowered: IRModule,
    calls: Mapping[int, NumberedCall],
    program: IRModule,
    symmetric: set[str],
) -> IRModule:
    """Insert ``record`` calls into the kernels that ``instrument`` has marked.

    It changes only marked kernels. One thread records each event: the first of those that may reach
    it. If a condition on a register excludes this thread, the event is not recorded.
    The host code of the program gets the table of the events, which it passes to the runtime at
    each launch, so that the table is in the cache with the kernel.

    Before: ``T.tileweave.wait_reached(flag, value, ...)``
    After:  ``begin = T.if_then_else(tx == 0, T.tileweave.globaltimer(), 0);
    seen = T.if_then_else(tx == 0, T.tileweave.ld(flag, ...), 0);
    T.tileweave.wait_reached(flag, value, ...);
    if tx == 0: T.tileweave.record(7, begin, flag, seen, value, ...)``

    Args:
        calls: the builtins of ``program``, by number.
        program: the module before TileLang's pipeline.
        symmetric: names of the symmetric tensors.
    """
    marked = [name for name, func in lowered.functions.items() if _begin_of(func) is not None]
    if not marked:
        return lowered
    events: list[Event] = []
    loops = _pipelined_loops(program)
    functions = {}
    for name, func in lowered.functions.items():
        if name in marked:
            func = _Recording(func, events, calls, loops, symmetric).function()
        functions[name] = func
    table = tirx.StringImm(encode_events(events))
    for name, func in functions.items():
        functions[name] = _with_table(func, table) if isinstance(func, tirx.PrimFunc) else func
    return IRModule(functions, attrs=lowered.attrs)


def _begin_of(func: Any) -> tirx.Call | None:
    """Return the call that ``instrument`` inserted into a device function, or None."""
    if not isinstance(func, tirx.PrimFunc):
        return None
    begins = calls_in(func.body, lambda c: op_name(c) == RECORD.op_name and int(c.args[0]) == 0)
    return begins[0] if begins else None


def _pipelined_loops(program: IRModule) -> dict[str, str]:
    """Return the line of each pipelined loop by the name of its variable, which lowering keeps."""
    lines: dict[str, str] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and is_pipelined(node):
            inside = [line_of(s) for s in statements_of(node.body)]
            line = next((line for line in (line_of(node), *inside) if line), "")
            lines.setdefault(node.loop_var.name, line)

    for func in program.functions.values():
        if isinstance(func, tirx.PrimFunc):
            post_order_visit(func.body, visit)
    return lines


def _with_table(func: tirx.PrimFunc, table: tirx.StringImm) -> tirx.PrimFunc:
    """Return ``func`` with ``table`` as the argument of ``BEGIN_LAUNCH``."""

    def change(call: tirx.Call) -> tirx.Call | None:
        first = call.args[0] if len(call.args) == 3 else None
        if not isinstance(first, tirx.StringImm) or first.value != BEGIN_LAUNCH:
            return None
        return tirx.Call(call.dtype, call.op, [*call.args[:2], table])

    return func.with_body(ir_transform(func.body, None, change, ["tirx.Call"]))


class _Recording:
    """Inserts the events of one device function, and appends them to ``events``."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        events: list[Event],
        calls: Mapping[int, NumberedCall],
        loops: Mapping[str, str],
        symmetric: set[str],
    ) -> None:
        self._func, self._events, self._calls = func, events, calls
        self._loops, self._symmetric, self._roles = loops, symmetric, roles_of(func)
        begin = _begin_of(func)
        assert begin is not None
        arity = RECORD.arity
        self._parameters = list(begin.args[arity - len(RECORD.implicit) : arity])
        self._kernel = str(func.attrs["global_symbol"]).removesuffix("_kernel")
        self._role = MAIN
        self._reached: dict[tirx.Stmt, tuple[ThreadSet, Block]] = {}
        self._indices: dict[str, tirx.Var] = {}

    def function(self) -> tirx.PrimFunc:
        """Return the function with its events."""

        def note(stmt: tirx.Stmt, threads: ThreadSet, block: Block | None) -> tirx.Stmt:
            if block is not None:
                self._reached[stmt] = threads, block
            if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
                self._indices[stmt.node.thread_tag] = stmt.node.var
            return stmt

        follow_threads(self._func.body, note)
        return self._func.with_body(self._append(self._insert(self._func.body)))

    def _append(self, body: tirx.Stmt) -> tirx.Stmt:
        """Return ``body`` with the end of the block after its last statement."""
        if isinstance(body, tirx.AttrStmt):
            return rewrite_children(body, self._append)
        if isinstance(body, tirx.SeqStmt) and isinstance(body.seq[-1], tirx.AttrStmt):
            if not is_specialized(body.seq[-1]):
                return flatten([*body.seq[:-1], self._append(body.seq[-1])])
        return flatten([body, self._point("end", self._leader)])

    def _first_line(self) -> str:
        """Return the first line of the program that has a builtin; "" if there is none."""
        numbers = (mark_of(call) for stmt in self._reached for call in calls_of(stmt))
        lines = (self._calls[mark.number].line for mark in numbers if mark is not None)
        return next((line for line in lines if line), "")

    @property
    def _leader(self) -> tirx.PrimExpr | None:
        """Condition for the first of the main threads, which records the begin and the end."""
        for split in self._roles.splits_in(self._func.body) if self._roles is not None else ():
            if split.else_case is not None:
                return self._first(split.else_case)
        return self._first(next(reversed(self._reached)), of_block=True)

    def _first(self, stmt: tirx.Stmt, of_block: bool = False) -> tirx.PrimExpr | None:
        """Return a condition that holds in one of the threads that reach ``stmt``; None if only one
        thread reaches it."""
        threads, block = self._reached[stmt]
        threads = block.all if of_block else threads
        if threads.size <= 1:
            return None
        first = np.argwhere(threads.members)[0]
        condition = None
        for axis, index, extent in zip("xyz", first, block.extents, strict=True):
            if extent > 1:
                equal = self._indices[f"threadIdx.{axis}"] == int(index)
                condition = equal if condition is None else tirx.And(condition, equal)
        return condition

    def _number(self, kind: str, **fields: Any) -> int:
        fields = {name: value for name, value in fields.items() if value not in ("", None)}
        self._events.append({"kind": kind, "kernel": self._kernel, "role": self._role, **fields})
        return len(self._events) - 1

    def _point(self, kind: str, condition: tirx.PrimExpr | None, **fields: Any) -> tirx.Stmt:
        """Return the recording of an event without duration."""
        call = record_call(self._number(kind, **fields), parameters=self._parameters)
        return _if(condition, call)

    def _around(
        self,
        stmts: list[tirx.Stmt],
        at: tirx.Stmt,
        kind: str,
        flag: tirx.PrimExpr | None = None,
        seen: tirx.PrimExpr | None = None,
        wanted: tirx.PrimExpr | None = None,
        **fields: Any,
    ) -> tirx.Stmt:
        """Return ``stmts`` with the recording of an event from their begin to their end."""
        condition = self._first(at)
        begin = tirx.Var("event_begin", "int64")
        timer = declaration_of(globaltimer).op
        head = [_bind(begin, condition, tirx.call_intrin("int64", timer))]
        if seen is not None:
            before = tirx.Var("event_seen", "int64")
            head.append(_bind(before, condition, tirx.Cast("int64", seen)))
            seen = before
        number = self._number(kind, **fields)
        call = record_call(number, begin, flag, seen, wanted, self._parameters)
        return flatten([*head, *stmts, _if(condition, call)])

    def _insert(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt) or _tma_store(stmt) is not None:
            return flatten(self._sequence(statements_of(stmt)))
        if self._roles is not None and self._roles.is_split(stmt):
            return self._split(stmt)
        if isinstance(stmt, tirx.For) and stmt.loop_var.name in self._loops:
            return self._loop(stmt)
        if isinstance(stmt, (tirx.Evaluate, tirx.Bind)):
            return self._call(stmt)
        return rewrite_children(stmt, self._insert)

    def _sequence(self, stmts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        """Return ``stmts`` with events. A TMA store lasts until the waits that follow it."""
        out: list[tirx.Stmt] = []
        while stmts:
            stmt = stmts.pop(0)
            peer = self._peer_of_store(stmt)
            if peer is None:
                out.append(stmt if _tma_store(stmt) is not None else self._insert(stmt))
                continue
            group = [stmt]
            while stmts and op_name(getattr(stmts[0], "value", None)) in _GROUP_ENDS:
                group.append(stmts.pop(0))
            out.append(
                self._around(
                    group, stmt, "transfer", wanted=peer, op="T.copy", loc=_line_in(stmt),
                    tensor=_descriptor(_tma_store(stmt)), writes=True,
                )
            )  # fmt: skip
        return out

    def _peer_of_store(self, stmt: tirx.Stmt) -> tirx.PrimExpr | None:
        """Return the rank to which a TMA store of a symmetric tensor writes, or a loop of stores.

        The rank is the tensor's outermost axis, which is the last coordinate.
        """
        call = _tma_store(stmt)
        if call is None or _descriptor(call) not in self._symmetric:
            return None
        peer = call.args[-3]
        return None if bound_in(stmt) & {*variables_in(peer)} else peer

    def _split(self, stmt: tirx.IfThenElse) -> tirx.Stmt:
        """Insert the events of a branch of producers and consumers, in order."""
        self._role = PRODUCER
        first = self._first(stmt.then_case)
        begin = self._point("begin", first)
        then = flatten([begin, self._insert(stmt.then_case), self._point("end", first)])
        self._role = MAIN
        otherwise = None if stmt.else_case is None else self._insert(stmt.else_case)
        return tirx.IfThenElse(stmt.condition, then, otherwise)

    def _loop(self, loop: tirx.For) -> tirx.Stmt:
        first = self._first(loop)
        fields = {"op": loop.loop_var.name, "loc": self._loops[loop.loop_var.name]}
        begin = self._point("loop_begin", first, **fields)
        body = rewrite_children(loop, self._insert)
        return flatten([begin, body, self._point("loop_end", first, **fields)])

    def _call(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Return ``stmt`` with the event of the builtin that it calls, if there is one."""
        for call in calls_of(stmt):
            spec = builtin_of(call)
            if spec.op_name == RECORD.op_name:
                begin = tirx.IntImm("int32", self._number("begin", loc=self._first_line()))
                begin = tirx.Call(call.dtype, call.op, [begin, *call.args[1:]], call.annotations)
                return _if(self._leader, tirx.Evaluate(begin))
            mark = mark_of(call)
            loc = line_of(stmt) or (self._calls[mark.number].line if mark is not None else "")
            fields = {"op": spec.text, "loc": loc}
            if spec.waits:
                flag, value = call.args[0], call.args[1]
                fields |= {"tensor": _tensor(flag), "relation": spec.waits}
                return self._around([stmt], stmt, "wait", flag, _load(flag), value, **fields)
            if spec.participants:
                return self._around([stmt], stmt, "wait", **fields)
            if (pointer := self._symmetric_pointer(call, "w")) is not None and releases(call):
                change = spec.combination(call)
                values = [
                    value
                    for (_, kind), value in zip(spec.operands, call.args, strict=False)
                    if isinstance(kind, ElementOf)
                ]
                value = values[-1] if values else None
                fields |= {"tensor": _tensor(pointer), "change": change}
                return self._around(
                    [stmt], stmt, "signal", pointer, wanted=_integer(value), **fields
                )
            if spec.moves:
                writes = pointer is not None
                pointer = pointer if writes else self._symmetric_pointer(call, "r")
                if pointer is not None:
                    fields |= {"tensor": _tensor(pointer), "writes": writes}
                    return self._around([stmt], stmt, "transfer", pointer, **fields)
        return stmt

    def _symmetric_pointer(self, call: tirx.Call, access: str) -> tirx.PrimExpr | None:
        """Return the first operand of ``call`` that is a pointer into a symmetric tensor.

        Args:
            access: ``r`` for pointers that the builtin reads, ``w`` for those that it writes.
        """
        for (_, kind), operand in zip(builtin_of(call).operands, call.args, strict=False):
            if isinstance(kind, Pointer) and access in kind.access:
                if _tensor(operand) in self._symmetric:
                    return operand
        return None


def _tensor(pointer: tirx.PrimExpr) -> str:
    """Return the name of the tensor into which a lowered pointer points; "" if it is unknown."""
    if op_name(pointer) == "tirx.tvm_access_ptr" and isinstance(pointer.args[1], tirx.Var):
        return pointer.args[1].name
    if op_name(pointer) == "tirx.address_of":
        return pointer.args[0].buffer.data.name
    return ""


def _tma_store(stmt: tirx.Stmt) -> tirx.Call | None:
    """Return the TMA store that ``stmt`` is, or that it repeats in a loop; None for others."""
    if isinstance(stmt, tirx.For):
        return _tma_store(stmt.body)
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    return call if op_name(call) in TMA_STORES else None


def _line_in(stmt: tirx.Stmt) -> str:
    """Return the line of a statement, or else of one inside of it."""
    return line_of(stmt) or next(filter(None, map(_line_in, children_of(stmt))), "")


def _descriptor(call: tirx.Call) -> str:
    """Return the name of the tensor whose TMA descriptor is the first operand of ``call``."""
    first = call.args[0]
    return first.name.removesuffix("_desc") if isinstance(first, tirx.Var) else ""


def _load(flag: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a relaxed load of the flag."""
    spec = declaration_of(ld)
    dtype = str(flag.args[0].dtype)
    qualifiers = [tirx.StringImm(q) for q in ("sys", "relaxed")]
    lanes = tirx.IntImm("int32", 1)
    return tirx.call_intrin(dtype, spec.op, flag, lanes, *qualifiers)


def _integer(value: tirx.PrimExpr | None) -> tirx.PrimExpr | None:
    """Return ``value`` if a trace can show it: one integer."""
    if value is None:
        return None
    dtype = tvm.DataType(str(value.dtype))
    return value if dtype.lanes == 1 and str(dtype).startswith(("int", "uint")) else None


def _bind(variable: tirx.Var, condition: tirx.PrimExpr | None, value: tirx.PrimExpr) -> tirx.Stmt:
    """Bind ``variable`` to ``value``, which only the recording thread computes."""
    if condition is not None:
        value = tirx.if_then_else(condition, value, tirx.IntImm("int64", 0))
    return tirx.Bind(variable, value)


def _if(condition: tirx.PrimExpr | None, stmt: tirx.Stmt) -> tirx.Stmt:
    return stmt if condition is None else tirx.IfThenElse(condition, stmt, None)
