"""Declare a builtin as one typed stub, from which the op, the checks and the lowering follow.

The stub's signature is data. Parameters annotated with a pointer or a value are operands,
``Literal`` parameters are qualifiers, ``Constant`` parameters are compile-time integers; the
docstring is the manual.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from tvm import tirx

from .errors import reject
from .implicit import supply
from .operands import as_vector, ptx_type_of, result_dtype, trace_operand
from .spec import (
    BUILTINS,
    Builtin,
    BulkGroup,
    ElementOf,
    Level,
    Participants,
    Relation,
    TraceOnly,
    register_op,
)


def builtin(
    *,
    types: str = "",
    op_types: Mapping[str, str] | None = None,
    vectors: str = "",
    implicit: Sequence[str] = (),
    level: Level = "thread",
    barrier_before: bool = False,
    barrier_after: bool = False,
    moves: str = "",
    combines: str = "",
    async_proxy: bool = False,
    proxy_fence: bool = False,
    bulk_group: BulkGroup = "",
    participants: Participants = "",
    waits: Relation = "",
    observes: bool = False,
    multicast: bool = False,
    sm: int = 80,
    type_sm: Mapping[str, int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., tirx.PrimExpr]]:
    """Declare a builtin from its stub, with its roles.

    Passes, runtime and simulator read the roles, and know no builtin by its name. What a builtin
    reads and writes follows from its operands; whether it releases or acquires, from its ``sem``.

    The stub's body runs when the program is traced. It may refuse its arguments, and may return a
    dict of those it replaces.

    Args:
        types: PTX types the instruction takes, when it does not take all.
        op_types: PTX types for one value of the qualifier ``op``, where they are fewer.
        vectors: those it also takes as vectors of 2 and 4 (``.v2``, ``.v4``).
        implicit: operands that the compiler supplies after the declared ones; see ``implicit.py``.
        level: who runs it. A ``leader`` builtin is run by one thread of the block, whoever reaches
            it.
        barrier_before, barrier_after: the block meets before or after it.
        moves: operand with the number of elements that it copies from the operand it reads to the
            operand it writes. Without, it only orders memory, or acts on single elements.
        combines: operation of an atomic change, such as ``add``, where the builtin has no
            qualifier ``op`` that names it and does not replace the element.
        async_proxy: it accesses shared memory by the async proxy and returns before that ends.
            Before the block meets, every thread makes its own accesses to shared memory visible
            there.
        proxy_fence: it is a fence between ordinary accesses and those of the async proxy.
        bulk_group: it closes a group of asynchronous stores, or waits for groups by its operands
            ``n`` and ``read``.
        participants: it is a barrier of these; it releases and acquires for the whole block.
        waits: it waits until a flag has this relation to its second operand, and guards the loads
            after it.
        observes: it reads what others may change meanwhile. Builtins that wait or answer do.
        multicast: its first operand is an address of multicast memory.
        sm: the first compute capability (80, 90, 100) that has the instruction.
        type_sm: the same for single PTX types, where it is a later one.
    """

    def declare(stub: Callable[..., Any]) -> Callable[..., tirx.PrimExpr]:
        name = stub.__name__
        hints = typing.get_type_hints(stub, include_extras=True)
        signature = inspect.signature(stub)
        operands, qualifiers = [], []
        for parameter in signature.parameters:
            hint = _without_none(hints[parameter])
            if typing.get_origin(hint) is Literal:
                qualifiers.append((parameter, typing.get_args(hint)))
            elif not isinstance(hint.__metadata__[0], TraceOnly):
                operands.append((parameter, hint.__metadata__[0]))
        result = hints.get("return")
        spec = Builtin(
            name=name,
            operands=tuple(operands),
            qualifiers=tuple(qualifiers),
            result=result.__metadata__[0] if typing.get_origin(result) is Annotated else None,
            types=tuple(types.split()),
            op_types={op: tuple(legal.split()) for op, legal in (op_types or {}).items()},
            vectors=tuple(vectors.split()),
            implicit=tuple(implicit),
            level=level,
            barrier_before=barrier_before,
            barrier_after=barrier_after,
            moves=moves,
            combines=combines,
            async_proxy=async_proxy,
            proxy_fence=proxy_fence,
            bulk_group=bulk_group,
            participants=participants,
            waits=waits,
            observes=observes or bool(waits) or bool(operands and result is not type(None)),
            multicast=multicast,
            sm=sm,
            type_sm=dict(type_sm or {}),
            signature=signature,
            doc=inspect.getdoc(stub) or "",
        )
        register_op(spec.op_name, spec.doc.split("\n")[0], spec.arity)
        BUILTINS[spec.op_name] = spec

        @functools.wraps(stub)
        def trace(*args: Any, **kwargs: Any) -> tirx.PrimExpr:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise reject(name, str(error), f"{name}{_usage(signature)}") from None
            bound.apply_defaults()
            _check_qualifiers(spec, bound.arguments)
            for parameter, kind in spec.operands:
                if isinstance(kind, ElementOf):
                    bound.arguments[parameter] = as_vector(bound.arguments[parameter])
            return _trace(spec, {**bound.arguments, **(stub(**bound.arguments) or {})})

        return trace

    return declare


def _usage(signature: inspect.Signature) -> inspect.Signature:
    parameters = signature.parameters.values()
    return inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])


def _without_none(hint: Any) -> Any:
    """``X`` for ``X | None``; Python 3.10 reads every default of None as such."""
    members = [m for m in typing.get_args(hint) if m is not type(None)]
    return members[0] if type(None) in typing.get_args(hint) else hint


def _check_qualifiers(spec: Builtin, arguments: dict[str, Any]) -> None:
    for parameter, legal in spec.qualifiers:
        if arguments[parameter] not in legal:
            raise reject(
                spec.name, f"{parameter}={arguments[parameter]!r}", " or ".join(map(repr, legal))
            )


def _trace(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    operands: list[tirx.PrimExpr] = []
    for parameter, kind in spec.operands:
        operands.append(trace_operand(spec, parameter, kind, arguments))
    operands.extend(supply(kind, spec, arguments) for kind in spec.implicit)
    qualifiers = [arguments[parameter] for parameter, _ in spec.qualifiers]
    if spec.types:
        qualifiers.insert(0, ptx_type_of(spec, arguments))
    strings = [tirx.StringImm(q) for q in qualifiers]
    return tirx.call_intrin(result_dtype(spec, arguments), spec.op, *operands, *strings)
