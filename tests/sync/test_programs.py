"""Programs without explicit synchronization on simulated ranks, against NumPy.

``TILEWEAVE_SCHEDULES=1000`` tries that many schedules of each; many_schedules.py does it on all
cores of a machine.
"""

import inspect
import os
import re
from functools import partial

import numpy as np
import pytest

import tileweave as tw
from tests.corpus import PROGRAMS
from tests.corpus.programs import Case
from tileweave.simulator import Executable

SCHEDULES = int(os.environ.get("TILEWEAVE_SCHEDULES", 0))


def run(name: str, ranks: int, seeds: range, epochs: int = 3) -> None:
    """Run schedules of a program; each must end with the result of NumPy."""
    case = PROGRAMS[name]
    program = Executable(case.called(ranks), ranks)
    rng = np.random.default_rng(ranks)
    for size in case.sizes or (None,):
        inputs = case.inputs(rng, ranks) if size is None else case.inputs(rng, ranks, size)
        run_with(case, program, inputs, seeds[:: max(1, len(case.sizes))], epochs)


def run_with(case: Case, program: Executable, inputs: list, seeds: range, epochs: int) -> None:
    """Run schedules of a program with these inputs."""
    ranks = program.world_size
    expected = case.expected(inputs)
    for seed in seeds:
        resident = case.resident if seed % 2 else 4
        out = tw.simulate(
            program, ranks, inputs, seed=seed, epochs=epochs, resident_blocks=resident
        )
        for rank, tensors in enumerate(expected):
            for tensor, value in tensors.items():
                actual = out[rank].get(f"{tensor}_after", out[rank][tensor])
                assert np.allclose(actual, value, rtol=0, atol=case.tolerance), (seed, rank, tensor)


def instances():
    """Return each program with each number of ranks; ``make test`` runs at most 4 ranks, once."""
    for name, case in PROGRAMS.items():
        few = max(ranks for ranks in case.ranks if ranks <= 4)
        for ranks in case.ranks:
            marks = () if ranks == few else pytest.mark.long
            yield pytest.param(name, ranks, marks=marks)


@pytest.mark.parametrize(("name", "ranks"), list(instances()))
def test_every_schedule_is_right(name, ranks):
    run(name, ranks, range(SCHEDULES or 8 // ranks))


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_eight_ranks(name):
    run(name, 8, range(1), epochs=2)


DELAYS = {"tileweave.delays": 3}
PIPELINED = [
    name for name, case in PROGRAMS.items() if "T.Pipelined" in inspect.getsource(case.make)
]


@pytest.mark.long
@pytest.mark.parametrize("name", PIPELINED)
def test_pipelined_programs_compile_with_delays(name):
    """Waits stay before the loads that they guard, as ``tests/gpu/inferred.py`` runs them."""
    program = PROGRAMS[name].make(2)
    kernels = program.kernels(2) if isinstance(program, tw.Plan) else [program]
    for kernel in kernels:
        assert "tw::delay<" in tw.emit(kernel, world_size=2, pass_configs=DELAYS)


@pytest.mark.parametrize(
    ("name", "delays"),
    [pytest.param("gemm_all_reduce", {}, marks=pytest.mark.long), ("packed_gather", DELAYS)],
)
def test_producer_and_consumers_may_wait(name, delays, ptxas):
    """The time-out path of a wait must fit into the registers of producers and of consumers."""
    program = PROGRAMS[name].make(2)
    kernel = program.kernels(2)[-1] if isinstance(program, tw.Plan) else program
    emit = partial(tw.emit, kernel, world_size=2, pass_configs=delays)
    _, producer, consumers = re.split(r"tl::warpgroup_reg_(?:de)?alloc<", emit())
    assert "tw::wait_reached<" in producer and "tw::wait_reached<" in consumers
    ptxas(emit(stage="ptx"))
