"""The examples' programs on simulated ranks, in 60 to 200 schedules each, against NumPy."""

import time

import numpy as np
import pytest

import tileweave as tw
from tests.examples import programs as examples
from tileweave.simulator import Executable

pytestmark = pytest.mark.long


def every_schedule(instance, schedules, **arguments):
    """Yield the outputs of each schedule."""
    executable = Executable(instance.program, instance.ranks)
    for seed in range(schedules):
        yield tw.simulate(executable, instance.ranks, instance.inputs, seed=seed, **arguments)


def assert_near(C, exact):
    assert np.linalg.norm(C.astype(np.float32) - exact) < 0.01 * np.linalg.norm(exact)


def product(inputs):
    return inputs["A"].astype(np.float32) @ inputs["B"].astype(np.float32).T


@pytest.mark.parametrize(
    ("ranks", "resident", "schedules"), [(1, 4, 20), (2, 4, 120), (3, 1, 40), (4, 4, 20)]
)
def test_gemm_reduce_scatter(ranks, resident, schedules):
    """200 schedules in all."""
    instance = examples.gemm_reduce_scatter(ranks, 16 * ranks, 32, 16, 16, 16, 16)
    total = np.split(sum(map(product, instance.inputs)), ranks)
    for out in every_schedule(instance, schedules, resident_blocks=resident):
        for values, exact in zip(out, total, strict=True):
            assert_near(values["C"], exact)


def test_cost_of_a_schedule():
    """M = N = K = 512, 4 ranks, 64 x 64 tiles: less than 3 s of this process for each launch."""
    start = time.process_time()
    list(every_schedule(examples.gemm_reduce_scatter(4, 512, 512, 128, 64, 64, 16), 1, epochs=1))
    assert time.process_time() - start < 3


@pytest.mark.parametrize(("ranks", "schedules"), [(1, 20), (2, 120), (3, 40), (4, 20)])
def test_all_gather_gemm(ranks, schedules):
    """200 schedules in all."""
    instance = examples.all_gather_gemm(ranks, 16 * ranks, 32, 16, 16, 16, 16)
    gathered = np.concatenate([inputs["A"] for inputs in instance.inputs])
    for out in every_schedule(instance, schedules):
        for inputs, values in zip(instance.inputs, out, strict=True):
            assert_near(values["C"], product({**inputs, "A": gathered}))


def test_signal_ping_pong():
    for out in every_schedule(examples.ping_pong(5), 200):
        assert [o["flags"].tolist() for o in out] == [[15], [15]]


@pytest.mark.parametrize(
    ("name", "size", "blocks", "schedules"),
    [
        *(
            (name, size, 3, 2)
            for name in ("bulk_copy_program", "load_store_program")
            for size in (1, 17, 3 * 16384 + 5, 40 * 16384 + 77)
        ),
        *(("small_ring", size, 2, 100) for size in (15, 901)),
        *(("load_store_program", size, 3, 100) for size in (15, 901)),
        ("multicast_program", 5, 2, 198),
        ("multicast_program", 4100, 2, 2),
    ],
)
def test_bulk_copy(name, size, blocks, schedules):
    """Multicast: one rank stores and all ranks receive it, in this iteration of the blocks and
    after it."""
    instance = examples.bulk_copy(name, size, blocks)
    for (out,) in every_schedule(instance, schedules):
        assert (out["dst"] == instance.inputs[0]["src"]).all()
