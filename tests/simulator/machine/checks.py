"""A small kernel, the fault that a plan reports, and the line of a step."""

import inspect

import pytest
import tilelang.language as T

import tileweave as tw

N = 32


def line_of(function, text, turn=0):
    """Return ``file:line`` of the first line of a function with this text, or a later one."""
    lines, first = inspect.getsourcelines(function)
    offsets = [n for n, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(inspect.unwrap(function))}:{first + offsets[turn]}"


def fault_of(plan, ranks, inputs, schedules=30, **arguments):
    """Return the fault that the simulator reports for a plan."""
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(plan, ranks, inputs, schedules=schedules, **arguments)
    return error.value


@T.prim_func
def fill(x: T.Tensor((4, N), "int32"), value: T.int32):
    with T.Kernel(4, threads=N) as row:
        for i in T.Parallel(N):
            x[row, i] = value + i
