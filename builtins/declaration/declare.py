"""Declare a builtin by one typed stub. The op, the checks and the lowering follow from it.

The stub's signature is data. Parameters annotated with a pointer or a value are operands,
``Literal`` parameters are qualifiers, and ``Constant`` parameters are compile-time integers. The
docstring is the manual.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from tvm import tirx

from ..errors import reject
from ..implicit import supply
from ..spec import BUILTINS, Builtin, DataOf, ElementOf, Roles, TraceOnly, register_op
from .operands import as_vector, ptx_type_of, result_dtype, trace_operand


def builtin(**roles: Any) -> Callable[[Callable[..., Any]], Callable[..., tirx.PrimExpr]]:
    """Declare a builtin from its stub.

    The stub's body runs when the program is traced. It may refuse its arguments, and may return a
    dict of arguments to replace.

    Args:
        roles: the fields of ``spec.Roles`` that differ from their defaults.
    """

    def declare(stub: Callable[..., Any]) -> Callable[..., tirx.PrimExpr]:
        spec = _declaration(stub, Roles(**roles))
        register_op(spec.op_name, spec.doc.split("\n")[0], spec.arity)
        BUILTINS[spec.op_name] = spec

        @functools.wraps(stub)
        def trace(*args: Any, **kwargs: Any) -> tirx.PrimExpr:
            try:
                bound = spec.signature.bind(*args, **kwargs)
            except TypeError as error:
                usage = f"{spec.name}{_usage(spec.signature)}"
                raise reject(spec.name, str(error), usage) from None
            bound.apply_defaults()
            _check_qualifiers(spec, bound.arguments)
            for parameter, kind in spec.operands:
                if isinstance(kind, (DataOf, ElementOf)):
                    bound.arguments[parameter] = as_vector(bound.arguments[parameter])
            return _trace(spec, {**bound.arguments, **(stub(**bound.arguments) or {})})

        return trace

    return declare


def _declaration(stub: Callable[..., Any], roles: Roles) -> Builtin:
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
    returns_memory = bool(operands) and result is not type(None)
    observes = roles.observes or bool(roles.waits) or returns_memory
    return Builtin(
        **{**vars(roles), "observes": observes},
        name=stub.__name__,
        operands=tuple(operands),
        qualifiers=tuple(qualifiers),
        result=result.__metadata__[0] if typing.get_origin(result) is Annotated else None,
        signature=signature,
        doc=inspect.getdoc(stub) or "",
    )


def _usage(signature: inspect.Signature) -> inspect.Signature:
    parameters = signature.parameters.values()
    return inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])


def _without_none(hint: Any) -> Any:
    """Return ``X`` for ``X | None``. Python 3.10 adds ``| None`` if the default is None."""
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
