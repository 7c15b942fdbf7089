"""Functions of the runtime that the host code of a program calls."""

from __future__ import annotations

from tvm import tirx

from ...builtins.implicit import LAUNCH
from .walk import calls_in, nodes_in, op_name

BIND = "tileweave.bind"
"""Global function of the runtime: ``bind(slots, names)`` writes the value of each name to its slot.
"""

BEGIN_LAUNCH = "tileweave.begin_launch"
"""Global function of the runtime: ``begin_launch(slots, events)`` writes the number of the launch
in the trace to the slot. ``record_events`` replaces the name of the kernel by its events."""

REQUIRE_MULTICAST = "tileweave.require_multicast"
"""Global function of the runtime that raises an error if the machine has no multicast."""


def bound_operators(host: tirx.Stmt) -> dict[tirx.Var, str]:
    """Return the operator whose value ``bind_runtime`` binds to each variable of host code. A
    parameter of the program may have the name of such a variable."""
    by_slots: dict[tirx.Var, list[str]] = {}
    for call in calls_in(host, lambda c: op_name(c) == "tirx.tvm_call_packed"):
        function, *arguments = call.args
        if function.value == BIND:
            by_slots[arguments[0]] = arguments[1].value.split(",")
        elif function.value == BEGIN_LAUNCH:
            by_slots[arguments[0]] = [LAUNCH]
    return {
        binding.var: by_slots[load.args[0]][int(load.args[1])]
        for binding in nodes_in(host, tirx.Bind)
        for load in calls_in(binding.value, lambda c: op_name(c) == "tirx.tvm_struct_get")
        if load.args[0] in by_slots
    }
