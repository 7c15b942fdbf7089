"""Hide conditions from the pass of TileLang that inserts barriers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tilelang import tvm
from tvm import IRModule, tirx
from tvm.ir.instrument import pass_instrument
from tvm.tirx.stmt_functor import ir_transform

from ..builtins.spec import register_op
from ..passes.ir.walk import nodes_in, op_name

_PASS = "tl.ThreadSync"
_HIDDEN = "tileweave.hidden"
register_op(_HIDDEN, "a condition that is not for the solver of TileLang", 1)


@pass_instrument
class HiddenConditions:
    """Hides conditions that the solver of TileLang does not solve, while barriers are inserted.

    The pass counts by the solver the threads that pass a barrier. For a condition with a quotient
    by a variable the solver stops early, so the pass counts too few, and fails: ``Cannot lower a
    required shared-memory sync inside a divergent region with 13 participating threads``. The
    conditions that are hidden are equal for all threads of a block.
    """

    def run_before_pass(self, mod: IRModule, info: Any) -> None:
        if info.name == _PASS:
            _change_branches(mod, _hide)

    def run_after_pass(self, mod: IRModule, info: Any) -> None:
        if info.name == _PASS:
            _change_branches(mod, lambda _: _show)


_Change = Callable[[tirx.IfThenElse], "tirx.IfThenElse | None"]


def _change_branches(mod: IRModule, change_of: Callable[[tirx.PrimFunc], _Change]) -> None:
    for name, func in list(mod.functions.items()):
        if isinstance(func, tirx.PrimFunc):
            body = ir_transform(func.body, None, change_of(func), ["tirx.IfThenElse"])
            mod.update_func(name, func.with_body(body))


def _hide(func: tirx.PrimFunc) -> _Change:
    may_differ = cache(lambda: _may_differ(func))  # most functions need none

    def hide(branch: tirx.IfThenElse) -> tirx.IfThenElse | None:
        condition = branch.condition
        quotients = nodes_in(condition, tirx.FloorDiv, tirx.FloorMod)
        if all(isinstance(quotient.b, tirx.IntImm) for quotient in quotients):
            return None
        if nodes_in(condition, tirx.BufferLoad, tirx.Call):
            return None
        if not may_differ().isdisjoint(nodes_in(condition, tirx.Var)):
            return None
        hidden = tirx.call_intrin("bool", tvm.ir.Op.get(_HIDDEN), condition)
        return tirx.IfThenElse(hidden, branch.then_case, branch.else_case)

    return hide


def _may_differ(func: tirx.PrimFunc) -> set[tirx.Var]:
    """Return the variables that may differ between threads."""
    threads = {
        attr.node.var
        for attr in nodes_in(func.body, tirx.AttrStmt)
        if attr.attr_key == "thread_extent" and attr.node.thread_tag.startswith("threadIdx")
    }
    return threads | {bind.var for bind in nodes_in(func.body, tirx.Bind)}


def _show(branch: tirx.IfThenElse) -> tirx.IfThenElse | None:
    if op_name(branch.condition) != _HIDDEN:
        return None
    return tirx.IfThenElse(branch.condition.args[0], branch.then_case, branch.else_case)
