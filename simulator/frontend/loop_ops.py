"""Statements that leave a loop or its iteration: ``break``, ``continue`` and T.loop_break."""

from __future__ import annotations

from tvm import tirx

from ..machine.steps import Step
from ..report.errors import unsupported
from .statements import Statements


def _exit(name: str, ends_loop: bool):
    """Return the compiler of a statement that leaves the innermost loop, or its iteration."""

    def compile(c: Statements, call: tirx.Call, loc: str) -> Step:
        if c.loop is None:
            raise unsupported(f"{name} outside of a loop", loc)
        if ends_loop and c.loop == "T.Parallel":
            raise unsupported(f"{name} of a T.Parallel, whose points have no order,", loc)
        return Step(lambda frame: frame.leave_iteration(ends_loop))

    return compile


def register(c: Statements) -> None:
    """Register the statements that leave loops."""
    c.steps |= {
        "tl.loop_break": _exit("T.loop_break", ends_loop=True),
        "tirx.break_loop": _exit("break", ends_loop=True),
        "tirx.continue_loop": _exit("continue", ends_loop=False),
    }
