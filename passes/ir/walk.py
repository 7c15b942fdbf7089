"""Traversal of statements and expressions, and their text for messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from ...builtins.ranks import RANK
from ...builtins.spec import builtin_of
from .spans import get_stmt_span, set_stmt_span

TMA_LOADS = frozenset(
    {
        "tl.tma_load",
        "tl.tma_load_im2col",
        "tl.tma_load_multicast",
        "tl.tma_load_gather4",
        "tl.tma_load_2sm",
    }
)
"""TileLang's operators that read global memory by the async proxy."""

TMA_STORES = frozenset(
    {
        "tl.tma_store",
        "tl.tma_store_scatter4",
        "tl.tma_store_cluster",
        "tl.tma_reduce",
    }
)
"""TileLang's operators that write memory by the async proxy and complete in groups."""

ASYNC_COPY = "tl.ptx_cp_async"
"""TileLang's copy by a thread, from global to shared memory, that completes in groups."""
MBARRIER_WAIT = "tl.mbarrier_wait_parity"
"""TileLang's wait for a phase of an mbarrier, such as that of the loads of a producer."""

Rewrite = Callable[[tirx.Stmt], tirx.Stmt]


def rewrite_children(stmt: tirx.Stmt, f: Rewrite) -> tirx.Stmt:
    """Replace each statement directly inside ``stmt`` by the result of ``f``.

    Return ``stmt`` itself if no statement changes.
    """
    new = _rebuild(stmt, f)
    return new if new is stmt else with_span_of(stmt, new)


def rewrite_and_allocate(stmt: tirx.Stmt, f: Rewrite, buffers: list[tirx.Buffer]) -> tirx.Stmt:
    """Replace statements as ``rewrite_children`` does. A block also allocates the buffers that
    ``f`` adds to ``buffers`` for it, which are then removed from there."""
    outer = len(buffers)
    new = rewrite_children(stmt, f)
    added = buffers[outer:]
    if not isinstance(new, tirx.SBlockRealize) or not added:
        return new
    del buffers[outer:]
    return with_block(new, alloc_buffers=[*new.block.alloc_buffers, *added])


def with_block(stmt: tirx.SBlockRealize, **fields: Any) -> tirx.SBlockRealize:
    """Return ``stmt`` with other fields of its block, by name, and with its source position."""
    names = (
        "iter_vars", "reads", "writes", "name_hint", "body", "init", "alloc_buffers",
        "match_buffers", "annotations",
    )  # fmt: skip
    block = tirx.SBlock(*(fields.pop(name, getattr(stmt.block, name)) for name in names))
    assert not fields
    return with_span_of(stmt, tirx.SBlockRealize(stmt.iter_values, stmt.predicate, block))


def with_span_of(old: tirx.Stmt, new: tirx.Stmt) -> tirx.Stmt:
    """Give the statement ``new`` the source position of ``old``, and return it."""
    if (span := get_stmt_span(old)) is not None:
        set_stmt_span(new, span)
    return new


