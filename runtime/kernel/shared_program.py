"""Integers of programs as arguments, so that programs for several sizes share one kernel.

Programs for different numbers of rows mostly differ in integers: extents, strides, numbers of
tiles, and the counts that the inference inserts. Each is inferred and proven for its sizes. Where
only such integers differ, one kernel receives them at each launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.spec import ConstantBool, ConstantInt, builtin_of
from ...passes.ir.group import shifted_heap_tensors
from ...passes.ir.implicit import IMPLICIT, implicit_of
from ...passes.ir.scratch import with_buffers
from ...passes.ir.sizes import SIZES
from ...passes.ir.walk import nodes_in, op_name
from ...passes.sync.infer.options import OPTIONS, options_of
from ...passes.sync.regions.copies import COPIES

_TYPES = frozenset({"int32", "int64", "uint32"})
_INT32 = range(-(1 << 31), 1 << 31)
_LOC = "loc"
_OF_INFERENCE = (COPIES, IMPLICIT, OPTIONS, SIZES)
"""Attributes with sizes, which the passes after the inference read at most in part."""


@dataclass(frozen=True, eq=False)
class SizedProgram:
    """A program for a group, as its form and its integers.

    Attributes:
        program: the program.
    """

    program: tirx.PrimFunc

    @cached_property
    def integers(self) -> tuple[int, ...]:
        """The integers of the body, then those of the shapes and strides of the parameters."""
        values: list[int] = []

        def note(node: tirx.PrimExpr) -> tirx.PrimExpr:
            if _is_integer(node):
                values.append(int(node))
            return node

        _change(self.program, note)
        return tuple(values)

    @cached_property
    def form(self) -> Hashable:
        """Identity of the programs that differ from this one only in integers that may be
        arguments."""
        func = _change(self.program, _hidden, hides_locs=True)
        for name in _OF_INFERENCE:
            func = func.without_attr(name)
        packed = [[_is_packed(b, n) for n in range(len(b.strides))] for b in _tensors(self.program)]
        implicit = [replace(i, shape=(len(i.shape),)) for i in implicit_of(self.program)]
        options = replace(options_of(self.program), granule={})
        fixed = map(str, (*_fixed_integers(self.program.body), packed, implicit, options))
        return tvm.ir.structural_hash(func, map_free_vars=True), *fixed


@dataclass(frozen=True, eq=False)
class SharedProgram:
    """Program for all sizes of one form, with arguments for the integers that differ.

    The arguments follow those of the program, before the implicit ones.

    Attributes:
        program: the program.
        integers: those of the first of its instances, in the order of ``SizedProgram``.
        places: for each argument, the places of the integers that it replaces.
    """

    program: tirx.PrimFunc
    integers: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, instances: Sequence[SizedProgram]) -> SharedProgram:
        """Return the program that fits all ``instances``.

        Args:
            instances: programs of one form. Integers that are equal in all of them are constants.
        """
        first = instances[0]
        columns: dict[tuple[int, ...], list[int]] = {}
        for place, column in enumerate(zip(*(i.integers for i in instances), strict=True)):
            if len(set(column)) > 1:
                columns.setdefault(column, []).append(place)
        places = tuple(map(tuple, columns.values()))
        if not places:
            return cls(first.program, first.integers, places)
        parameters = [tirx.SizeVar(f"size_{n}", _type_of(c)) for n, c in enumerate(columns)]
        variables = {p: v for v, ps in zip(parameters, places, strict=True) for p in ps}
        return cls(_lifted(first.program, parameters, variables), first.integers, places)

    @cached_property
    def parameters(self) -> list[tirx.Var]:
        """The parameters of the program that are arguments for integers."""
        if not self.places:
            return []
        return [p for p in self.program.params if isinstance(p, tirx.SizeVar)]

    def arguments(self, instance: SizedProgram) -> tuple[int, ...] | None:
        """Return the arguments with which it is ``instance``, a program of the same form; None if
        it has no such arguments."""
        arguments, integers = [], [*self.integers]
        for places, variable in zip(self.places, self.parameters, strict=True):
            value = instance.integers[places[0]]
            if str(variable.dtype) == "int32" and value not in _INT32:
                return None
            arguments.append(value)
            for place in places:
                integers[place] = value
        return tuple(arguments) if tuple(integers) == instance.integers else None


def _lifted(
    func: tirx.PrimFunc, parameters: Sequence[tirx.Var], variables: Mapping[int, tirx.Var]
) -> tirx.PrimFunc:
    """Return ``func`` with ``parameters``, which replace the integers at the places of
    ``variables``."""
    places = count()

    def argument(node: tirx.PrimExpr) -> tirx.PrimExpr:
        variable = variables.get(next(places)) if _is_integer(node) else None
        if variable is None:
            return node
        return variable if variable.dtype == node.dtype else tirx.Cast(node.dtype, variable)

    lifted = _change(func, argument)
    position = len(func.params) - len(implicit_of(func))
    lifted = tirx.PrimFunc(
        [*func.params[:position], *parameters, *func.params[position:]],
        _with_positive_divisors(lifted.body, parameters),
        func.ret_type, lifted.buffer_map, func.attrs, func.span,
    )  # fmt: skip
    return shifted_heap_tensors(lifted, position, len(parameters))


def _is_integer(expr: tirx.PrimExpr) -> bool:
    return isinstance(expr, tirx.IntImm) and str(expr.dtype) in _TYPES


def _hidden(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an integer as 1, another expression unchanged."""
    return tirx.IntImm(expr.dtype, 1) if _is_integer(expr) else expr


def _type_of(values: Sequence[int]) -> str:
    return "int32" if all(value in _INT32 for value in values) else "int64"


