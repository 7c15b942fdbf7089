"""Schedule a wait in a pipelined loop before the loads that it guards, also without warp
specialization."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ..ir.accesses import name_of as name_of_statement
from ..ir.accesses import written_tensors
from ..ir.memory_order import may_signal
from ..ir.origin import name_of
from ..ir.pipelined_loops import (
    COPIES,
    STAGED,
    guards_in,
    guards_loads,
    is_pipelined,
    loads_in,
    written_loads,
)
from ..ir.walk import (
    arrows,
    builtins_in,
    calls_in,
    effects_in,
    flatten,
    line_of,
    location,
    nodes_in,
    op_name,
    rewrite_children,
    statements_of,
    variables_and_loads,
    with_annotation,
)


def stage_waits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Schedule pipelined loops with waits explicitly: waits and loads first, then the computation.

    TileLang's own schedule issues loads iterations ahead, but leaves waits, which it does not know,
    with the computation. It finds no schedule if a builtin writes another rank's copy of the loaded
    tensor; here that builtin stays with the computation, in program order. With warp
    specialization, TileLang drops the schedule, and the wait moves to the producer.

    A loop that also signals runs in program order, in one stage: a wait that is iterations ahead
    may be for a signal that the block sends later, or that another block sends only after it.

    A loop that the program schedules itself must not schedule a load before its wait, or a signal
    after the waits that the program has after it. A loop in which other statements write the memory
    that a load fills stays unchanged, and ``verify_pipelined`` verifies it.

    Before: ``for k in T.Pipelined(n, num_stages=3): wait; copy; copy; gemm``
    After:  ``for k in T.Pipelined(n, num_stages=3, order=[0, 1, 2, 3], stage=[0, 0, 0, 2]): ...``
    """

    def stage(stmt: tirx.Stmt) -> tirx.Stmt:
        stmt = rewrite_children(stmt, stage)
        if not isinstance(stmt, tirx.For) or not is_pipelined(stmt):
            return stmt
        written = written_tensors(stmt.body)
        scheduled = "tl_pipeline_stage" in stmt.annotations
        stmts = statements_of(stmt.body) if scheduled else _statements(stmt.body, written)
        guards = [bool(guards_in(s)) for s in stmts]
        loads = [bool(loads_in(s)) for s in stmts]
        signals = [bool(calls_in(s, may_signal)) for s in stmts]
        writers = _writers(stmt.body)
        if not any(guards) and not writers:
            return stmt
        if _overwrites_loaded_tile(stmts, loads):
            _refuse_writers(writers, stmt)
            return stmt
        annotations = dict(stmt.annotations)
        if scheduled:
            _check_schedule(stmts, guards, loads, signals, annotations)
        else:
            in_order = any(guards) and any(signals)
            last = 0 if in_order else int(annotations["num_stages"]) - 1
            stages = [
                0 if guard or load else last
                for s, guard, load in zip(stmts, guards, loads, strict=True)
                if not _is_value(s, written)
            ]
            annotations["tl_pipeline_order"] = list(range(len(stages)))
            annotations["tl_pipeline_stage"] = stages
        body = ir_transform(stmt.body, None, _mark_staged, ["tirx.Call"])
        return tirx.For(
            stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, annotations
        )

    return func.with_body(stage(func.body))


def _statements(body: tirx.Stmt, written: set[tirx.Var]) -> list[tirx.Stmt]:
    """Return the statements that TileLang schedules. It splits branches without an ``else``.

    Args:
        written: data pointers of the tensors that the loop writes.
    """
    out: list[tirx.Stmt] = []
    for stmt in statements_of(body):
        splits = isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None
        if not splits or effects_in(stmt.condition) or _reads(stmt.condition, written):
            out.append(stmt)
            continue
        inner_stmts = _statements(stmt.then_case, written)
        first = next((i for i, s in enumerate(inner_stmts) if isinstance(s, tirx.Bind)), None)
        if first is not None:  # statements after a definition stay in its scope
            inner_stmts[first:] = [flatten(inner_stmts[first:])]
        out += [tirx.IfThenElse(stmt.condition, inner, None) for inner in inner_stmts]
    return out


def _reads(expr: tirx.PrimExpr, tensors: set[tirx.Var]) -> bool:
    """Return whether ``expr`` reads one of ``tensors``, which are data pointers."""
    return any(
        isinstance(node, tirx.BufferLoad) and node.buffer.data in tensors
        for node in variables_and_loads(expr)
    )


