"""Implicit operands: the device template needs them, and the compiler supplies them."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tilelang.language.kernel import get_thread_extents
from tvm import tirx

from .declaration.operands import buffer_of, ref_dtype
from .spec import Builtin, builtin_of, register_op
from .symmetric import ragged_axes

CONTEXT = "tileweave.context"

LAUNCH = "tileweave.launch"

register_op(CONTEXT, "address of the runtime's context on this device", 0)
register_op(LAUNCH, "number of this launch in the trace that is recorded; -1 without a trace", 0)


@dataclass(frozen=True)
class Loc:
    """Source location of a builtin, and the type of its flag, for messages.

    Attributes:
        inferred: whether the compiler inserted the builtin.
    """

    op: str
    operand: str
    file: str
    line: int
    dtype: str = ""
    inferred: bool = False

    def __str__(self) -> str:
        return f"{self.op}({self.operand}) at {self.file}:{self.line}"


LOCS: dict[int, Loc] = {}
"""Locations of builtins that can time out, by the number that their device code reports.

Every rank traces every program, so the table is complete on each rank, even if the kernel comes
from a cache."""


def supply(kind: str, spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    """Return the implicit operand ``kind`` of one traced builtin."""
    return _SUPPLIERS[kind](spec, arguments)


def _context(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    return tirx.call_intrin("int64", tvm.ir.Op.get(CONTEXT))


def _launch(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    return tirx.call_intrin("int32", tvm.ir.Op.get(LAUNCH))


def register_loc(loc: Loc) -> tirx.IntImm:
    """Record ``loc``, and return the number that device code reports for it."""
    number = zlib.crc32(str(loc).encode()) & 0x7FFFFFFF
    LOCS[number] = loc
    return tirx.IntImm("int32", number)


def loc_of(call: tirx.Call) -> Loc | None:
    """Return the location of ``call``, a builtin with the operand ``loc``.

    Return None if this process did not trace the call.
    """
    return LOCS.get(int(builtin_of(call).operand(call, "loc")))


def _loc(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    from tilelang.language.eager.builder import Builder

    builder = Builder.current()
    loc = Loc(
        spec.name,
        str(arguments["ref"]).replace("T.tileweave.", "W.") if "ref" in arguments else "",
        str(getattr(builder, "current_file", "?")),
        int(getattr(builder, "current_line", 0)),
        ref_dtype(arguments["ref"]) if "ref" in arguments else "",
    )
    return register_loc(loc)


def _thread(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    index, stride = tirx.IntImm("int32", 0), 1
    for binding, extent in zip(T.get_thread_bindings(), get_thread_extents(), strict=False):
        index, stride = index + binding * stride, stride * extent
    return tvm.arith.Analyzer().simplify(index)


def _threads(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    return tirx.IntImm("int32", math.prod(int(e) for e in get_thread_extents()))


def _placeholder(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    """Return a placeholder for memory that a pass allocates."""
    return tirx.reinterpret("handle", tirx.const(0, "uint64"))


def _rows(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    return _ragged_extents(arguments)[0]


def _row_size(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    return tirx.IntImm("int32", math.prod(map(int, _ragged_extents(arguments)[1:])))


def _tile(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    """Return the rows of a whole segment: the inference chooses smaller tiles."""
    return _ragged_extents(arguments)[0]


def _ragged_extents(arguments: dict[str, Any]) -> list[tirx.PrimExpr]:
    """Return the extents of a segment of the ragged tensor ``ref``: rows, and those of a row."""
    buffer = buffer_of(arguments["ref"])
    return list(buffer.shape[1 + ragged_axes(buffer) :])


_SUPPLIERS = {
    "context": _context,
    "launch": _launch,
    "loc": _loc,
    "row_size": _row_size,
    "rows": _rows,
    "thread": _thread,
    "threads": _threads,
    "tile": _tile,
    "total": _placeholder,
}
