"""Compiler of IR expressions to Python closures over a frame.

Each expression becomes a pair: its value, and its poison mask (None if it cannot be poison). A
value is a scalar, or an array over the threads of the block or the points of T.Parallel, with an
additional axis for the lanes of a vector. Python integers represent int32 and int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.ir import structural_equal

from ...passes.ir.factors import summands
from ...passes.ir.walk import has_loads, op_name
from ..machine.block import Frame
from ..memory.values import convert, is_float, numpy_dtype
from ..report.errors import uninitialized, unsupported
from .accesses import GlobalRef, is_poisoned, load_global, load_tile
from .functions import BINARY, FUNCTIONS
from .numbers import is_float_value

Value = Callable[[Any], Any]


class Expr(NamedTuple):
    """A compiled expression."""

    value: Value
    poison: Value | None = None
    varies: bool = True
    """True if the value may differ between the threads of a block, outside of T.Parallel."""


def either(*poisons: Value | None) -> Value | None:
    """Return the union of these poison masks."""
    masks = [p for p in poisons if p is not None]
    if len(masks) < 2:
        return masks[0] if masks else None

    def poison(frame: Frame):
        union = None
        for p in masks:
            mask = p(frame)
            if mask is not None:
                union = mask if union is None else np.logical_or(union, mask)
        return union

    return poison


def _for_lanes(poison: Value | None) -> Value | None:
    """Return the poison mask of a vector whose lanes all have the same poison."""
    if poison is None:
        return None

    def mask(frame: Frame):
        bad = poison(frame)
        return bad[..., None] if np.ndim(bad) else bad

    return mask


_OPERANDS = {tirx.BufferLoad, tirx.Var, tirx.SizeVar}
_DIVISIONS = {tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod}


ValueOf = Callable[[Any, tirx.Call, str], Expr]
"""Compiles a call, given the compiler of the program, the call and its location."""


class Expressions:
    """Compiler of the expressions of one program."""

    def __init__(self) -> None:
        self.slots: dict[tirx.Var, int] = {}
        self.uniform: set[tirx.Var] = set()
        """Variables whose value does not differ between threads."""
        self.sound: set[tirx.Var] = set()
        """Variables whose value is never poison."""
        self.pending: dict[tirx.Var, tirx.PrimExpr] = {}
        """Bindings whose values use variables that are bound later."""
        self.globals: dict[tirx.Var, str] = {}
        """Tensor parameters, by their data pointer."""
        self.declared: dict[tirx.Var, tirx.Buffer] = {}
        """Declared tensor parameters, by data pointer. A reshaped view has another shape."""
        self.multicasts: dict[tirx.Var, str] = {}
        """Parameters that are multicast addresses, by their data pointer."""
        self.tiles: dict[tirx.Var, int] = {}
        self.made: dict[int, tuple[tuple[int, ...], np.dtype]] = {}
        """Shape and type of the allocation of each tile. A reshaped view has another shape."""
        self.extents: dict[str, tuple[int, ...]] = {}
        """Shape of each tile of the tile program, by name."""
        self.calls: dict[str, ValueOf] = {}
        """Compilers of calls that yield a value and are not pure functions, by operator."""
        self.broadcasts: dict[str, ValueOf] = {}
        """Compilers of broadcasts of calls that each lane executes, by operator."""
        self.signals: dict[str, dict[str, str]] = {}
        """Operations that change words of a tensor atomically, by tensor and line."""
        self._nodes = 0

    def new_slot(self, var: tirx.Var) -> int:
        return self.slots.setdefault(var, len(self.slots))

    def new_uniform_slot(self, var: tirx.Var) -> int:
        """Return the slot of a variable that never differs between threads and is never poison."""
        self.uniform.add(var)
        self.sound.add(var)
        return self.new_slot(var)

    def node(self) -> int:
        self._nodes += 1
        return self._nodes

    def compile(self, expr: tirx.PrimExpr, loc: str) -> Expr:
        kind = type(expr)
        if kind in BINARY:
            return self._binary(kind, expr, loc)
        handler = getattr(self, f"_{kind.__name__}", None)
        if handler is None:
            raise unsupported(f"expression {kind.__name__}: {expr}", loc)
        compiled = handler(expr, loc)
        is_operand = kind in _OPERANDS or op_name(expr) in self.calls
        return self._operand(expr, compiled) if is_operand and is_float_value(expr) else compiled

    def _operand(self, expr: Any, compiled: Expr) -> Expr:
        """Return a compiled operand that notes its values."""
        inner, name = compiled.value, expr.buffer.name if hasattr(expr, "buffer") else str(expr)
        slot = self.slots.get(expr) if isinstance(expr, tirx.Var) else None

        def value(frame: Frame):
            values = inner(frame)
            if frame.operands is not None:
                bound = frame.block.operands.get(slot)
                frame.operands += [(name, values)] if bound is None else bound
            return values

        return compiled._replace(value=value)

    def memory_of(self, buffer: tirx.Buffer) -> str:
        """Return the name of the memory in which a tensor is stored."""
        return "multicast" if buffer.data in self.multicasts else buffer.scope()

    def constant(self, expr: Any) -> Any:
        """Return the Python value of a literal, or None."""
        return expr.value if isinstance(expr, (tirx.IntImm, tirx.FloatImm)) else None

    def _binary(self, kind, expr, loc: str) -> Expr:
        f, a, b = BINARY[kind], self.compile(expr.a, loc), self.compile(expr.b, loc)
        left, right = a.value, b.value
        if kind in _DIVISIONS and not is_float(numpy_dtype(expr.b.dtype)):
            right = self._defined(expr.b, right, lambda divisor: divisor == 0, "a division by", loc)
        poison = either(a.poison, b.poison)
        if self.constant(expr.b):
            constant = right(None)
            return Expr(lambda frame: f(left(frame), constant), poison, a.varies)
        return Expr(lambda frame: f(left(frame), right(frame)), poison, a.varies or b.varies)

    def _defined(
        self, expr: tirx.PrimExpr, value: Value, undefined: Callable[[Any], Any], what: str,
        loc: str,
    ) -> Value:  # fmt: skip
        """Return ``value`` of ``expr`` with a check that the operation on it is defined."""
        constant = self.constant(expr)
        if constant is not None and not undefined(constant):
            return value

        def checked(frame: Frame):
            operand = value(frame)
            wrong = undefined(operand)
            if is_poisoned(wrong, frame):
                first = np.asarray(operand)[np.asarray(wrong)].flat[0]
                raise unsupported(f"{what} {first}, for which CUDA defines no result,", loc)
            return operand

        return checked

    def _IntImm(self, expr, loc: str) -> Expr:
        dtype = str(expr.dtype)
        value = int(expr.value) if dtype in ("int32", "int64") else (
            bool(expr.value) if dtype == "bool" else convert(int(expr.value), numpy_dtype(dtype))
        )  # fmt: skip
        return Expr(lambda frame: value, varies=False)

    def _FloatImm(self, expr, loc: str) -> Expr:
        value = np.float64(expr.value).astype(numpy_dtype(expr.dtype))
        return Expr(lambda frame: value, varies=False)

    def _StringImm(self, expr, loc: str) -> Expr:
        value = expr.value
        return Expr(lambda frame: value)

    def _Var(self, var, loc: str) -> Expr:
        if var in self.pending:
            return self.compile(self.pending[var], loc)
        if var not in self.slots:
            raise unsupported(f"unbound variable {var}", loc)
        slot = self.slots[var]

        def value(frame: Frame):
            bound = frame.env[slot]
            if frame.block is not None and frame.block.by_thread[slot]:
                return _of_threads(bound, frame, var, loc)
            return bound

        def poison(frame: Frame):
            bad = frame.block.poisoned[slot] if frame.block is not None else None
            if bad is not None:
                frame.block.machine.memory.unwritten = frame.block.explanations[slot]
            return bad

        varies = var not in self.uniform
        return Expr(
            value if varies else lambda frame: frame.env[slot],
            None if var in self.sound else poison,
            varies,
        )

    _SizeVar = _Var

    def _Cast(self, expr, loc: str) -> Expr:
        inner, dtype = self.compile(expr.value, loc), numpy_dtype(expr.dtype)
        value = inner.value
        if str(expr.dtype) in ("int32", "int64") and str(expr.value.dtype) in ("int32", "bool"):
            return Expr(lambda f: _integer(value(f), dtype), inner.poison, inner.varies)
        return Expr(lambda frame: convert(value(frame), dtype), inner.poison, inner.varies)

    def _Not(self, expr, loc: str) -> Expr:
        inner = self.compile(expr.a, loc)
        return Expr(lambda frame: np.logical_not(inner.value(frame)), inner.poison, inner.varies)

    def _And(self, expr, loc: str) -> Expr:
        return self._short_circuit(expr, loc, np.logical_and, stops_at=False)

    def _Or(self, expr, loc: str) -> Expr:
        return self._short_circuit(expr, loc, np.logical_or, stops_at=True)

    def _short_circuit(self, expr, loc: str, join, stops_at: bool) -> Expr:
        a, b = self.compile(expr.a, loc), self.compile(expr.b, loc)

        def value(frame: Frame):
            first = a.value(frame)
            if not isinstance(first, np.ndarray):
                return first if bool(first) == stops_at else b.value(frame)
            with narrowed(frame, first != stops_at):
                return join(first, b.value(frame))

        def poison(frame: Frame):
            first = a.poison(frame) if a.poison else None
            plain = a.value(frame) if first is None else None
            if first is not None or b.poison is None:
                return first
            if not isinstance(plain, np.ndarray) and bool(plain) == stops_at:
                return None
            return b.poison(frame)

        return Expr(value, poison if a.poison or b.poison else None, a.varies or b.varies)

    def _Select(self, expr, loc: str) -> Expr:
        return self.select(expr.condition, expr.true_value, expr.false_value, loc)

    def select(self, condition, then, other, loc: str) -> Expr:
        """Compile ``then if condition else other``. Each side is evaluated only where chosen."""
        c, a, b = (self.compile(e, loc) for e in (condition, then, other))
        # Vectors that are equal for all threads have no axis of threads.
        of_vectors = then.dtype.lanes > condition.dtype.lanes

        def value(frame: Frame):
            chosen = c.value(frame)
            if not isinstance(chosen, np.ndarray):
                return (a if chosen else b).value(frame)
            with narrowed(frame, chosen):
                first = a.value(frame)
            with narrowed(frame, ~chosen):
                second = b.value(frame)
            wide = chosen[..., None] if of_vectors else _beside(chosen, first, second)
            merged = np.where(wide, first, second)
            if isinstance(first, int) and isinstance(second, int):
                return merged.astype(numpy_dtype(then.dtype), copy=False)
            return merged

        def poison(frame: Frame):
            unclear = c.poison(frame) if c.poison else None
            if unclear is not None:
                return unclear
            chosen = c.value(frame)
            if not isinstance(chosen, np.ndarray):
                side = a if chosen else b
                return side.poison(frame) if side.poison else None
            sides = [e.poison(frame) if e.poison else None for e in (a, b)]
            if all(side is None for side in sides):
                return None
            first, second = (False if s is None else s for s in sides)
            return np.where(_beside(chosen, first, second), first, second)

        varies = a.varies or b.varies or c.varies
        return Expr(value, either(a.poison, b.poison, c.poison) and poison, varies)

    def _Let(self, expr, loc: str) -> Expr:
        inner = self.compile(expr.value, loc)
        slot = self.new_slot(expr.var)
        body = self.compile(expr.body, loc)

        def value(frame: Frame):
            frame.env[slot] = inner.value(frame)
            return body.value(frame)

        return Expr(value, either(inner.poison, body.poison))

    def _Ramp(self, expr, loc: str) -> Expr:
        base, stride = self.compile(expr.base, loc), self.compile(expr.stride, loc)
        steps = np.arange(int(expr.lanes))
        return Expr(
            lambda frame: np.asarray(base.value(frame))[..., None] + stride.value(frame) * steps,
            _for_lanes(base.poison),
        )

    def _Broadcast(self, expr, loc: str) -> Expr:
        if (name := op_name(expr.value)) in self.broadcasts:
            return self.broadcasts[name](self, expr, loc)
        inner, lanes = self.compile(expr.value, loc), int(expr.lanes)
        return Expr(
            lambda frame: np.repeat(np.asarray(inner.value(frame))[..., None], lanes, axis=-1),
            _for_lanes(inner.poison),
        )

    def _Shuffle(self, expr, loc: str) -> Expr:
        vectors, chosen = [self.compile(v, loc) for v in expr.vectors], list(map(int, expr.indices))
        widths = [v.dtype.lanes for v in expr.vectors]
        picked: Any = chosen if len(chosen) > 1 else chosen[0]

        def joined(parts: list[Any]) -> Any:
            lanes = [np.asarray(p)[..., None] if w == 1 else np.asarray(p)
                     for p, w in zip(parts, widths, strict=True)]  # fmt: skip
            outer = np.broadcast_shapes(*(part.shape[:-1] for part in lanes))
            lanes = [np.broadcast_to(p, (*outer, w)) for p, w in zip(lanes, widths, strict=True)]
            return np.concatenate(lanes, axis=-1)[..., picked]

        def poison(frame: Frame):
            masks = [v.poison(frame) if v.poison else None for v in vectors]
            if all(mask is None for mask in masks):
                return None
            return joined([
                np.broadcast_to(False if mask is None else mask, (*np.shape(mask)[:-1], width))
                if width > 1 else (False if mask is None else mask)
                for mask, width in zip(masks, widths, strict=True)
            ])  # fmt: skip

        return Expr(
            lambda frame: joined([v.value(frame) for v in vectors]),
            poison if any(v.poison for v in vectors) else None,
        )

    def indices(self, indices, name: str, loc: str) -> Value:
        """Compile several index expressions, which must not be poison.

        If one of them has lanes, all have an axis for the lanes.
        """
        exprs = [self.compile(i, loc) for i in indices]
        is_scalar = [i.dtype.lanes == 1 for i in indices]
        checked = range(len(exprs)) if not all(is_scalar) else ()
        poison = either(*(e.poison for e in exprs))
        of_exprs = [e.value for e in exprs]
        if all(self.constant(i) is not None for i in indices):
            constants = [value(None) for value in of_exprs]
            return lambda frame: constants
        if all(is_scalar) and poison is None:
            return lambda frame: [value(frame) for value in of_exprs]

        def values(frame: Frame):
            evaluated = [value(frame) for value in of_exprs]
            for n in checked:
                if is_scalar[n] and isinstance(evaluated[n], np.ndarray):
                    evaluated[n] = evaluated[n][..., None]
            if poison is not None and is_poisoned(poison(frame), frame):
                raise uninitialized(f"an index of {name} is computed from", frame.block, loc)
            return evaluated

        return values

    def require_type(self, buffer: tirx.Buffer, loc: str) -> None:
        """Refuse a view of a tile or tensor as another type."""
        tensor = self.declared.get(buffer.data)
        dtype = (
            self.made[self.tiles[buffer.data]][1] if tensor is None else numpy_dtype(tensor.dtype)
        )
        if numpy_dtype(buffer.dtype) != dtype:
            raise unsupported(f"{buffer.name}, a view of another type,", loc)

    def is_reshaped(self, buffer: tirx.Buffer) -> bool:
        """Return whether ``buffer`` may be a view of a tile or tensor of another shape."""
        tensor = self.declared.get(buffer.data)
        if tensor is not None:
            return not structural_equal(buffer.shape, tensor.shape)
        return tuple(int(n) for n in buffer.shape) != self.made[self.tiles[buffer.data]][0]

    def in_whole(self, buffer: tirx.Buffer, values: Value, loc: str) -> Value:
        """Convert indices of ``buffer``, which may be a view, to those of its tile or tensor."""
        self.require_type(buffer, loc)
        if not self.is_reshaped(buffer):
            return values
        extents, name = self.indices(buffer.shape, buffer.name, loc), self.globals.get(buffer.data)
        tile_shape = () if name is not None else self.made[self.tiles[buffer.data]][0]

        def converted(frame: Frame):
            shape = tile_shape if name is None else frame.block.tensors[name].shape
            flat, in_bounds = 0, True
            for index, extent in zip(values(frame), extents(frame), strict=True):
                flat = flat * extent + index
                in_bounds = in_bounds & (index >= 0) & (index < extent)
            end = math.prod(shape)
            flat = (
                np.where(in_bounds, flat, end) if np.ndim(in_bounds) else flat if in_bounds else end
            )
            return unraveled(flat, shape)

        return converted

    def guarded(self, buffer: tirx.Buffer, indices: Any, op: str, loc: str) -> GlobalRef:
        """Return the tensor of an access of a statement that TileLang guards."""
        constants = () if self.is_reshaped(buffer) else tuple(map(constant_term, indices))
        return GlobalRef(self.globals[buffer.data], op, loc, self.guards, constants)

    def _BufferLoad(self, load, loc: str) -> Expr:
        buffer = load.buffer
        values = self.indices(load.indices, buffer.name, loc)
        node = self.node()
        if buffer.data in self.globals:
            ref = self.guarded(buffer, load.indices, "load", loc)
            values = self.in_whole(buffer, values, loc)

            def value(frame: Frame):
                loaded, frame.cache[node] = load_global(frame, ref, values(frame))
                return loaded
        elif buffer.data in self.tiles:
            slot = self.tiles[buffer.data]
            values = self.in_whole(buffer, values, loc)

            def value(frame: Frame):
                frame.block.note_load(slot, frame.mask.overlapping, loc)
                loaded, frame.cache[node] = load_tile(frame, frame.tile(slot), values(frame), loc)
                return loaded
        else:
            raise unsupported(f"tensor {buffer.name} in {self.memory_of(buffer)} memory", loc)
        return Expr(value, lambda frame: frame.cache.get(node))

    def _Call(self, call, loc: str) -> Expr:
        full = getattr(call.op, "name", str(call.op))
        name = full.rsplit(".", 1)[-1]
        if full in self.calls:
            return self.calls[full](self, call, loc)
        if full == "tirx.if_then_else":
            condition, then, other = call.args
            return self.select(condition, then, other, loc)
        if full == "tl.infinity":
            value = np.float64(np.inf).astype(numpy_dtype(call.dtype))
            return Expr(lambda frame: value)
        if full == "tirx.large_uint_imm":  # the lower half is first
            large = numpy_dtype(call.dtype).type(int(call.args[0]) + (int(call.args[1]) << 32))
            return Expr(lambda frame: large)
        if full == "tirx.reinterpret":
            inner, dtype = self.compile(call.args[0], loc), str(call.dtype)
            if dtype == "handle":
                return inner
            target = numpy_dtype(dtype)
            source = numpy_dtype(call.args[0].dtype)
            return Expr(
                lambda f: np.asarray(convert(inner.value(f), source)).view(target)[()],
                inner.poison,
            )
        if full.startswith(("tirx.", "tl.")) and name in FUNCTIONS:
            f = FUNCTIONS[name]
            args = [self.compile(a, loc) for a in call.args]
            values = [a.value for a in args]
            if name in ("shift_left", "shift_right"):
                bits = numpy_dtype(call.args[0].dtype).itemsize * 8
                values[1] = self._defined(
                    call.args[1], values[1], lambda distance: (distance < 0) | (distance >= bits),
                    f"a shift of {bits} bits by", loc,
                )  # fmt: skip
            return Expr(lambda frame: f(*(v(frame) for v in values)),
                        either(*(a.poison for a in args)),
                        any(a.varies for a in args))  # fmt: skip
        raise unsupported(f"call of {full}", loc)


class narrowed:
    """Context in which only the elements that satisfy ``condition`` are active."""

    def __init__(self, frame: Frame, condition: np.ndarray) -> None:
        self.frame, self.condition = frame, condition

    def __enter__(self) -> None:
        self.old = self.frame.active, self.frame.mask
        self.frame.narrow(self.condition)

    def __exit__(self, *_: Any) -> None:
        self.frame.active, self.frame.mask = self.old


def _beside(condition: np.ndarray, *values: Any) -> np.ndarray:
    """Return a condition of threads in a shape that broadcasts with values that have lanes."""
    max_ndim = max((np.ndim(value) for value in values), default=0)
    return condition[..., None] if max_ndim > condition.ndim else condition


def unraveled(flat: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return the indices of flat elements; the first index may be out of bounds."""
    out = []
    for extent in reversed(shape[1:]):
        out.insert(0, flat % extent)
        flat = flat // extent
    return [flat, *out]


def constant_term(index: tirx.PrimExpr) -> int:
    """Return the constant of a sum, such as 1 of ``i * 4 + 1``; 0 if an operand reads memory."""
    terms = [] if has_loads(index) else summands(index, 1)
    return sum(factor * value.value for factor, value in terms if isinstance(value, tirx.IntImm))


def _integer(value: Any, dtype: np.dtype) -> Any:
    return value.astype(dtype) if isinstance(value, np.ndarray) else int(value)


def _of_threads(value: Any, frame: Frame, var: Any, loc: str) -> Any:
    """Convert a value that differs between threads for the active threads of the frame."""
    if frame.mask.single is not None:
        return value[frame.mask.single][()]
    if frame.space is not None:
        active = value[frame.mask.on]
        if (active == active[0]).all():
            return active[0]
        raise unsupported(f"{var}, which differs between threads, in T.Parallel", loc)
    return value