def _check_schedule(
    stmts: list[tirx.Stmt],
    guards: list[bool],
    loads: list[bool],
    signals: list[bool],
    annotations: dict,
) -> None:
    """Refuse an explicit schedule in which a load runs before a wait that guards it, or a wait
    before a signal that precedes it in the program."""
    places = list(
        zip(annotations["tl_pipeline_stage"], annotations["tl_pipeline_order"], strict=True)
    )
    if len(places) != len(stmts):
        scheduled = [i for i, s in enumerate(stmts) if not isinstance(s, tirx.Bind)]
        stmts, guards, loads, signals = (
            [part[i] for i in scheduled] for part in (stmts, guards, loads, signals)
        )
    if len(places) != len(stmts):
        return  # TileLang refuses the schedule, and names the counts
    for index, guard in enumerate(guards):
        if not guard:
            continue
        wait, (stage, order) = name_of(guards_in(stmts[index])[0]), map(int, places[index])
        for other in range(len(stmts)):
            other_stage, other_order = map(int, places[other])
            is_later = other > index
            if loads[other] and is_later and (stage, order) > (other_stage, other_order):
                raise LanguageError(
                    f"{wait}: in stage {stage} of T.Pipelined, with order "
                    f"{order}, runs after a load that it guards, in stage {other_stage} with order "
                    f"{other_order}; expected a stage and an order that do not exceed those of the "
                    "loads after it"
                    f"{location(stmts[index])}"
                )
            # A signal after the wait precedes the wait of the next iteration.
            if signals[other] and (other_stage, other_order) > (stage + is_later, order):
                lines = [("wait", line_of(stmts[index])), ("signal", line_of(stmts[other]))]
                raise LanguageError(
                    f"{wait}: in stage {stage} of T.Pipelined, with order {order}, runs before "
                    f"{name_of_statement(stmts[other])} of an earlier iteration, in stage "
                    f"{other_stage} with order {other_order}, and may wait for it; expected both "
                    f"in one stage, in the order of the program{arrows(lines)}"
                )


def _is_value(stmt: tirx.Stmt, written: set[tirx.Var]) -> bool:
    """Return whether ``stmt`` only names a value that may be computed at any time.

    TileLang does not schedule such definitions, and may already have inlined them. A schedule does
    not count them.

    Args:
        written: data pointers of the tensors that the loop writes.
    """
    is_value = isinstance(stmt, tirx.Bind) and not effects_in(stmt)
    return is_value and not _reads(stmt.value, written)


def _writers(body: tirx.Stmt) -> list[tirx.Call]:
    """Return the builtins that write a tensor that loads of the same loop read."""
    loads = loads_in(body)
    return [call for call in builtins_in(body) if written_loads(call, loads)]


def _refuse_writers(writers: list[tirx.Call], loop: tirx.For) -> None:
    for call in writers:
        raise LanguageError(
            f"{name_of(call)}: writes a tensor that T.Pipelined loads into memory "
            f"that other statements of the loop write; expected T.serial{location(loop)}"
        )


def _overwrites_loaded_tile(stmts: list[tirx.Stmt], loads: list[bool]) -> bool:
    """Return whether a statement other than a load writes shared memory that a load fills."""
    filled = [
        copy.args[1].args[0].buffer
        for stmt, load in zip(stmts, loads, strict=True)
        if load
        for copy in calls_in(stmt, lambda c: op_name(c) in COPIES)
    ]
    return any(
        _writes(stmt, buffer)
        for stmt, load in zip(stmts, loads, strict=True)
        if not load
        for buffer in filled
    )


def _writes(stmt: tirx.Stmt, buffer: tirx.Buffer) -> bool:
    def region(call: tirx.Call) -> bool:
        name = op_name(call)
        if name == "tl.region":
            return call.args[0].buffer.same_as(buffer) and int(call.args[1]) & 2 != 0
        return name == "tl.access_ptr" and call.args[0].buffer.same_as(buffer)

    stores = nodes_in(stmt, tirx.BufferStore)
    return bool(calls_in(stmt, region)) or any(s.buffer.same_as(buffer) for s in stores)


def _mark_staged(call: tirx.Call) -> tirx.Call | None:
    return with_annotation(call, STAGED, tirx.IntImm("bool", 1)) if guards_loads(call) else None
