"""A small kernel, the fault that a plan reports, and the line of a step."""

import pytest
import tilelang.language as T

import tileweave as tw

N = 32


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
