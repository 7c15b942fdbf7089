"""Let the host bind what only the runtime knows: rank, world size, and the runtime's context."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..builtins.declare import builtin_of
from .walk import builtins_in, calls_in, op_name

HOST_VALUES = {
    "tileweave.rank": ("rank", "int32"),
    "tileweave.world_size": ("world_size", "int32"),
    "tileweave.context": ("tileweave_context", "int64"),
}
"""Operators whose value the host binds -> name and type of the kernel parameter they become."""


def bind_runtime(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Evaluate run-time values on the host, once a launch, and pass them to the kernel as scalars.

    The host part of the program calls a global function of the same name, which the runtime registers.
    The signature does not change, so this works under stock ``tilelang.jit`` as well. A program with a
    multimem builtin first asks the runtime whether the machine has multicast.

    Before: ``... T.tileweave.rank() ...``
    After:  ``rank: T.int32 = T.call_packed("tileweave.rank"); T.assume(rank >= 0); ... rank ...``
    """
    used = sorted({op_name(c) for c in calls_in(func.body, lambda c: op_name(c) in HOST_VALUES)})
    variables = {name: tirx.Var(*HOST_VALUES[name]) for name in used}

    def bound(node):
        return variables.get(op_name(node)) if isinstance(node, tirx.Call) else None

    body = ir_transform(func.body, None, bound, ["tirx.Call"])
    for name in ("tileweave.rank", "tileweave.world_size"):
        if name in variables:
            least = 0 if name == "tileweave.rank" else 1
            body = tirx.AttrStmt(
                variables[name] >= least, "tl.assume", tirx.StringImm(f"{HOST_VALUES[name][0]} of the group"), body
            )
    head: list[tirx.Stmt] = []
    if any(builtin_of(c).name.startswith("multimem") for c in builtins_in(func.body)):
        head.append(tirx.Evaluate(_host_call("int32", "tileweave.require_multicast", func)))
    head += [tirx.Bind(v, _host_call(HOST_VALUES[n][1], n)) for n, v in variables.items()]
    return func.with_body(tirx.SeqStmt([*head, body])) if head else func


def _host_call(dtype: str, name: str, func: tirx.PrimFunc | None = None) -> tirx.Call:
    arguments = [tirx.StringImm(name)]
    if func is not None:
        arguments.append(tirx.StringImm(str(func.attrs["global_symbol"])))
    return tirx.Call(dtype, tvm.ir.Op.get("tirx.tvm_call_packed"), arguments)