def is_leaf(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` has no inner statements: it is a call, a binding or a store."""
    return isinstance(stmt, (tirx.Evaluate, tirx.Bind, tirx.BufferStore))


def statements_of(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements of the sequence ``stmt``, or ``stmt`` alone."""
    return list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]


def children_of(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements directly inside ``stmt``, in order."""
    children: list[tirx.Stmt] = []

    def keep(inner: tirx.Stmt) -> tirx.Stmt:
        children.append(inner)
        return inner

    _rebuild(stmt, keep)
    return children


def headers_of(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    """Return the expressions of ``stmt`` that decide whether its inner statements run."""
    if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
        return [stmt.condition]
    return [stmt.min, stmt.extent] if isinstance(stmt, tirx.For) else []


def _rebuild(stmt: tirx.Stmt, f: Rewrite) -> tirx.Stmt:
    if isinstance(stmt, tirx.SeqStmt):
        old = list(stmt.seq)
        new = [f(s) for s in old]
        return stmt if _same(new, old) else flatten(new)
    if isinstance(stmt, tirx.IfThenElse):
        then_case = f(stmt.then_case)
        else_case = f(stmt.else_case) if stmt.else_case is not None else None
        if _same([then_case, else_case], [stmt.then_case, stmt.else_case]):
            return stmt
        return tirx.IfThenElse(stmt.condition, then_case, else_case)
    if isinstance(stmt, tirx.SBlockRealize):
        body = f(stmt.block.body)
        return stmt if body.same_as(stmt.block.body) else with_block(stmt, body=body)
    old = getattr(stmt, "body", None)
    if not isinstance(old, tirx.Stmt):
        return stmt
    body = f(old)
    if body.same_as(old):
        return stmt
    if isinstance(stmt, tirx.For):
        return tirx.For(
            stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding,
            stmt.annotations, stmt.step,
        )  # fmt: skip
    if isinstance(stmt, tirx.While):
        return tirx.While(stmt.condition, body)
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
    raise TypeError(f"the passes do not support a {type(stmt).__name__} statement with a body")


def _same(new: list, old) -> bool:
    return all(a is b or (a is not None and a.same_as(b)) for a, b in zip(new, old, strict=True))


def flatten(stmts: list[tirx.Stmt]) -> tirx.Stmt:
    """Join several statements into one."""
    flat: list[tirx.Stmt] = []
    for stmt in stmts:
        flat.extend(statements_of(stmt))
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def nodes_in(node, *kinds: type) -> list[Any]:
    """Return the nodes of these kinds in a statement or expression, inner nodes first."""
    nodes: list[Any] = []

    def visit(n) -> None:
        if _is_one_of(type(n), kinds):
            nodes.append(n)

    post_order_visit(node, visit)
    return nodes


# Nodes have a metaclass whose check takes most of the time of a visit.
_is_one_of = lru_cache(maxsize=None)(issubclass)


def may_not_run(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is a loop that may run zero times."""
    if not isinstance(stmt, tirx.For):
        return isinstance(stmt, tirx.While)
    if isinstance(stmt.extent, tirx.IntImm):
        return int(stmt.extent) <= 0
    return not tvm.arith.Analyzer().can_prove(stmt.extent > 0)


def is_parallel(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is a loop of ``T.Parallel``."""
    return isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL


def calls_in(node, match: Callable[[tirx.Call], bool]) -> list[tirx.Call]:
    """Return the calls inside a statement or expression for which ``match`` holds."""
    return [call for call in nodes_in(node, tirx.Call) if match(call)]


def with_annotation(call: tirx.Call, name: str, value: Any) -> tirx.Call:
    """Return ``call`` with another annotation."""
    return tirx.Call(call.dtype, call.op, call.args, {**call.annotations, name: value})


def variables_in(node) -> list[tirx.Var]:
    """Return the variables in a statement or expression, each once."""
    return list(dict.fromkeys(nodes_in(node, tirx.Var)))


def base_of(index: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the first element of an index, which may be a vector of elements."""
    return index.base if isinstance(index, tirx.Ramp) else index


def variables_and_loads(expr: tirx.PrimExpr) -> list[tirx.Var | tirx.BufferLoad]:
    """Return the variables and the elements of memory that ``expr`` reads."""
    return nodes_in(expr, tirx.Var, tirx.BufferLoad)


def has_loads(expr: tirx.PrimExpr) -> bool:
    """Return whether ``expr`` reads memory, so that its value may change."""
    return any(isinstance(node, tirx.BufferLoad) for node in variables_and_loads(expr))


def bound_in(stmt: tirx.Stmt) -> set[tirx.Var]:
    """Return the variables that ``stmt`` defines: loop variables and bound names."""
    definitions = nodes_in(stmt, tirx.Bind, tirx.For)
    return {d.var if isinstance(d, tirx.Bind) else d.loop_var for d in definitions}


def op_name(call) -> str:
    """Return the name of the operator of an IR call; "" for other nodes."""
    return getattr(getattr(call, "op", None), "name", "")


_EFFECTS = (tirx.CallEffectKind.UpdateState.value, 6)
"""Effect kinds for changes of state and for jumps. The kinds between them, for addresses and hints,
have no effect."""


def has_effect(call: tirx.Call) -> bool:
    """Return whether ``call`` may have an effect or a different result each time."""
    effect = call.op.get_attr("TCallEffectKind") if isinstance(call.op, tvm.ir.Op) else None
    return effect is None or effect.value in _EFFECTS


@lru_cache(maxsize=8)
def uses_tileweave(func: tirx.PrimFunc) -> bool:
    """Return whether ``func`` calls a TileWeave operator; other functions are not changed."""
    return bool(calls_in(func.body, lambda c: op_name(c).startswith("tileweave.")))


def uses_op(node, name: str) -> bool:
    """Return whether a statement or expression calls an operator of this name."""
    return bool(calls_in(node, lambda c: op_name(c) == name))


def builtins_in(node) -> list[tirx.Call]:
    """Return the calls of builtins inside a statement or expression."""
    return calls_in(node, lambda c: builtin_of(c) is not None)


def is_async_load(call: tirx.Call) -> bool:
    """Return whether ``call`` reads global memory by the async proxy."""
    spec = builtin_of(call)
    return spec.is_async_load if spec is not None else op_name(call) in TMA_LOADS


def is_async_store(call: tirx.Call) -> bool:
    """Return whether ``call`` writes memory by the async proxy and completes in a group."""
    spec = builtin_of(call)
    return spec.is_async_store if spec is not None else op_name(call) in TMA_STORES


def uses_multicast(node) -> bool:
    """Return whether a statement or expression accesses multicast memory."""
    return any(builtin_of(call).multicast for call in builtins_in(node))


def effects_in(node) -> list[tirx.Call]:
    """Return the calls of builtins with effects inside ``node``.

    Builtins with a result but no operand, such as ``rank``, are values without effects.
    """
    return [
        call
        for call in builtins_in(node)
        for spec in [builtin_of(call)]
        if spec.operands or spec.result is None
    ]


def line_of(stmt: tirx.Stmt) -> str:
    """Return ``file:line`` of a statement, or "" if TileLang has lost its source position."""
    return line_of_span(get_stmt_span(stmt))


def line_of_span(span: Any) -> str:
    """Return ``file:line`` of a span, or "" for None."""
    return f"{span.source_name.name}:{span.line}" if span is not None else ""


def location(stmt: tirx.Stmt) -> str:
    """Return the source position as the end of a message, `` --> file:line``."""
    line = line_of(stmt)
    return f"\n --> {line}" if line else ""


def arrows(places: Iterable[tuple[str, str]]) -> str:
    """Format source lines for the end of a message, each once. Several lines have labels.

    Args:
        places: pairs of a label, such as ``read``, and ``file:line`` or "".

    Returns:
        Text such as ``\\n read --> file:3\\n write --> file:5``.
    """
    unique = dict.fromkeys((label, line) for label, line in places if line)
    if len(unique) == 1:
        return "".join(f"\n --> {line}" for _, line in unique)
    return "".join(f"\n {label} --> {line}" for label, line in unique)


def with_rank(expr: tirx.PrimExpr, rank: tirx.Var) -> tirx.PrimExpr:
    """Return ``expr`` with ``W.rank()`` as a variable, which an analyzer can bound."""

    def variable(node):
        return rank if op_name(node) == RANK else None

    return ir_transform(tirx.Evaluate(expr), None, variable, ["tirx.Call"]).value


def format_expr(expr: tirx.PrimExpr) -> str:
    """Return ``expr`` as text in the syntax of a program, without its types."""

    def register(node):
        local = node.buffer.scope() == "local.var"
        return tirx.Var(node.buffer.name, node.dtype) if local else None

    expr = ir_transform(tirx.Evaluate(expr), None, register, ["tirx.BufferLoad"]).value
    text = re.sub(r"T\.u?int\d+\((-?\d+)\)", r"\1", str(expr))
    text = re.sub(r'T\.Cast\("u?int\d+", ', "(", text)
    return text.replace("T.tileweave.", "W.").replace("T.min(", "min(")


EXPECTS = frozenset({"tl.mbarrier_expect_tx", "tirx.ptx_arrive_barrier_expect_tx"})


def map_functions(
    change: Callable[[tirx.PrimFunc], tirx.PrimFunc], mod: tvm.IRModule
) -> tvm.IRModule:
    """Return ``mod`` with each program changed by ``change``."""
    functions = {
        n: change(f) if isinstance(f, tirx.PrimFunc) else f for n, f in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)
