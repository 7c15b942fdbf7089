"""CUDA functions that a program calls: NumPy functions stand in for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx

from ...passes.ir.walk import base_of, op_name
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.values import convert, numpy_dtype
from ..report.errors import unsupported
from .accesses import uniform
from .expressions import Expr, Value
from .statements import Statements

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def stand_in(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a NumPy function that the simulator calls in place of the CUDA function ``name`` of
    ``T.call_extern``.

    It is called once for all threads, or points of a ``T.Parallel``, that make the call, with an
    argument for each of theirs:

    - a pointer to registers: an array (threads, elements), from the pointer to the end of the
      buffer. The function writes results into it.
    - a number: itself or, if it differs between threads, an array (threads, 1).

    It returns the result of each thread, if the program uses it. Reads of uninitialized registers
    by the function are not found.

    Before: ``T.call_extern("handle", "decode", T.access_ptr(packed, "r"), T.access_ptr(x, "w"))``
    With:   ``@tw.stand_in("decode")``, ``def decode(packed, x): x[:, 0::2] = packed & 15``
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _FUNCTIONS[name] = function
        return function

    return register


@stand_in("DP4A")
def _dp4a(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> None:
    total[:, 0] += (a[:, :4].astype(np.int32) * b[:, :4]).sum(axis=1, dtype=np.int32)


for _kind in ("", "_PAYLOAD_F32", "_PAYLOAD_U32"):
    stand_in(f"TL_IKET_EVENT{_kind}")(lambda *_: None)  # events of a profiler


class _Registers(NamedTuple):
    """Operand that is a pointer to registers of each thread."""

    slot: int
    index: Value
    name: str
    loc: str

    def read(self, frame: Frame) -> tuple[tuple, np.ndarray]:
        """Return the place of the elements from the pointer on, by thread, and their values."""
        tile = frame.tile(self.slot)
        tile.spread(len(frame.mask.on))
        what = f"a pointer to {self.name} that differs between threads"
        index = [uniform(i, frame, self.loc, what) for i in self.index(frame)]
        shape = tile.data.shape[1:]
        elements = np.arange(np.ravel_multi_index(index, shape), int(np.prod(shape)))
        key = (frame.mask.threads[:, None], *np.unravel_index(elements, shape))
        return key, tile.data[key]


def _operand(c: Statements, node: Any, loc: str) -> _Registers | Expr:
    if not (op_name(node).endswith("access_ptr") or op_name(node) == "tirx.address_of"):
        return c.compile(node, loc)
    buffer, indices = c.pointee(node, loc)
    slot = c.tiles.get(buffer.data, -1)
    if slot < 0 or buffer.scope() not in ("local", "local.var"):
        raise unsupported(f"T.call_extern with a pointer to {buffer.name}, no registers,", loc)
    index = c.indices([base_of(i) for i in indices], buffer.name, loc)
    return _Registers(slot, index, buffer.name, loc)


def extern_value(c: Statements, call: tirx.Call, loc: str) -> Expr:
    """Compile a call of a function that has a stand-in."""
    name = str(call.args[0].value)
    function = _FUNCTIONS.get(name)
    if function is None:
        raise unsupported(f"T.call_extern of {name} without @tw.stand_in({name!r})", loc)
    operands = [_operand(c, node, loc) for node in call.args[1:]]
    dtype = None if call.dtype in ("handle", "void") else numpy_dtype(call.dtype)

    def value(frame: Frame):
        arguments, registers = [], []
        for operand in operands:
            if isinstance(operand, _Registers):
                if frame.space is not None:
                    raise unsupported(f"T.call_extern of {name} with a pointer in T.Parallel", loc)
                key, argument = operand.read(frame)
                registers.append((frame.tile(operand.slot), key, argument))
            else:
                argument = operand.value(frame)
                if isinstance(argument, np.ndarray):
                    argument = np.broadcast_to(argument, frame.shape)[frame.on][:, None]
            arguments.append(argument)
        result = function(*arguments)
        for tile, key, argument in registers:
            tile.data[key] = argument
            tile.set_poison(key, None)
        if dtype is None or result is None:
            return None
        results = np.zeros(frame.shape, dtype)
        results[frame.on] = convert(np.reshape(result, -1), dtype)
        return results if frame.mask.single is None else results[frame.mask.single]

    return Expr(value)


def call_extern(c: Statements, call: tirx.Call, loc: str) -> Step:
    return c.preempted(extern_value(c, call, loc).value, call)
