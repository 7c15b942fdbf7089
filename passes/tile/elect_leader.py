"""Run leader builtins in one thread of the block, between block barriers."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.errors import LanguageError
from ...builtins.spec import Builtin, builtin_of
from ..ir.block_barrier import sync_threads
from ..ir.guards import first_thread
from ..ir.origin import hint_of, name_of
from ..ir.thread_sets import Block, ThreadSet, follow_threads
from ..ir.uniformity import Divergence, ThreadControl
from ..ir.walk import flatten, location, rewrite_children

_UNDER = {
    Divergence.MAYBE_DIVERGENT: (
        "a condition on a register, a break, a continue or a return, which may differ between "
        "threads"
    ),
    Divergence.DIVERGENT: "a condition on the thread index",
}


def elect_leader(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Run ``leader`` builtins in one thread of the block, between the barriers that they declare.

    This applies to calls that the whole block reaches. Under a condition on the thread index, the
    program chooses the threads itself.

    These calls are refused:

    - a call under a condition on a register that may differ between threads, because the arriving
      threads are unknown;
    - a ``block`` builtin that only a part of the block reaches;
    - a barrier or an announcement that several threads, but not the whole block, reach;
    - a ``warp`` builtin that a part of a warp reaches.

    Before: ``T.tileweave.signal(...)``
    After:  ``T.sync_threads(); if thread == 0: T.tileweave.signal(...)``
    """
    control = ThreadControl(func)
    reached = _threads_of_builtins(func)

    def elect(stmt: tirx.Stmt, divergence: Divergence) -> tirx.Stmt:
        if isinstance(stmt, tirx.Bind):
            control.bind(stmt)
            return stmt
        if isinstance(stmt, tirx.Evaluate):
            spec = builtin_of(stmt.value)
            if spec is None:
                return stmt
            _require_arrival(stmt.value, stmt, divergence)
            _require_threads(stmt.value, stmt, divergence, reached.get(stmt))
            return (
                _run_by_leader(spec, stmt, control.threads)
                if spec.level == "leader" and not divergence
                else stmt
            )
        divergence = max(divergence, control.enter(stmt))

        def inside(inner: tirx.Stmt) -> tirx.Stmt:
            nonlocal divergence
            new = elect(inner, divergence)
            divergence = max(divergence, control.after(inner))
            return new

        return rewrite_children(stmt, inside)

    return func.with_body(elect(func.body, Divergence.UNIFORM))


def _require_arrival(call: tirx.Call, stmt: tirx.Stmt, divergence: Divergence) -> None:
    spec = builtin_of(call)
    chooses = spec.level == "leader"
    if not (divergence and spec.level == "block") and not (
        divergence == Divergence.MAYBE_DIVERGENT and chooses
    ):
        return
    raise LanguageError(
        f"{name_of(call)}: called under {_UNDER[divergence]}; expected a call that the whole "
        f"block reaches{', or a condition on the thread index' if chooses else ''}{hint_of(call)}"
        f"{location(stmt)}"
    )


def _threads_of_builtins(func: tirx.PrimFunc) -> dict[tirx.Stmt, ThreadSet]:
    """Return the threads that reach each statement that is a builtin."""
    reached: dict[tirx.Stmt, ThreadSet] = {}

    def note(stmt: tirx.Stmt, threads: ThreadSet, block: Block | None) -> tirx.Stmt:
        if block is not None and builtin_of(getattr(stmt, "value", None)) is not None:
            reached[stmt] = threads
        return stmt

    follow_threads(func.body, note)
    return reached


def _require_threads(
    call: tirx.Call, stmt: tirx.Stmt, divergence: Divergence, threads: ThreadSet | None
) -> None:
    """Refuse a barrier or a ``warp`` builtin in threads that cannot execute it together, and an
    announcement that several threads would count."""
    spec = builtin_of(call)
    if threads is None or not divergence:
        return
    if (spec.participants or spec.announces) and threads.size > 1:
        count = (
            f"up to {threads.size} threads" if not threads.is_exact else f"{threads.size} threads"
        )
        raise LanguageError(
            f"{name_of(call)}: {count} call it separately under {_UNDER[divergence]}; expected a "
            "call that the whole block reaches, or a condition that holds in one thread, such as "
            f"if T.get_thread_binding() == 0{hint_of(call)}{location(stmt)}"
        )
    if spec.level == "warp" and threads.is_exact and not threads.is_warps:
        raise LanguageError(
            f"{name_of(call)}: {threads.names} call it under {_UNDER[divergence]}; expected whole "
            f"warps{hint_of(call)}{location(stmt)}"
        )


def _run_by_leader(spec: Builtin, stmt: tirx.Stmt, threads: list[tirx.Var]) -> tirx.Stmt:
    fence = tvm.ir.Op.get("tl.fence_proxy_async")
    return flatten(
        ([tirx.Evaluate(tirx.call_intrin("handle", fence))] if spec.async_proxy else [])
        + ([sync_threads()] if spec.barrier_before else [])
        + [tirx.IfThenElse(first_thread(threads), stmt, None)]
        + ([sync_threads()] if spec.barrier_after else [])
    )
