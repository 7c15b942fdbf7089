"""Bind run-time values on the host: the rank, the world size, and the runtime's context."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.implicit import CONTEXT, LAUNCH
from ...builtins.ranks import RANK, WORLD_SIZE
from ..ir.group import GROUP_SIZE
from ..ir.host import BEGIN_LAUNCH, BIND, REQUIRE_MULTICAST
from ..ir.walk import calls_in, op_name, uses_multicast

_PARAMETERS = {
    CONTEXT: ("tileweave_context", "int64"),
    RANK: ("rank", "int32"),
    WORLD_SIZE: ("world_size", "int32"),
}
"""Operator whose value the host binds -> name and type of its kernel parameter."""


_FFI_ANY_VALUE = 15  # number of the value field of a TVMFFIAny slot, for tvm_struct_get


def bind_runtime(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Evaluate run-time values on the host at each launch, and pass them to the kernel as scalars.

    The host code of the program calls a global function that the runtime registers. The signature
    of the program does not change, so it also works with stock ``tilelang.jit``. The function
    writes the values to slots on the host's stack, because TileLang's C host code drops the result
    of a packed call. A program with a multimem builtin first checks that the machine has multicast.

    Before: ``... T.tileweave.rank() ...``
    After:  ``slots = T.tvm_stack_alloca(...);
    T.call_packed("tileweave.bind", slots, "tileweave.rank");
    rank: T.int32 = slots[0]; T.assume(rank >= 0); ... rank ...``
    """
    used = sorted({op_name(c) for c in calls_in(func.body, lambda c: op_name(c) in _PARAMETERS)})
    launched = [LAUNCH] if calls_in(func.body, lambda c: op_name(c) == LAUNCH) else []
    variables = {name: tirx.Var(*_PARAMETERS[name]) for name in used}
    variables |= {name: tirx.Var("tileweave_launch", "int32") for name in launched}

    def bound(node):
        return variables.get(op_name(node))

    body = ir_transform(func.body, None, bound, ["tirx.Call"])
    for name, low in ((RANK, 0), (WORLD_SIZE, 1)):
        if name in variables:
            body = tirx.AttrStmt(variables[name] >= low, "tl.assume", tirx.StringImm(name), body)
    if RANK in variables and GROUP_SIZE in func.attrs:
        # Without this bound TileLang checks the rank index at each access of S[rank, ...].
        is_in_range = variables[RANK] < func.attrs[GROUP_SIZE]
        body = tirx.AttrStmt(is_in_range, "tl.assume", tirx.StringImm(RANK), body)
    head: list[tirx.Stmt] = []
    if uses_multicast(func.body):
        head.append(_call_packed(REQUIRE_MULTICAST, _name(func)))
    if used:
        bindings = [variables[name] for name in used]
        head += _bindings("tileweave_slots", bindings, BIND, tirx.StringImm(",".join(used)))
    if launched:
        head += _bindings("tileweave_launches", [variables[LAUNCH]], BEGIN_LAUNCH, _name(func))
    return func.with_body(tirx.SeqStmt([*head, body])) if head else func


def _name(func: tirx.PrimFunc) -> tirx.StringImm:
    return tirx.StringImm(str(func.attrs["global_symbol"]))


def _bindings(
    name: str, variables: list[tirx.Var], function: str, argument: tirx.PrimExpr
) -> list[tirx.Stmt]:
    """Return statements that bind ``variables`` to the values which ``function`` writes to slots.

    Args:
        name: name of the slots.
        argument: argument of ``function`` after the slots.
    """
    slots = tirx.Var(name, "handle")
    alloca = tvm.ir.Op.get("tirx.tvm_stack_alloca")
    slot = tvm.ir.Op.get("tirx.tvm_struct_get")
    allocated = tirx.call_intrin("handle", alloca, tirx.StringImm("tvm_ffi_any"), len(variables))
    bindings = [tirx.Bind(slots, allocated), _call_packed(function, slots, argument)]
    for index, variable in enumerate(variables):
        value = tirx.call_intrin("int64", slot, slots, index, _FFI_ANY_VALUE)
        bindings.append(tirx.Bind(variable, tirx.Cast(variable.dtype, value)))
    return bindings


def _call_packed(name: str, *args: tirx.PrimExpr) -> tirx.Stmt:
    op = tvm.ir.Op.get("tirx.tvm_call_packed")
    return tirx.Evaluate(tirx.call_intrin("int32", op, tirx.StringImm(name), *args))