def _is_packed(buffer: tirx.Buffer, axis: int) -> bool:
    """Return whether the stride of an axis follows from the next axis."""
    if axis + 1 == len(buffer.strides):
        return False
    stride, *inner = buffer.strides[axis], buffer.strides[axis + 1], buffer.shape[axis + 1]
    return all(map(_is_integer, (stride, *inner))) and int(stride) == math.prod(map(int, inner))


def _tensors(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    return [func.buffer_map[p] for p in func.params if p in func.buffer_map]


def _change(
    func: tirx.PrimFunc, change: Callable[[tirx.PrimExpr], tirx.PrimExpr], hides_locs: bool = False
) -> tirx.PrimFunc:
    """Replace the integers of ``func`` that may be arguments, always in one order.

    These are not the numbers of elements of vectors; locations of builtins, which have no meaning
    of their own; and strides that follow from a shape.

    Args:
        change: returns what replaces an integer; it also receives extents that are none.
        hides_locs: whether all locations become equal.
    """
    body = _change_body(func.body, change, hides_locs)
    buffers = {b.data: _change_buffer(b, change) for b in _tensors(func)}
    body = with_buffers(body, buffers, lambda allocation: allocation)
    buffer_map = {p: buffers[b.data] for p, b in func.buffer_map.items()}
    return tirx.PrimFunc(func.params, body, func.ret_type, buffer_map, func.attrs, func.span)


def _change_buffer(
    buffer: tirx.Buffer, change: Callable[[tirx.PrimExpr], tirx.PrimExpr]
) -> tirx.Buffer:
    """Replace the integers of a tensor. Strides that follow from a shape become products, whose
    divisors TileLang sees."""
    shape, strides = list(map(change, buffer.shape)), []
    for axis in reversed(range(len(buffer.strides))):
        is_packed = _is_packed(buffer, axis)
        stride = strides[0] * shape[axis + 1] if is_packed else change(buffer.strides[axis])
        strides.insert(0, stride)
    return tirx.decl_buffer(
        shape, buffer.dtype, buffer.name, data=buffer.data, strides=strides, scope=buffer.scope(),
        elem_offset=buffer.elem_offset, data_alignment=buffer.data_alignment,
        offset_factor=buffer.offset_factor,
    )  # fmt: skip


def _change_body(
    body: tirx.Stmt, change: Callable[[tirx.PrimExpr], tirx.PrimExpr], hides_locs: bool
) -> tirx.Stmt:
    def integer(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
        return change(node) if _is_integer(node) else None

    def operands(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
        """Change those operands of vectors and builtins that may be arguments."""
        if isinstance(node, tirx.Ramp):
            return tirx.Ramp(inside(node.base), inside(node.stride), node.lanes)
        if isinstance(node, tirx.Broadcast):
            return tirx.Broadcast(inside(node.value), node.lanes)
        place = _loc_place(node) if isinstance(node, tirx.Call) else None
        if place is None:
            return None
        loc = tirx.StringImm("") if hides_locs else node.args[place]
        args = [loc if n == place else inside(arg) for n, arg in enumerate(node.args)]
        return tirx.Call(node.dtype, node.op, args, node.annotations, node.span)

    def inside(expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return ir_transform(tirx.Evaluate(expr), operands, integer, kinds).value

    kinds = ["ir.IntImm", "tirx.Ramp", "tirx.Broadcast", "tirx.Call"]
    return ir_transform(body, operands, integer, kinds)


def _with_positive_divisors(body: tirx.Stmt, arguments: Any) -> tirx.Stmt:
    """Let the compiler know that divisors are positive: it would round towards minus infinity for
    either sign."""
    sizes = frozenset(arguments)

    def visit(node: tirx.FloorDiv | tirx.FloorMod) -> tirx.PrimExpr | None:
        divisor = node.b.value if isinstance(node.b, tirx.Cast) else node.b
        if divisor not in sizes:
            return None
        return type(node)(node.a, tirx.max(node.b, tirx.const(1, node.b.dtype)))

    return ir_transform(body, None, visit, ["tirx.FloorDiv", "tirx.FloorMod"])


def _loc_place(call: tirx.Call) -> int | None:
    """Return which operand of a builtin is its location, a number without a meaning of its own."""
    spec = builtin_of(call)
    names = [] if spec is None else [*(n for n, _ in spec.operands), *spec.implicit]
    return names.index(_LOC) if _LOC in names else None


def _fixed_integers(body: tirx.Stmt) -> Iterator[Any]:
    """Yield the integers that must be constants: sizes of tiles, threads and unrolled loops, and
    what templates or TileLang's tile operators read."""
    for node in nodes_in(body, tirx.SBlock, tirx.AllocBuffer, tirx.For, tirx.Call):
        match node:
            case tirx.SBlock():
                yield from (tuple(b.shape) for b in node.alloc_buffers)
            case tirx.AllocBuffer():
                yield tuple(node.buffer.shape)
            case tirx.For():
                if node.kind != tirx.ForKind.SERIAL and not _is_block_axis(node):
                    yield node.min, node.extent
            case tirx.Call():
                yield from _fixed_operands(node)


def _is_block_axis(loop: tirx.For) -> bool:
    binding = loop.thread_binding
    return binding is not None and binding.thread_tag.startswith("blockIdx.")


def _fixed_operands(call: tirx.Call) -> Iterator[Any]:
    spec = builtin_of(call)
    if spec is not None:
        operands = zip(spec.operands, call.args, strict=False)
        yield from (a for (_, k), a in operands if isinstance(k, ConstantInt | ConstantBool))
    elif op_name(call).startswith("tl."):
        yield from (a for a in call.args if isinstance(a, tirx.IntImm))
