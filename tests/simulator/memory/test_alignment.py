"""Misaligned addresses and odd sizes that are known only at run time are reported with their
values."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import names_line
from tileweave import language as W

N = 64


@factory
def bulk(by, A: T.Tensor((2 * N,), "float32"), how: T.Tensor((2,), "int32")):
    """A bulk copy of ``how[1]`` elements from or to element ``how[0]``."""
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((2 * N,), "float32")
        full = T.alloc_barrier(32)
        first, size = how[0], how[1]
        T.clear(tile)
        if by == "W.bulk_load":
            W.bulk_load(tile[0], A[first], size, full[0])
            T.mbarrier_arrive(full[0])
            T.mbarrier_wait_parity(full[0], 0)
        elif by == "W.bulk_store":
            W.bulk_store(A[first], tile[0], size)
        elif by == "W.bulk_reduce":
            W.bulk_reduce(A[0], tile[first], size)
        W.bulk_commit()
        W.bulk_wait(0)


def run(program, **inputs):
    start = {"A": np.zeros(2 * N, np.float32), **inputs}
    return tw.simulate(program, world_size=1, inputs=[start], epochs=1)


every_copy = pytest.mark.parametrize("by", ["W.bulk_load", "W.bulk_store", "W.bulk_reduce"])


@every_copy
@pytest.mark.parametrize(
    ("first", "size", "text"),
    [
        (2, 16, "[2], 8 bytes after its start"),
        (0, 3, "size=3 elements are 12 bytes"),
        (0, -4, "size=-4 elements are -16 bytes"),
    ],
)
def test_a_bulk_copy_that_is_not_aligned(by, first, size, text):
    with pytest.raises(tw.SimulationError) as error:
        run(bulk(by), how=np.array([first, size], np.int32))
    assert error.value.kind == "alignment"
    assert text in error.value.report and "multiple of 16 bytes" in error.value.report
    assert by in error.value.report and names_line(error.value.report, "test_alignment.py:")


@every_copy
def test_an_aligned_bulk_copy(by):
    run(bulk(by), how=np.array([4, 16], np.int32))


@factory
def vector(
    by, A: T.Tensor((2 * N,), "float32"), how: T.Tensor((1,), "int32"), B: T.Tensor((4,), "float32")
):
    """Two or four elements at once, from element ``how[0]`` on."""
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            if by == "W.ld":
                B[0:4] = W.ld(A[how[0]], lanes=4)
            elif by == "W.st":
                W.st(A[how[0]], B[0:4])
            else:
                T.atomic_addx2(A[how[0]], B[0])


@pytest.mark.parametrize(("by", "size"), [("W.ld", 16), ("W.st", 16), ("T.atomic_addx2", 8)])
def test_a_vector_access_that_is_not_aligned_to_its_width(by, size):
    start = {"B": np.zeros(4, np.float32)}
    run(vector(by), how=np.array([4], np.int32), **start)
    with pytest.raises(tw.SimulationError) as error:
        run(vector(by), how=np.array([3], np.int32), **start)
    assert error.value.kind == "alignment"
    assert f"{by} at A[3], 12 bytes after its start" in error.value.report
    assert f"expected a multiple of {size} bytes" in error.value.report
