"""Reports of uninitialized memory name what was never written, and the line that reads it first.
Those of asynchronous copies name the copy, and the wait that is missing."""

import numpy as np
import pytest
import tilelang
import tilelang.language as T
import torch

import tileweave as tw
from tests.factory import factory
from tests.lines import place_of
from tests.releases import RECORDS_DEVICE_LINES, RECORDS_LINES

LEVELS = ("tile", "sm_90a", "sm_80")
M, N = 32, 64
every_level = pytest.mark.parametrize("level", LEVELS)


def fault_of(program, level, **tensors) -> tw.SimulationError:
    options = {} if level == "tile" else {"level": "device", "arch": level}
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(program, 1, [tensors], epochs=1, **options)
    return error.value


def names(report: str, level: str, function, *marks: str) -> bool:
    """Return whether a report names the lines with these marks, if the level has lines."""
    has_lines = RECORDS_LINES if level == "tile" else RECORDS_DEVICE_LINES
    return not has_lines or all(f"--> {place_of(function, mark)}" in report for mark in marks)


@factory
def product(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        x = T.alloc_shared((64, 64), "float16")
        y = T.alloc_fragment((64, 64), "float32")
        T.copy(A, x)
        T.gemm(x, x, y)  # READ
        for i, j in T.Parallel(64, 64):
            y[i, j] *= 2
        T.copy(y, B)


@factory
def rows(batch, A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")):
    with T.Kernel(1, threads=128):
        y = T.alloc_fragment((M, N), "float32")
        total = T.alloc_fragment((M,), "float32")
        for i, j in T.Parallel(M, N):
            if j < N - 1:
                y[i, j] = A[i, j]
        T.reduce_sum(y, total, dim=1, batch=batch)  # READ
        T.copy(total, B)


@factory
def second_tile(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        x = T.alloc_shared((N,), "float32")
        y = T.alloc_shared((N,), "float32")
        z = T.alloc_shared((N,), "float32")
        x[t] = A[t]
        T.sync_threads()
        z[t] = x[N - 1 - t] + y[t]  # READ
        T.sync_threads()
        B[t] = z[N - 1 - t]


@factory
def elements(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        y = T.alloc_local((2,), "float32")
        z = T.alloc_local((1,), "float32")
        y[0] = A[t]
        z[0] = y[1]  # READ
        B[t] = z[0] + y[0]


@every_level
@pytest.mark.parametrize(
    ("make", "options"), [(product, ()), (rows, (1,)), (second_tile, ()), (elements, ())]
)
def test_a_report_names_the_tile_and_the_line_that_reads_it(make, options, level):
    program = make(*options)
    A = program.buffer_map[program.params[0]]
    error = fault_of(program, level, A=np.ones([int(n) for n in A.shape], str(A.dtype)))
    assert error.kind == "poison"
    assert "\ny is read before it is written" in error.report
    assert "; expected T.clear, T.fill, T.copy or another write before" in error.report
    assert names(error.report, level, make, "# READ")


def test_a_reduction_of_several_rows_at_once():
    """``batch`` reduces them by one exchange between the threads."""
    A = np.arange(M * N, dtype=np.float32).reshape(M, N)
    error = fault_of(rows(4), "sm_90a", A=A)
    assert error.kind == "poison" and "\ny is read before it is written" in error.report


@every_level
def test_a_report_names_the_line_that_reads_a_tensor(level):
    @T.prim_func
    def program(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            x = T.alloc_fragment((N,), "float32")
            for i in T.Parallel(N):
                x[i] = A[i] + B[i]  # READ TENSOR
            T.copy(x, B)

    report = fault_of(program, level, A=np.ones(N, np.float32)).report
    assert "\nB is read before it is written" in report and "expected an input" in report
    test = test_a_report_names_the_line_that_reads_a_tensor
    assert names(report, level, test, "# READ TENSOR")


@factory
def copies(waits, A: T.Tensor((4, 64, 32), "float16"), B: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        x = T.alloc_shared((2, 64, 32), "float16")
        y = T.alloc_fragment((64, 64), "float32")
        T.clear(y)
        T.async_copy(A[0, :, :], x[0, :, :])  # FIRST
        for i in T.serial(4):
            if i + 1 < 4:
                T.async_copy(A[i + 1, :, :], x[(i + 1) % 2, :, :])  # NEXT
                if waits:
                    T.ptx_wait_group(1)
            elif waits:
                T.ptx_wait_group(0)
            T.gemm(x[i % 2, :, :], x[i % 2, :, :], y, transpose_B=True)  # READ
        T.copy(y, B)


def fault_without_passes(program, level) -> tw.SimulationError:
    """Return the fault of a call without the passes of TileWeave, which would prevent it."""
    arch = "sm_90a" if level == "tile" else level
    with (
        tw.interpret("tile" if level == "tile" else "device", arch),
        pytest.raises(tw.SimulationError) as error,
    ):
        A = torch.ones(4, 64, 32, dtype=torch.float16)
        tilelang.compile(program, target={"kind": "cuda", "arch": arch})(A, torch.zeros(64, 64))
    return error.value


@every_level
def test_a_missing_wait_for_a_copy_is_named(level):
    report = fault_without_passes(copies(False), level).report
    assert "may still be " in report and "expected T.ptx_wait_group" in report
    assert names(report, level, copies, "# FIRST", "# READ")


@pytest.mark.parametrize("level", ["sm_90a", "sm_80"])
def test_a_missing_barrier_after_a_wait_is_named(level):
    """TileLang inserts none after a wait of the program."""
    report = fault_without_passes(copies(True), level).report
    assert "only other threads have waited for it; expected T.sync_threads after that" in report
    assert "may still be" not in report
    assert names(report, level, copies, "# NEXT", "# READ")
