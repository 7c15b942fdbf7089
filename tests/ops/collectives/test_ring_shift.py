"""Ring shift: its programs on simulated ranks, its arguments, and its compiled kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.ring_shift import (
    RingShift,
    ring_shift_ll_program,
    ring_shift_program,
)
from tileweave.ops.collectives.vectors import TiledView

PROGRAMS = {"ldst": ring_shift_program, "ll": ring_shift_ll_program}


@pytest.mark.parametrize("transport", PROGRAMS)
@pytest.mark.parametrize(
    ("ranks", "steps", "count"), [(2, 1, 96), (3, 2, 208), (4, 0, 112), (5, 1, 12)]
)
def test_every_rank_receives_the_tensor_of_the_rank_before(ranks, steps, count, transport):
    """Also after calls before it: three launches in different orders, without a race."""
    view = TiledView.of(count, "int32", 16, 128)
    x = np.arange(ranks * count, dtype=np.int32).reshape(ranks, *view.shape)
    program = PROGRAMS[transport](view, ranks, steps)
    outputs = tw.simulate(program, ranks, [{"x": own} for own in x], schedules=3, epochs=3)
    for rank, output in enumerate(outputs):
        np.testing.assert_array_equal(output["out"], x[(rank - steps) % ranks])


@pytest.mark.parametrize("transport", PROGRAMS)
def test_every_mutant_is_accounted_for(transport):
    """No synchronization is superfluous, and the simulator finds each fault."""
    view = TiledView.of(96, "int32", 16, 128)
    inputs = [{"x": np.full(view.shape, rank, np.int32)} for rank in range(3)]
    mutants = tw.mutate(PROGRAMS[transport](view, 3, 1), 3, inputs, schedules=5)
    assert [(m.line, m.name, m.why) for m in mutants if not m.is_accounted_for] == []
    assert "killed" in {m.verdict for m in mutants}


@pytest.mark.parametrize("transport", PROGRAMS)
@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float32), ((3, 7), torch.uint8)])
def test_any_shape_and_type_compiles(shape, dtype, transport):
    x = torch.empty(shape, dtype=dtype, device="meta")
    problem = checked_problem("ring_shift", x, None, 3, [-1])
    assert problem.options == (2,)
    assert "tw::" in tw.emit(RingShift.steps(problem, transport), world_size=3)


@pytest.mark.parametrize("steps", [1.5, True, "next"])
def test_steps_that_are_no_integer(steps):
    message = f"ring_shift: steps={steps!r}; expected an integer"
    with pytest.raises(tw.TileWeaveError, match=re.escape(message)):
        checked_problem("ring_shift", torch.ones(4), None, 4, [steps])
