"""Exchanges by registers in a warp or block: shuffles, reductions, votes.

The value of an inactive lane is poison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import tirx

from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.values import accumulation_dtype, convert, numpy_dtype
from ..report.errors import unsupported
from .accesses import store_tile
from .expressions import Expr
from .statements import Statements

WARP = 32


def _of_threads(value: Any, frame: Frame, op: str, loc: str) -> np.ndarray:
    """Broadcast ``value`` to one element per thread of the block."""
    if frame.space is not None or frame.mask.single is not None:
        place = "in T.Parallel" if frame.space is not None else "by one thread"
        raise unsupported(f"{op} {place}", loc)
    return np.broadcast_to(value, frame.mask.on.shape)


def _exchange(
    c: Statements, call: tirx.Call, loc: str, operand: int,
    f: Callable[[Any, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Expr:  # fmt: skip
    """Compile ``f(frame, values, bad)`` of one operand: results of all threads, and poison mask."""
    op = f"T.{call.op.name.rsplit('.', 1)[-1]}"
    expr, node = c.compile(call.args[operand], loc), c.node()

    def value(frame: Frame):
        values = _of_threads(expr.value(frame), frame, op, loc)
        poison = expr.poison(frame) if expr.poison else None
        bad = ~frame.mask.on if poison is None else ~frame.mask.on | np.asarray(poison)
        result, bad = f(frame, values, bad)
        is_bad = (bad & frame.mask.on).any()
        frame.cache[node] = bad if is_bad else None
        if is_bad and poison is None:
            frame.block.machine.memory.unwritten = (
                f"{op} --> {loc} reads the value of a thread that does not execute it"
            )
        return result

    return Expr(value, lambda frame: frame.cache.get(node))


def _shuffle(source: Callable[[np.ndarray, Any, int], np.ndarray]):
    """Return the compiler of a shuffle.

    ``source(lane, operand, width)`` returns the source lane in a group of ``width`` lanes. If that
    is outside of the group, the lane keeps its own value.
    """

    def compile(c: Statements, call: tirx.Call, loc: str) -> Expr:
        other = c.compile(call.args[2], loc).value
        width = int(call.args[3]) if len(call.args) > 3 else WARP

        def f(frame: Frame, values, bad):
            threads = np.arange(len(values))
            lane = source(threads % width, other(frame), width)
            sources = np.where(
                (lane >= 0) & (lane < width), threads - threads % width + lane, threads
            )
            sources = np.minimum(sources, len(values) - 1)
            return values[sources], bad[sources]

        return _exchange(c, call, loc, 1, f)

    return compile


def _warps(values: np.ndarray, fill: Any) -> np.ndarray:
    """Reshape to one row per warp and pad the last one."""
    short = -len(values) % WARP
    return np.concatenate([values, np.full(short, fill, values.dtype)]).reshape(-1, WARP)


def _each(rows: Any, threads: int) -> np.ndarray:
    """Broadcast one value per warp to its threads."""
    return np.repeat(rows, WARP)[:threads]


def _reduction(ufunc: np.ufunc):
    def compile(c: Statements, call: tirx.Call, loc: str) -> Expr:
        dtype = numpy_dtype(call.dtype)

        def f(frame: Frame, values, bad):
            wide = values.astype(accumulation_dtype(values.dtype), copy=False)
            first = _warps(wide, wide[-1])  # the padding is poison anyway
            reduced = ufunc.reduce(first, axis=1)
            return convert(_each(reduced, len(values)), dtype), _each(
                _warps(bad, True).any(axis=1), len(values)
            )

        return _exchange(c, call, loc, 0, f)

    return compile


def _vote(f: Callable[[np.ndarray, np.ndarray], Any], dtype: Any, operand: int = 1):
    """Return the compiler of a vote of the active lanes.

    ``f(values, active)`` gets two boolean arrays with one row per warp.
    """

    def compile(c: Statements, call: tirx.Call, loc: str) -> Expr:
        def vote(frame: Frame, values, bad):
            active = _warps(frame.mask.on, False)
            result = f(_warps(values.astype(np.bool_), False), active).astype(dtype)
            return _each(result, len(values)), _each(
                (_warps(bad, False) & active).any(axis=1), len(values)
            )

        return _exchange(c, call, loc, operand, vote)

    return compile


def _bits(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)


def _match_any(c: Statements, call: tirx.Call, loc: str) -> Expr:
    def match(frame: Frame, values, bad):
        rows, active = _warps(values, values[-1]), _warps(frame.mask.on, False)
        equal = (rows[:, :, None] == rows[:, None, :]) & active[:, None, :]
        result = _bits(equal.reshape(-1, WARP)).astype(np.uint32)[: len(values)]
        return result, _each((_warps(bad, False) & active).any(axis=1), len(values))

    return _exchange(c, call, loc, 1, match)


def _block_vote(f: Callable[[np.ndarray], Any]):
    """Return the compiler of a block barrier with a vote of all threads."""

    def compile(c: Statements, call: tirx.Call, loc: str) -> Expr:
        def vote(frame: Frame, values, bad):
            frame.block.order.barrier(frame.mask.thread_groups)
            result = np.int32(f(values.astype(np.bool_)[frame.mask.on]))
            bad = (bad & frame.mask.on).any()
            return np.full(len(values), result), np.full(len(values), bad)

        return _exchange(c, call, loc, 0, vote)

    return compile


_COMBINE = {
    tirx.Add: np.add, tirx.Mul: np.multiply, tirx.Max: np.fmax, tirx.Min: np.fmin,
}  # fmt: skip


def all_reduce(c: Statements, call: tirx.Call, loc: str) -> Step:
    """``tvm_thread_allreduce(count, value, condition, result, threads ...)``: reduce a value along
    axes of the threads of the block, for all of them."""
    combiner = c.reducer.result[0] if c.reducer is not None else None
    if int(call.args[0]) != 1 or type(combiner) not in _COMBINE or not c.constant(call.args[2]):
        raise unsupported("a tvm_thread_allreduce of several values, or with a condition,", loc)
    ufunc, expr, result = _COMBINE[type(combiner)], c.compile(call.args[1], loc), call.args[3]
    slot = c.tiles[result.buffer.data]
    index = c.indices(result.indices, result.buffer.name, loc)
    axes = tuple(2 - c.thread_slots[var] for var in call.args[4:])

    def run(frame: Frame):
        if not frame.mask.full:
            raise unsupported("tvm_thread_allreduce of some threads", loc)
        frame.block.order.threads.barrier_all()
        shape = frame.block.kernel.threads[::-1]

        def each(values: Any, reduction: np.ufunc) -> np.ndarray:
            grid = np.broadcast_to(values, frame.mask.on.shape).reshape(shape)
            reduced = reduction.reduce(grid, axis=axes, keepdims=True)
            return np.broadcast_to(reduced, shape).reshape(-1)

        poison = expr.poison(frame) if expr.poison else None
        poison = None if poison is None else each(poison, np.logical_or)
        values = each(expr.value(frame), ufunc)
        store_tile(frame, frame.tile(slot), index(frame), values, poison, loc)

    return Step(run)


def _active(c: Statements, call: tirx.Call, loc: str) -> Expr:
    def value(frame: Frame):
        active = _of_threads(frame.mask.on, frame, "T.activemask", loc)
        return _each(_bits(_warps(active, False)), len(active))

    return Expr(value)


def register(c: Statements) -> None:
    """Register the exchanges by registers."""
    c.steps["tirx.tvm_thread_allreduce"] = all_reduce
    indexed = _shuffle(lambda lane, other, width: other % width + 0 * lane)
    down = _shuffle(lambda lane, other, width: lane + other)
    up = _shuffle(lambda lane, other, width: lane - other)
    c.calls |= {
        "tl.shfl_sync": indexed,
        "tirx.tvm_warp_shuffle": indexed,
        "tirx.tvm_warp_shuffle_down": down,
        "tirx.tvm_warp_shuffle_up": up,
        "tirx.tvm_warp_activemask": _active,
        "tl.shfl_xor_sync": _shuffle(lambda lane, other, width: lane ^ other),
        "tl.shfl_down_sync": down,
        "tl.shfl_up_sync": up,
        "tl.warp_reduce_sum": _reduction(np.add),
        "tl.warp_reduce_max": _reduction(np.fmax),
        "tl.warp_reduce_min": _reduction(np.fmin),
        "tl.warp_reduce_bitand": _reduction(np.bitwise_and),
        "tl.warp_reduce_bitor": _reduction(np.bitwise_or),
        "tl.any_sync": _vote(lambda v, on: (v & on).any(axis=1), np.int32),
        "tl.all_sync": _vote(lambda v, on: (v | ~on).all(axis=1), np.int32),
        "tl.ballot_sync": _vote(lambda v, on: _bits(v & on), np.uint64),
        "tl.ballot": _vote(lambda v, on: _bits(v & on), np.uint64, 0),
        "tl.match_any_sync": _match_any,
        "tl.activemask": _active,
        "tl.syncthreads_count": _block_vote(np.count_nonzero),
        "tl.syncthreads_and": _block_vote(np.all),
        "tl.syncthreads_or": _block_vote(np.any),
    }
