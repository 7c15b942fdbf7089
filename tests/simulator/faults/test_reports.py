"""Reports name all waits of a deadlock, and blocks by their coordinates."""

import pytest
import tilelang
import tilelang.language as T
import torch

import tileweave as tw
from tests.factory import factory
from tests.lines import place_of
from tests.releases import needs_device_lines

LEVELS = pytest.mark.parametrize("level", ["tile", "device"])


def report_of(program, level) -> str:
    """Return the report of a call without the passes of TileWeave, which refuse deadlocks."""
    with tw.interpret(level, "sm_90a"), pytest.raises(tw.SimulationError) as error:
        kernel = tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"})
        kernel(torch.zeros(256, dtype=torch.int32))
    return error.value.report


@factory
def two_waits(shape, A: T.Tensor((256,), "int32")):
    with T.Kernel(*shape, threads=256):
        full = T.alloc_barrier(128)
        empty = T.alloc_barrier(128)
        if T.get_thread_binding() < 128:
            T.mbarrier_wait_parity(empty, 0)  # EMPTY
            T.mbarrier_arrive(full)
        else:
            T.mbarrier_wait_parity(full, 0)  # FULL
            T.mbarrier_arrive(empty)
        A[T.get_thread_binding()] = 1


@factory
def wait_and_barrier(A: T.Tensor((256,), "int32")):
    with T.Kernel(2, threads=256):
        t = T.get_thread_binding()
        empty = T.alloc_barrier(128)
        x = T.alloc_shared((256,), "int32")
        x[t] = A[t]
        if t < 128:
            T.mbarrier_wait_parity(empty, 0)  # EMPTY
        T.sync_threads()  # BARRIER
        A[t] = x[255 - t]  # NEXT


@LEVELS
@needs_device_lines
def test_a_report_of_a_deadlock_names_each_wait_of_a_few_blocks(level):
    lines = report_of(two_waits((3, 2)), level).splitlines()
    for mark, barrier in (("# EMPTY", "empty[0]"), ("# FULL", "full[0]")):
        place = place_of(two_waits, mark)
        waits = [line for line in lines if line.endswith(f"0 of 128 arrived --> {place}")]
        assert len(waits) == 4
        assert all(line.startswith("  rank 0, block ") and barrier in line for line in waits)
    assert "  2 more blocks of rank 0 wait at the same lines" in lines


@LEVELS
@needs_device_lines
def test_a_report_of_a_deadlock_names_the_barrier_of_the_other_threads(level):
    report = report_of(wait_and_barrier(), level)
    assert report.count(f"--> {place_of(wait_and_barrier, '# EMPTY')}") == 2
    # the barrier has no line at the device level
    mark, before = ("# BARRIER", "") if level == "tile" else ("# NEXT", " before")
    barrier = f" wait at the barrier{before} --> {place_of(wait_and_barrier, mark)}\n"
    assert report.count("  other threads of rank 0, block ") == report.count(barrier) == 2


@LEVELS
def test_a_block_of_a_grid_of_several_axes_has_its_coordinates(level):
    assert "rank 0, block 1 (bx=0, by=1, bz=0) in launch 0 waits" in report_of(
        two_waits((1, 2, 1)), level
    )

    @T.prim_func
    def race(A: T.Tensor((256,), "int32")):
        with T.Kernel(2, 2, threads=32) as (_, by):
            A[128 * by + T.get_thread_binding()] = 1

    report = report_of(race, level)
    assert "store of A[128" in report or "store of A[0" in report
    by = int("store of A[128" in report)
    for bx in (0, 1):
        assert f" by rank 0, block {bx + 2 * by} (bx={bx}, by={by}), " in report
