"""Values of integer expressions in each thread of a block, for all iterations of inner loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from tvm import ir, tirx
from tvm.arith import Analyzer

from ..integer_ops import ARITHMETIC, BITWISE, COMPARISONS, DIVISIONS
from ..walk import nodes_in, op_name, variables_in

WARP = 32
_AXES = 12
"""Axes of a value: the threads, the loops and unknown values, and the lanes of a vector."""
_MAX_SIZE = 1 << 21
"""Most elements of a value; larger ones count as unknown."""
_REGISTERS = 16
"""Most elements of registers that are followed."""
_SAMPLES = 64
"""Number of values that stand for an unknown one, from 0 on, in the place of an access."""
_PROBES = (-1, 0, 513, 1 << 20)
"""Distances of other values from the end of the samples (the first: from their begin), which show
whether an unknown value can lead to places that the samples do not."""
BITWISE_LOGIC = {"tirx.bitwise_and": np.logical_and, "tirx.bitwise_or": np.logical_or}
_LIKELY = ("tirx.likely", "tl.conflict_hint")

Known = np.ndarray | None
Maybe = tuple[np.ndarray, np.ndarray]
"""Threads and iterations in which a condition may hold, and those in which it must hold."""


def threads_of(mask: np.ndarray) -> np.ndarray:
    """Return the threads of ``mask``, a bool for each thread of the block."""
    return mask.reshape(len(mask), -1).any(axis=1)


def warps_of(threads: np.ndarray) -> int:
    """Return bits of the warps with one of ``threads``."""
    warps = np.logical_or.reduceat(threads, np.arange(0, len(threads), WARP))
    return sum(1 << int(warp) for warp in np.flatnonzero(warps))


def whole_warps_of(threads: np.ndarray) -> int:
    """Return bits of the warps whose threads are all in ``threads``."""
    warps = -(-len(threads) // WARP)
    return ((1 << warps) - 1) & ~warps_of(~threads)


class ThreadValues:
    """Values of expressions, as arrays with one axis for the threads and one for each loop.

    Attributes:
        count: number of threads of the block.
        warps: number of its warps.
    """

    def __init__(self, extents: tuple[int, int, int]) -> None:
        self.count = int(np.prod(extents))
        self.warps = -(-self.count // WARP)
        linear = np.arange(self.count, dtype=np.int64)
        x, y, _ = extents
        self._linear = self._along(linear, 0)
        self._index = [self._along(i, 0) for i in (linear % x, linear // x % y, linear // (x * y))]
        self._fixed: dict[tirx.Var | tuple[tirx.Var, int], np.ndarray] = {}
        """Values of variables, and of elements of registers."""
        self._body = tirx.Evaluate(0)
        self._addressed: set[tirx.Var] | None = None
        """Variables of pointers that operations may store to."""
        self._registers: dict[tirx.Var, bool] = {}
        """Registers that are followed, and whether an element was unknown."""
        self.threads: np.ndarray | slice = slice(None)
        """Threads whose values are needed; those of registers in other ones may be wrong."""
        self._bound: dict[tirx.Var, tirx.PrimExpr] = {}
        self._free = list(range(_AXES - 2, 0, -1))
        self._samples: dict[object, np.ndarray] | None = None
        self._probed: dict[int, int] = {}
        self._extents: dict[tirx.Var, int] = {}
        """Number of values of a block index."""
        self.loops: list[int] = []
        """Axes of the loops around the current statement."""

    @classmethod
    def of_launch(cls, func: tirx.PrimFunc, launch: Mapping[tirx.Var, int]) -> ThreadValues:
        """Return the values in a block of a device function.

        Args:
            launch: values of block indices and scalars; other ones are unknown.
        """
        extents = {"x": 1, "y": 1, "z": 1}
        for attr in nodes_in(func.body, tirx.AttrStmt):
            if attr.attr_key == "thread_extent" and attr.node.thread_tag.startswith("threadIdx."):
                extents[attr.node.thread_tag[-1]] = int(attr.value)
        values = cls(tuple(extents.values()))
        values._body = func.body
        for variable, value in launch.items():
            values.fix(variable, value)
        return values

    @staticmethod
    def _along(values: np.ndarray, axis: int) -> np.ndarray:
        shape = [1] * _AXES
        shape[axis] = -1
        return values.reshape(shape)

    def launch(self, tag: str, variable: tirx.Var, extent: tirx.PrimExpr) -> None:
        """Define the variable of a thread or block index."""
        if tag.startswith("threadIdx."):
            self._fixed[variable] = self._index["xyz".index(tag[-1])]
        elif isinstance(extent, tirx.IntImm):
            self._extents[variable] = int(extent)

    def bind(self, variable: tirx.Var, value: tirx.PrimExpr) -> None:
        """Define a variable by an expression."""
        loads = nodes_in(value, tirx.BufferLoad) if self._registers else ()
        if any(load.buffer.data in self._registers for load in loads):
            self.forget(variable)
            self.assign(variable, self.value(value), np.ones(self.count, bool))
        else:
            self._bound[variable] = value

    def store(self, stmt: tirx.BufferStore, threads: np.ndarray, is_known: bool = True) -> None:
        """Follow a store to registers that ``follows`` accepts.

        Args:
            threads: those that may store.
            is_known: whether all of them do, and once.
        """
        data = stmt.buffer.data
        numbers = self._numbers(stmt.indices, threads)
        value = self.value(stmt.value) if is_known and len(numbers) == 1 else None
        if value is None or max(value.shape[1:]) > 1:
            self.lose(data)
            return
        key = (data, numbers[0])
        is_lost = self._registers.setdefault(data, False)
        if key in self._fixed or not is_lost or threads.all():
            self.assign(key, value, threads)

    def follows(self, buffer: tirx.Buffer) -> bool:
        """Return whether a buffer is a few integer registers, which only stores change."""
        if not str(buffer.dtype).startswith(("int", "uint", "bool")):
            return False
        if not buffer.scope().startswith("local"):
            return False
        if math.prod(map(int, buffer.shape)) > _REGISTERS:
            return False
        if self._addressed is None:
            calls = nodes_in(self._body, tirx.Call)
            pointers = {"tirx.address_of": 0, "tirx.tvm_access_ptr": 1}
            operands = [c.args[pointers[op_name(c)]] for c in calls if op_name(c) in pointers]
            self._addressed = {v for operand in operands for v in variables_in(operand)}
        return buffer.data not in self._addressed

    def lose(self, data: tirx.Var) -> None:
        """Make the values of registers unknown."""
        self._registers[data] = True
        for number in range(_REGISTERS):
            self.forget((data, number))

    def stored_in(self, stmt: tirx.Stmt) -> set[tirx.Var]:
        """Return the registers that are followed and that a statement stores."""
        stores = nodes_in(stmt, tirx.BufferStore) if self._registers else ()
        return {s.buffer.data for s in stores if s.buffer.data in self._registers}

    def lose_stored(self, stmt: tirx.Stmt) -> None:
        """Make the values of the registers unknown that a statement stores."""
        for data in self.stored_in(stmt):
            self.lose(data)

    @property
    def registers(self) -> dict[tuple[tirx.Var, int], bytes]:
        """Values of the elements of registers that are known."""
        return {key: v.tobytes() for key, v in self._fixed.items() if isinstance(key, tuple)}

    def _numbers(
        self, indices: Iterable[tirx.PrimExpr], threads: np.ndarray | slice
    ) -> list[int]:  # fmt: skip
        """Return the different values of an index in ``threads``; none if they are unknown."""
        index, *others = map(self.value, indices)
        if others or index is None or max(index.shape[1:]) > 1:
            return []
        return np.unique(np.broadcast_to(index.ravel(), self.count)[threads]).tolist()

    def _register(self, load: tirx.BufferLoad) -> Known:
        """Return the values of an element of registers, or None if they are unknown."""
        numbers = self._numbers(load.indices, self.threads)
        values = [self._fixed.get((load.buffer.data, n)) for n in numbers]
        if not values or any(value is None for value in values):
            return None
        index, result = self.value(load.indices[0]), values[0]
        for number, value in zip(numbers[1:], values[1:], strict=True):
            result = np.where(index == number, value, result)
        return result

    def fix(self, variable: tirx.Var, value: int) -> None:
        """Give a loop variable one value."""
        self._fixed[variable] = self._along(np.array([value], np.int64), 0)

    def assign(
        self, key: tirx.Var | tuple[tirx.Var, int], value: Known | int, threads: np.ndarray
    ) -> None:
        """Give a variable, or an element of registers, a value in some threads; None if the value
        is unknown."""
        if value is None or key not in self._fixed:
            self.forget(key)
        if value is not None:
            old = self._fixed.get(key, value)
            self._fixed[key] = np.where(self._along(threads, 0), value, old)

    def forget(self, key: tirx.Var | tuple[tirx.Var, int]) -> None:
        """Make the value of a variable, or of an element of registers, unknown."""
        self._fixed.pop(key, None)

    def spread(self, variable: tirx.Var, values: Iterable[int]) -> bool:
        """Give a loop variable all its values at once; return False if no axis is left."""
        array = np.fromiter(values, np.int64)
        if len(self._free) < 4:
            return False
        axis = self._free.pop()
        self._fixed[variable] = self._along(array, axis)
        self.loops.append(axis)
        return True

    def close(self, variable: tirx.Var) -> None:
        """End the loop of ``spread``."""
        del self._fixed[variable]
        self._free.append(self.loops.pop())

    def constant(self, expr: tirx.PrimExpr) -> int | None:
        """Return the one value of ``expr`` in all threads and iterations, or None."""
        value = self.value(expr)
        return int(value.flat[0]) if value is not None and np.ptp(value) == 0 else None

    def most(self, expr: tirx.PrimExpr) -> int:
        """Return an upper bound of ``expr`` in all blocks, which may be very large."""
        analyzer = Analyzer()
        for variable, extent in self._extents.items():
            analyzer.bind(variable, ir.Range(0, extent))
        return int(analyzer.const_int_bound(expr).max_value)

    def places(self, *exprs: tirx.PrimExpr) -> tuple[list[Known], dict[int, int]]:
        """Return the values of indices, and the number of samples on each axis of samples.

        An unknown value has an axis of samples after those of the loops. On it, probes follow the
        samples: other values, which show whether samples suffice.
        """
        free, self._samples, self._probed = list(self._free), {}, {}
        values = [self.value(expr) for expr in exprs]
        self._free, self._samples = free, None
        return values, self._probed

    def value(self, expr: tirx.PrimExpr) -> Known:
        """Return the values of the integer ``expr``, or None if they are unknown."""
        if isinstance(expr, tirx.IntImm):
            return self._along(np.array([int(expr)], np.int64), 0)
        if isinstance(expr, tirx.Var):
            return self._variable(expr)
        if type(expr) in ARITHMETIC:
            return self._apply(ARITHMETIC[type(expr)], expr.a, expr.b, type(expr) in DIVISIONS)
        if isinstance(expr, tirx.Cast):
            is_integer = str(expr.value.dtype).startswith(("int", "uint", "bool"))
            return self.value(expr.value) if is_integer else None
        if isinstance(expr, tirx.BufferLoad):
            is_followed = expr.buffer.data in self._registers
            value = self._register(expr) if is_followed else None
            return self._samples_of(str(expr), None) if value is None else value
        if type(expr) in COMPARISONS or isinstance(expr, tirx.And | tirx.Or | tirx.Not):
            may, must = self.truth(expr)
            return must.astype(np.int64) if np.array_equal(may, must) else None
        if isinstance(expr, tirx.Ramp):
            base, stride = self.value(expr.base), self.value(expr.stride)
            lanes = self._along(np.arange(int(expr.lanes), dtype=np.int64), _AXES - 1)
            return None if base is None or stride is None else base + stride * lanes
        if isinstance(expr, tirx.Broadcast):
            return self.value(expr.value)
        if isinstance(expr, tirx.Select):
            return self._choice(expr.condition, expr.true_value, expr.false_value)
        return self._call(expr)

    def _call(self, expr: tirx.PrimExpr) -> Known:
        name = op_name(expr)
        if name in BITWISE:
            return self._apply(BITWISE[name], *expr.args)
        if name == "tirx.if_then_else":
            return self._choice(*expr.args)
        if name in _LIKELY:
            return self.value(expr.args[0])
        if name == "tl.get_lane_idx":
            return self._linear % WARP
        if name in ("tl.get_warp_idx", "tl.get_warp_idx_sync"):
            return self._linear // WARP
        if name == "tl.tl_shuffle_elect":
            # elect.sync may choose any lane. Programs that store by one thread choose the first
            # lane: the last one shows which barriers are missing then.
            every, lane = int(expr.args[0]) or self.count, min(WARP, self.count) - 1
            return (self._linear % every == lane).astype(np.int64)
        return None

    def _choice(self, condition, a, b) -> Known:
        may, must = self.truth(condition)
        x, y = self.value(a), self.value(b)
        if x is None or y is None or not np.array_equal(may, must):
            return None
        return np.where(must, x, y)

    def _variable(self, variable: tirx.Var) -> Known:
        if variable in self._fixed:
            return self._fixed[variable]
        if variable in self._bound:
            value = self.value(self._bound[variable])
            if value is not None:
                return value
        return self._samples_of(variable, self._extents.get(variable))

    def _samples_of(self, key: object, extent: int | None) -> Known:
        """Return samples of an unknown value in the place of an access. Each thread counts with all
        of them, so the value may differ between threads."""
        if self._samples is None:
            return None
        if key not in self._samples:
            most = (_SAMPLES, 16, 4)[len(self._samples)] if len(self._samples) < 3 else 2
            if not self._free:
                return None
            axis = self._free.pop()
            before, *after = _PROBES
            others = [most + n for n in after]
            if extent is None:
                others.append(before)
            else:
                others = [n for n in (*others, extent - 1) if most <= n < extent]
                most = min(most, extent)
            self._probed[axis] = most
            values = np.array([*range(most), *others], np.int64)
            self._samples[key] = self._along(values, axis)
        return self._samples[key]

    def _apply(self, function: Callable, a, b, divides: bool = False) -> Known:
        x, y = self.value(a), self.value(b)
        if x is None or y is None or (divides and not y.all()):
            return None
        if math.prod(map(max, x.shape, y.shape)) > _MAX_SIZE:
            return None
        return function(x, y)

    def truth(self, expr: tirx.PrimExpr) -> Maybe:
        """Return where the condition ``expr`` may hold, and where it must hold."""
        if isinstance(expr, tirx.And | tirx.Or):
            a, b = self.truth(expr.a), self.truth(expr.b)
            join = np.logical_and if isinstance(expr, tirx.And) else np.logical_or
            return join(a[0], b[0]), join(a[1], b[1])
        if op_name(expr) in BITWISE_LOGIC and str(expr.dtype) == "bool":
            a, b = map(self.truth, expr.args)
            join = BITWISE_LOGIC[op_name(expr)]
            return join(a[0], b[0]), join(a[1], b[1])
        if isinstance(expr, tirx.Not):
            may, must = self.truth(expr.a)
            return ~must, ~may
        if isinstance(expr, tirx.Var) and expr in self._bound:
            return self.truth(self._bound[expr])
        if op_name(expr) in _LIKELY:
            return self.truth(expr.args[0])
        if type(expr) in COMPARISONS:
            value = self._apply(COMPARISONS[type(expr)], expr.a, expr.b)
        else:
            value = self.value(expr)
        if value is None:
            may = np.ones([1] * _AXES, bool)
            return may, ~may
        return value != 0, value != 0
