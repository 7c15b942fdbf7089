"""Which control flow may differ between the threads of a block."""

from __future__ import annotations

from enum import IntEnum

from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit

_THREAD_OPS = frozenset(
    {
        "tl.tl_shuffle_elect",
        "tl.get_lane_idx",
        "tl.get_warp_idx",
        "tl.get_warp_idx_sync",
        "tl.get_warp_group_idx",
        "tl.activemask",
        "tl.launch_thread_idx",
    }
)


class Divergence(IntEnum):
    """How sure it is that the threads of a block differ in a value or in the way they take."""

    NONE = 0
    POSSIBLE = 1
    CHOSEN = 2


class ThreadControl:
    """Follows, from the top of a function, which variables depend on the thread index.

    ``threads`` lists the thread indices, x first, as they are met.
    """

    def __init__(self) -> None:
        self.threads: list[tirx.Var] = []
        self._divergence: dict[tirx.Var, Divergence] = {}

    def bind(self, stmt: tirx.Bind) -> None:
        """Note a binding; its variable differs between threads if its value does."""
        if getattr(getattr(stmt.value, "op", None), "name", "") == "tl.launch_thread_idx":
            self.threads.append(stmt.var)
        self._divergence[stmt.var] = self.of(stmt.value)

    def enter_loop(self, loop: tirx.For) -> Divergence:
        """Note a loop; how its body may differ between threads."""
        tag = loop.thread_binding.thread_tag if loop.thread_binding is not None else ""
        if tag.startswith("threadIdx"):
            self.threads.append(loop.loop_var)
            self._divergence[loop.loop_var] = Divergence.CHOSEN
            return Divergence.NONE
        if loop.kind == tirx.ForKind.PARALLEL:
            self._divergence[loop.loop_var] = Divergence.CHOSEN
            return Divergence.CHOSEN
        return max(self.of(loop.min), self.of(loop.extent))

    def of(self, expr: tirx.PrimExpr) -> Divergence:
        """How ``expr`` may differ between threads. What stands in registers possibly does."""
        found = Divergence.NONE

        def visit(node):
            nonlocal found
            if isinstance(node, tirx.Var):
                found = max(found, self._divergence.get(node, Divergence.NONE))
            elif isinstance(node, tirx.Call) and getattr(node.op, "name", "") in _THREAD_OPS:
                found = Divergence.CHOSEN
            elif isinstance(node, tirx.BufferLoad) and node.buffer.scope().startswith("local"):
                found = max(found, Divergence.POSSIBLE)

        post_order_visit(expr, visit)
        return found
