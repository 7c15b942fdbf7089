"""Nothing is published before the whole block has finished it."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ..builtins.declare import Builtin, builtin_of, register_op
from .block_barrier import is_sync_threads, sync_threads
from .thread_control import Divergence, ThreadControl
from .walk import builtins_in, flatten, rewrite_children

register_op(
    "tileweave.complete_bulk_stores", "bulk stores issued before this point are complete", 0
)


def order_releases(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put before each release the point at which bulk stores must be complete, and a block barrier.

    A release is cumulative over what its own thread observed: the barrier makes that the whole
    block's writes. The point is a placeholder; ``complete_bulk_stores`` keeps it where a bulk store
    reaches it. Both stand outside conditions on the thread index, where every thread passes. A
    fence publishes only what its own thread did and gets no barrier.

    Before: ``if thread == 0: T.tileweave.red_add(..., "release")``
    After:  ``T.tileweave.complete_bulk_stores(); T.sync_threads(); if thread == 0: ...``
    """
    control = ThreadControl()

    def order(stmt: tirx.Stmt) -> list[tirx.Stmt]:
        if isinstance(stmt, tirx.Bind):
            control.bind(stmt)
        if isinstance(stmt, tirx.SeqStmt):
            out: list[tirx.Stmt] = []
            for inner in stmt.seq:
                _append(out, order(inner))
            return out
        way = Divergence.NONE
        if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
            way = control.of(stmt.condition)
        if isinstance(stmt, tirx.For):
            way = control.enter_loop(stmt)
        if way == Divergence.NONE and not isinstance(
            stmt, (tirx.Evaluate, tirx.Bind, tirx.BufferStore)
        ):
            return [rewrite_children(stmt, lambda s: flatten(order(s)))]
        releases = [c for c in builtins_in(stmt) if _releases(builtin_of(c), c)]
        if not releases:
            return [stmt]
        fences_only = all(builtin_of(c).name == "fence" for c in releases)
        return [_placeholder(), *([] if fences_only else [sync_threads()]), stmt]

    return func.with_body(flatten(order(func.body)))


def _append(out: list[tirx.Stmt], ordered: list[tirx.Stmt]) -> None:
    """Append, using a barrier already there instead of a second one."""
    if len(ordered) == 3 and out and is_sync_threads(out[-1]) and is_sync_threads(ordered[1]):
        out[-1:] = [ordered[0], out[-1], ordered[2]]
    else:
        out.extend(ordered)


def _releases(spec: Builtin, call: tirx.Call) -> bool:
    if any(name == "sem" for name, _ in spec.words):
        return spec.word(call, "sem") in ("release", "acq_rel", "sc")
    return spec.releases


def _placeholder() -> tirx.Stmt:
    return tirx.Evaluate(
        tirx.call_intrin("handle", tvm.ir.Op.get("tileweave.complete_bulk_stores"))
    )
