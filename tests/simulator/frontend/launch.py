"""Random tensors, and one launch of a kernel on the simulator."""

import numpy as np
import pytest

import tileweave as tw

rng = np.random.default_rng(7)
N = 64


def normal(*shape, dtype="float32"):
    return rng.standard_normal(shape).astype(dtype)


def integers(*shape, dtype="int32"):
    return rng.integers(-20, 20, shape).astype(dtype)


def run(program, *, ranks=1, schedules=1, level="tile", **tensors):
    """Return the tensors of rank 0 after one launch."""
    return tw.simulate(program, ranks, [tensors] * ranks, schedules, epochs=1, level=level)[0]


def fault(program, **tensors):
    """Return the fault that one of three schedules of one launch reports."""
    with pytest.raises(tw.SimulationError) as error:
        run(program, schedules=3, **tensors)
    return error.value
