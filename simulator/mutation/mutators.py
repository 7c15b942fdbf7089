"""Mutations of a synchronization operation: one function for each kind of change.

Each function receives an operation and its program, and yields the name and the edit of each
mutant. It yields nothing if the kind does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from ...builtins.spec import ConstantBool, ConstantInt, ElementOf
from ...passes.ir.memory_order import acquires, releases
from ...passes.ir.walk import flatten, nodes_in, op_name, variables_and_loads
from ..memory.threads import WARP
from .operations import (
    Accesses,
    Edit,
    Operation,
    instead,
    replaced,
    sequences_around,
    with_operands,
)

Changes = Iterator[tuple[str, Edit]]


@dataclass(frozen=True)
class Context:
    """Program that contains an operation."""

    func: tirx.PrimFunc
    world_size: int
    symmetric: frozenset[str]
    accesses: Accesses


_WEAKER = {"acq_rel": ("release", "acquire", "relaxed"), "release": ("relaxed",),
           "acquire": ("relaxed",), "sc": ("acq_rel",)}  # fmt: skip
_GROUP_WAITS = ("tl.tma_store_wait", "tirx.ptx_wait_group", "tl.warpgroup_wait")
"""Waits until at most a number of groups, their first operand, is in flight."""
_COUNTS = {"tirx.tvm_storage_sync": (2, WARP), "tirx.ptx_init_barrier_thread_count": (1, 1)}
"""Position of the number of threads that a barrier expects, and the number that arrives at once."""
_EXPECT = ("tl.mbarrier_expect_tx", "tirx.ptx_arrive_barrier_expect_tx")
_SMALLEST_COPY = 16
"""Bytes of the smallest bulk copy."""
_NARROWER = {"sys": ("gpu", "cta"), "gpu": ("cta",)}


def drop(op: Operation, context: Context) -> Changes:
    """Drop the operation."""
    if op.is_statement and op.synchronizes:
        yield "drop", instead(op.stmt)


def weaken(op: Operation, context: Context) -> Changes:
    """Weaken the memory order."""
    return _other_qualifiers(op, "sem", _WEAKER)


def narrow(op: Operation, context: Context) -> Changes:
    """Narrow the scope."""
    return _other_qualifiers(op, "scope", _NARROWER)


def _other_qualifiers(op: Operation, name: str, others: dict[str, tuple[str, ...]]) -> Changes:
    words = op.spec.qualifiers if op.spec is not None else ()
    for place, (word, legal) in enumerate(words, len(op.call.args) - len(words)):
        if word == name:
            for other in others.get(op.call.args[place].value, ()):
                if other in legal:
                    yield f"{name}={other}", _with_operand(op, place, tirx.StringImm(other))


def shift_target(op: Operation, context: Context) -> Changes:
    """Add or subtract 1 from the target of a wait."""
    place = op.operand(ElementOf)
    if place is not None and op.spec.waits:
        target = op.call.args[place]
        one = tirx.const(1, target.dtype)
        yield "target+1", _with_operand(op, place, target + one)
        yield "target-1", _with_operand(op, place, target - one)


def shift_value(op: Operation, context: Context) -> Changes:
    """Add 1 to the value of a signal."""
    place = op.operand(ElementOf)
    if place is not None and op.synchronizes and not op.spec.waits:
        value = op.call.args[place]
        yield "value+1", _with_operand(op, place, value + tirx.const(1, value.dtype))


def shift_count(op: Operation, context: Context) -> Changes:
    """Announce one row more or less."""
    if op.spec is not None and op.spec.announces:
        place = [name for name, _ in op.spec.operands].index("count")
        count = op.call.args[place]
        yield "count+1", _with_operand(op, place, count + 1)
        yield "count-1", _with_operand(op, place, count - 1)


def shift_flag(op: Operation, context: Context) -> Changes:
    """Store or await the flag of the next or the previous launch."""
    if op.spec is not None and op.spec.flagged:
        flag = op.spec.operand(op.call, "flag")
        place = next(i for i, a in enumerate(op.call.args) if a.same_as(flag))
        one = tirx.const(1, flag.dtype)
        yield "flag+1", _with_operand(op, place, flag + one)
        yield "flag-1", _with_operand(op, place, flag - one)


def lag_epoch(op: Operation, context: Context) -> Changes:
    """Compute the target of a wait from the previous epoch."""
    place = op.operand(ElementOf)
    if place is None or not op.spec.waits:
        return
    target = _definition(op.call.args[place], context.func.body)
    for name, source in _of_launch(target, context.func):
        zero, one = (tirx.const(n, source.dtype) for n in (0, 1))
        before = tirx.Select(source > zero, source - one, source)

        def lag(node, source=source, before=before):
            return before if tvm.ir.structural_equal(node, source) else None

        if isinstance(source, tirx.Var):
            changed = substitute(target, {source: before})
        else:
            body = ir_transform(tirx.Evaluate(target), None, lag, ["tirx.BufferLoad"])
            changed = body.value
        yield f"{name}-1", _with_operand(op, place, changed)


def flip_parity(op: Operation, context: Context) -> Changes:
    """Flip the parity of a wait, or the half of a double buffer of flags."""
    if op_name(op.call) == "tl.mbarrier_wait_parity":
        yield "parity flipped", _with_operand(op, 1, 1 - op.call.args[1])
    at = op.pointer()
    for axis, index in enumerate(at.indices if at is not None else ()):
        is_rank = axis == 0 and at.buffer.name in context.symmetric
        if not is_rank and _is(at.buffer.shape[axis], 2) and not isinstance(index, tirx.IntImm):
            yield f"axis {axis} flipped", _with_index(op, axis, 1 - index)


def other_rank(op: Operation, context: Context) -> Changes:
    """Access the copy of the next rank."""
    at = op.pointer()
    if at is not None and at.buffer.name in context.symmetric and context.world_size > 1:
        yield "rank+1", _with_index(op, 0, (at.indices[0] + 1) % context.world_size)


def free_source_only(op: Operation, context: Context) -> Changes:
    """Wait until bulk stores have read their source, not until they are complete."""
    if op.kind == "complete_bulk_stores":
        read = tirx.call_intrin("handle", tvm.ir.Op.get("tl.tma_store_wait"), 0, True)
        yield "read=True", replaced(op.call, read)
    place = op.operand(ConstantBool)
    if op_name(op.call) == "tl.tma_store_wait" and len(op.call.args) > 1:
        place = 1
    if place is not None and not op.call.args[place].value:
        yield "read=True", _with_operand(op, place, tirx.IntImm("bool", True))


def leave_a_group(op: Operation, context: Context) -> Changes:
    """Leave one more group of asynchronous operations in flight."""
    waits = op.spec is not None and op.spec.bulk_group == "wait"
    place = op.operand(ConstantInt) if waits else None
    if op_name(op.call) in _GROUP_WAITS and len(op.call.args):
        place = 0
    if place is not None:
        n = int(op.call.args[place])
        yield f"n={n + 1}", _with_operand(op, place, tirx.IntImm("int32", n + 1))


def change_threads(op: Operation, context: Context) -> Changes:
    """Let a barrier expect more or fewer threads."""
    place, step = _COUNTS.get(op_name(op.call), (0, 0))
    if step and len(op.call.args) > place:
        count = int(op.call.args[place])
        for other in (count + step, count - step):
            if other > 0:
                yield f"threads={other}", _with_operand(op, place, tirx.IntImm("int32", other))


def change_bytes(op: Operation, context: Context) -> Changes:
    """Let an mbarrier expect more or fewer bytes."""
    if op_name(op.call) in _EXPECT:
        size = op.call.args[1]
        step = tirx.const(_SMALLEST_COPY, size.dtype)
        yield f"bytes+{_SMALLEST_COPY}", _with_operand(op, 1, size + step)
        yield f"bytes-{_SMALLEST_COPY}", _with_operand(op, 1, size - step)


def write_after(op: Operation, context: Context) -> Changes:
    """Move the preceding write, which the operation publishes, after it."""
    changes_flag = op.synchronizes and op.operand(ElementOf) is not None and not op.spec.waits
    if releases(op.call) or changes_flag:
        for sequence, at in sequences_around(context.func.body, op.stmt):
            for place in range(at - 1, -1, -1):
                moved = sequence.seq[place]
                if not isinstance(moved, tirx.Bind) and context.accesses.writes(moved):
                    yield "write after", _moved(sequence, place, at)
                    return


def read_before(op: Operation, context: Context) -> Changes:
    """Move the following read, which the operation guards, before it."""
    if not acquires(op.call) and not (op.spec is not None and op.spec.waits):
        return
    for sequence, at in sequences_around(context.func.body, op.stmt):
        own, accesses = sequence.seq[at], context.accesses
        if isinstance(own, tirx.Bind) or accesses.reads(own) or accesses.writes(own):
            return  # its result is used, or the guarded access would move along
        for place in range(at + 1, len(sequence.seq)):
            if context.accesses.reads(sequence.seq[place]):
                yield "read before", _moved(sequence, at, place)
                return


Mutators = tuple[Callable[[Operation, Context], Changes], ...]
_BOTH_LEVELS: Mutators = (
    drop, weaken, narrow, shift_target, shift_value, shift_count, shift_flag, flip_parity,
    free_source_only,
    leave_a_group,
)  # fmt: skip
TILE_MUTATORS: Mutators = (*_BOTH_LEVELS, lag_epoch, other_rank, write_after, read_before)
"""Kinds of changes of a program after the tile passes."""
DEVICE_MUTATORS: Mutators = (*_BOTH_LEVELS, change_threads, change_bytes)
"""Kinds of changes of a device function."""


def _moved(sequence: tirx.SeqStmt, what: int, after: int) -> Edit:
    """Move element ``what`` just after element ``after``."""
    elements = list(sequence.seq)
    elements.insert(after, elements.pop(what))
    return instead(sequence, flatten(elements))


def _with_operand(op: Operation, place: int, new: tirx.PrimExpr) -> Edit:
    arguments = list(op.call.args)
    arguments[place] = new
    return replaced(op.call, with_operands(op.call, arguments))


def _with_index(op: Operation, axis: int, new: tirx.PrimExpr) -> Edit:
    at = op.pointer()
    place = next(i for i, a in enumerate(op.call.args) if a.args and a.args[0].same_as(at))
    pointer = op.call.args[place]
    indices = list(at.indices)
    indices[axis] = new
    load = tirx.BufferLoad(at.buffer, indices)
    return _with_operand(op, place, with_operands(pointer, [load, *pointer.args[1:]]))


def _is(extent: tirx.PrimExpr, value: int) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == value


def _definition(expr: tirx.PrimExpr, body: tirx.Stmt) -> tirx.PrimExpr:
    """Replace bound variables in ``expr`` by their values."""
    bound = {
        bind.var: bind.value
        for bind in nodes_in(body, tirx.Bind)
        if str(bind.var.dtype) != "handle" and op_name(bind.value) != "tl.launch_thread_idx"
    }
    for _ in range(len(bound)):
        new = substitute(expr, bound)
        if tvm.ir.structural_equal(new, expr):
            break
        expr = new
    return expr


def _of_launch(expr: tirx.PrimExpr, func: tirx.PrimFunc) -> list[tuple[str, tirx.PrimExpr]]:
    """Return the values in ``expr`` that may be an epoch: scalar parameters and ``local.var``."""
    scalars = [p for p in func.params if p not in func.buffer_map]
    values: dict[str, tirx.PrimExpr] = {}
    for node in variables_and_loads(expr):
        if isinstance(node, tirx.Var) and any(node.same_as(p) for p in scalars):
            values[node.name] = node
        elif isinstance(node, tirx.BufferLoad) and node.buffer.scope() == "local.var":
            values[node.buffer.name] = node
    return list(values.items())
