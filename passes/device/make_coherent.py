"""Make accesses of memory that peers write coherent: atomic operations and cached loads."""

from __future__ import annotations

from collections.abc import Collection

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.declaration.qualifiers import PTX_TYPES
from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.memory_order import acquires
from ..ir.operators import SYSTEM_ATOMIC
from ..ir.walk import builtins_in, calls_in, location, op_name, rewrite_children

_TYPES = {dtype: ptx for ptx, (dtype, lanes) in PTX_TYPES.items() if lanes == 1}
_CALLS = ["tirx.Call"]
_PREFIX, _SUFFIX = "tl.atomic_", "_elem_op"
_LEGAL = {
    "add": tuple(_TYPES), "add_ret": tuple(_TYPES), "max": tuple(_TYPES), "max_ret": tuple(_TYPES),
    "min": tuple(_TYPES), "min_ret": tuple(_TYPES),
    "or": ("int32", "uint32", "int64", "uint64"),
    "load": tuple(_TYPES), "store": tuple(_TYPES),
    "addx2": ("float16", "bfloat16", "float32"), "addx4": ("float16", "bfloat16", "float32"),
    "addx2_ret": (), "addx4_ret": (),
}  # fmt: skip
"""Element types that ``system_atomics.cuh`` supports, by kind of operation."""


def make_coherent(func: tirx.PrimFunc, symmetric: Collection[str]) -> tirx.PrimFunc:
    """Run TileLang's atomic operations on symmetric tensors at system scope, and load nothing
    through the read-only cache in kernels that synchronize.

    TileLang's operations are atomic only among the threads of one GPU, and additions of most types
    ignore ``memory_order``. TMA reductions stay, because PTX has no other scope for them.

    TileLang marks parameters that a kernel only reads as ``const __restrict__``, and nvcc then
    loads them with ``ld.global.nc``, which may return data from before a wait. A kernel that only
    sends keeps the qualifiers.

    Args:
        symmetric: names of the parameters that are symmetric tensors.

    Raises:
        LanguageError: the tensor's type does not support the operation.

    Before: ``const bfloat16_t* __restrict__ A``; ``AtomicAdd(&S[i], value, 3)``
    After:  ``bfloat16_t* A``; ``tw::system::atomic_add<tw::Type::f32, 3>(&S[i], value)``
    """

    def is_shared_atomic(call: tirx.Call) -> bool:
        pointer = call.args[0] if len(call.args) else None
        is_pointer = _kind(call) in _LEGAL and op_name(pointer) == "tirx.tvm_access_ptr"
        return is_pointer and pointer.args[1].name in symmetric

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if not calls_in(stmt, is_shared_atomic):
            return stmt
        stmt = rewrite_children(stmt, visit)
        atomics = calls_in(stmt, is_shared_atomic)
        for call in atomics:
            _require_type(call, stmt)
        if not atomics:
            return stmt

        def widen(call: tirx.Call) -> tirx.Call | None:
            return _at_system_scope(call) if is_shared_atomic(call) else None

        return ir_transform(stmt, None, widen, _CALLS)

    body = visit(func.body)
    is_synchronized = not body.same_as(func.body) or any(map(_observes, builtins_in(body)))
    func = func.with_body(body)
    if not is_synchronized:
        return func
    return func.without_attr("tl.readonly_param_indices").with_attr("tirx.noalias", False)


def _observes(call: tirx.Call) -> bool:
    return acquires(call) or builtin_of(call).observes


def _kind(call: tirx.Call) -> str:
    """Return the kind of an atomic operation: ``add_ret`` for ``tl.atomic_add_ret_elem_op``."""
    name = op_name(call)
    if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
        return ""
    return name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


def _at_system_scope(call: tirx.Call) -> tirx.Call:
    kind, pointer = _kind(call), call.args[0]
    count = 1 if kind == "load" else 2
    operands, rest = call.args[1:count], call.args[count:]
    order = int(rest[0]) if len(rest) else 0
    ptx = _TYPES[str(pointer.args[0].dtype)]
    name = tirx.StringImm(f"tw::system::atomic_{kind}<tw::Type::{ptx}, {order}>")
    return tirx.Call(call.dtype, tvm.ir.Op.get(SYSTEM_ATOMIC), [name, pointer, *operands])


def _require_type(call: tirx.Call, stmt: tirx.Stmt) -> None:
    kind, pointer = _kind(call), call.args[0]
    dtype, tensor = str(pointer.args[0].dtype), pointer.args[1].name
    op, legal = f"T.atomic_{kind.removesuffix('_ret')}", _LEGAL[kind]
    if not legal:
        raise LanguageError(
            f"{op}: return_prev=True for symmetric tensor {tensor}; expected T.atomic_add of "
            f"single elements{location(stmt)}"
        )
    if dtype not in legal:
        raise LanguageError(
            f"{op}: symmetric tensor {tensor} has type {dtype}; expected {', '.join(legal)}"
            f"{location(stmt)}"
        )
