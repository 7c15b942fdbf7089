"""Events of a kernel: the calls that record them, and their table."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from tilelang import tvm
from tvm import tirx

from ...builtins.debug import record
from ...builtins.implicit import CONTEXT, LAUNCH
from ...builtins.spec import declaration_of

RECORD = declaration_of(record)


def record_call(
    event: int,
    begin: tirx.PrimExpr | None = None,
    flag: tirx.PrimExpr | None = None,
    seen: tirx.PrimExpr | None = None,
    wanted: tirx.PrimExpr | None = None,
    parameters: list[tirx.PrimExpr] | None = None,
) -> tirx.Stmt:
    """Return a call of ``record``.

    Args:
        parameters: the context and the number of the launch; by default the host binds them.
    """
    zero = tirx.IntImm("int64", 0)
    operands = [
        tirx.IntImm("int32", event),
        zero if begin is None else begin,
        tirx.reinterpret("handle", tirx.IntImm("uint64", 0)) if flag is None else flag,
        zero if seen is None else tirx.Cast("int64", seen),
        zero if wanted is None else tirx.Cast("int64", wanted),
    ]
    if parameters is None:
        parameters = [
            tirx.call_intrin("int64", tvm.ir.Op.get(CONTEXT)),
            tirx.call_intrin("int32", tvm.ir.Op.get(LAUNCH)),
        ]
    return tirx.Evaluate(tirx.call_intrin("handle", RECORD.op, *operands, *parameters))


Event = dict[str, Any]


def encode_events(events: list[Event]) -> str:
    """Return a table of events as letters and digits, which any host code can hold."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(events).encode())).decode()


def decode_events(table: str) -> list[Event]:
    """Return the table that ``encode_events`` returned; the number of an event is its index.

    The fields of an event are its ``kind`` (``begin`` and ``end`` of a block, ``loop_begin`` and
    ``loop_end``, ``wait``, ``signal``, ``transfer``), its ``kernel``, the ``role`` of its threads,
    and, if it has them, ``op``, ``loc``, ``tensor``, the ``relation`` of a wait, the ``change`` of
    a signal, and whether a transfer ``writes``.
    """
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(table)))
