"""One thread speaks for the block, after the block has met."""

from __future__ import annotations

from tvm import tirx

from ..builtins.declare import builtin_of
from ..builtins.errors import LanguageError
from .block_barrier import sync_threads
from .thread_control import Divergence, ThreadControl
from .walk import flatten, location, rewrite_children


def elect_leader(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Run ``leader`` builtins in one thread of the block, between the barriers they declare.

    Only where the whole block arrives: under a condition on the thread index the program has chosen
    its threads itself. A condition on what stands in registers is refused: nobody can say who
    arrives.

    Before: ``T.tileweave.signal(...)``
    After:  ``T.sync_threads(); if thread == 0: T.tileweave.signal(...)``
    """
    control = ThreadControl()

    def elect(stmt: tirx.Stmt, way: Divergence) -> tirx.Stmt:
        if isinstance(stmt, tirx.Bind):
            control.bind(stmt)
            return stmt
        if isinstance(stmt, tirx.Evaluate):
            spec = builtin_of(stmt.value)
            if spec is None or spec.level != "leader" or way == Divergence.CHOSEN:
                return stmt
            if way == Divergence.POSSIBLE:
                raise LanguageError(
                    f"{spec.name}: stands under a condition on a register, which may differ between the "
                    "threads of a block; expected a condition that is the same in the whole block, or one "
                    f"on the thread index{location(stmt)}"
                )
            return flatten(
                ([sync_threads()] if spec.barrier_before else [])
                + [tirx.IfThenElse(_first(control.threads), stmt, None)]
                + ([sync_threads()] if spec.barrier_after else [])
            )
        if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
            way = max(way, control.of(stmt.condition))
        if isinstance(stmt, tirx.For):
            way = max(way, control.enter_loop(stmt))
        return rewrite_children(stmt, lambda s: elect(s, way))

    return func.with_body(elect(func.body, Divergence.NONE))


def _first(threads: list[tirx.Var]) -> tirx.PrimExpr:
    condition = threads[0] == 0
    for index in threads[1:]:
        condition = tirx.And(condition, index == 0)
    return condition
