"""Faults of device functions that no tile program shows: each removed operation is reported."""

from functools import partial

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

import tileweave as tw
from tests.factory import factory
from tests.lines import place_of
from tests.releases import needs_bulk_copies, needs_device_lines
from tests.simulator.device.programs import dropped, edited, run, with_argument
from tests.simulator.mutation.device_programs import gemm, matrices
from tileweave import language as W
from tileweave.passes.ir.walk import flatten, op_name
from tileweave.runtime.kernel.configured import configured
from tileweave.simulator.device.program import DeviceProgram
from tileweave.simulator.machine.executable import Executable
from tileweave.simulator.report.errors import SimulationError


def reported(change, threads=128, arch="sm_90a") -> SimulationError:
    with pytest.raises(SimulationError) as error:
        run(threads, arch, change, schedules=4)
    return error.value


more_threads = edited("tirx.tvm_storage_sync", lambda call: call if len(call.args) < 3 else
                      with_argument(2, tirx.IntImm("int32", 256))(call))  # fmt: skip
fewer_bytes = edited("tl.mbarrier_expect_tx", with_argument(1, tirx.IntImm("int32", 16)))


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (more_threads, "deadlock", "128 of 256 threads have arrived"),
        (fewer_bytes, "deadlock", "bytes missing"),
        (dropped("tirx.ptx_arrive_barrier"), "deadlock", "of 128 arrived"),
        (dropped("tl.warpgroup_arrive"), "race", "no wgmma.fence is between it and the store"),
        (dropped("tl.ptx_fence_barrier_init"), "race", "no fence.mbarrier_init is after"),
    ],
)
def test_report(change, kind, text):
    """The other operations: ``test_fault_is_killed`` of mutation/test_device_mutants.py."""
    error = reported(change)
    assert error.kind == kind and text in error.report


def test_block_barrier_of_half_the_threads():
    halved = edited("tirx.tvm_storage_sync", lambda call: call if len(call.args) < 3 else
                    with_argument(2, tirx.IntImm("int32", 128))(call))  # fmt: skip
    error = reported(halved, threads=256)
    assert error.kind == "race" and "buf_dyn_shmem" in error.report


def test_block_that_ends_before_a_load():
    """A loop without iterations skips the wait of its first iteration."""

    @T.prim_func
    def program(
        A: T.Tensor((64, 64), "bfloat16"),
        steps: T.Tensor((1,), "int32"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            A_tile = T.alloc_shared((64, 64), "bfloat16")
            B_tile = T.alloc_shared((64, 64), "bfloat16")
            total = T.alloc_fragment((64, 64), "float32")
            T.copy(A, A_tile)
            T.clear(total)
            for _ in T.Pipelined(steps[0], num_stages=2):
                T.copy(A, B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C)

    make = partial(DeviceProgram, change=dropped("tl.mbarrier_wait_parity"))
    numbers = matrices(64, 64, 64)["A"]
    inputs = {"A": numbers, "steps": np.zeros(1, np.int32)}
    with pytest.raises(SimulationError) as error:
        tw.simulate(Executable(program, 1, make), 1, [inputs])
    assert error.value.kind == "reuse"
    assert "ends while a load may still write its shared memory" in error.value.report


@needs_bulk_copies
def test_end_after_an_empty_group():
    """A group without a store, such as one after a signal that completes all stores, ends."""

    @T.prim_func
    def program(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((64,), "float32")
            T.copy(A, tile)
            W.bulk_store(B[0], tile, 64)
            W.bulk_commit()
            W.bulk_wait(0)
            W.bulk_commit()

    numbers = np.arange(64, dtype=np.float32)
    outputs = tw.validate(program, 1, [{"A": numbers}])
    assert np.array_equal(outputs[0]["B"], numbers)


def test_accumulators_in_flight():
    """A GEMM of one step loads no tile twice, so that only the accumulators show the fault."""
    make = partial(DeviceProgram, change=dropped("tl.warpgroup_wait"))
    with pytest.raises(SimulationError) as error:
        tw.simulate(Executable(gemm(64, 64, 1, 32, 128), 1, make), 1, [matrices(64, 64, 32)])
    assert error.value.kind == "race"
    assert "registers are read while a wgmma that writes them is in flight" in error.value.report


def test_any_lane_may_be_elected():
    """The thread that signals need not be the one that stores by TMA."""

    def without_barrier(call):
        return None if len(call.args) == 3 and call.args[0].value == "shared" else call

    error = reported(edited("tirx.tvm_storage_sync", without_barrier))
    assert error.kind == "race" and "parts" in error.report


def test_uninitialized_accumulator():
    def drop_stores(kernel):
        def replace(stmt):
            is_clear = isinstance(stmt.value, tirx.Broadcast | tirx.FloatImm)
            return tirx.Evaluate(tirx.IntImm("int32", 0)) if is_clear else None

        return kernel.with_body(ir_transform(kernel.body, None, replace, ["tirx.BufferStore"]))

    error = reported(drop_stores)
    assert error.kind == "poison" and "TMA store to C of uninitialized memory" in error.report


def test_uninitialized_vector_and_scalar():
    """Lowering makes vectors of the elements, whose poison has a lane axis, and of the scalar."""

    @T.prim_func
    def program(Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            factor = T.alloc_local((1,), "float32")
            values = T.alloc_fragment((64,), "float32")
            for i in T.Parallel(64):
                values[i] = values[i] * factor[0]
            T.copy(values, Y)

    with pytest.raises(SimulationError) as error:
        tw.simulate(program, 1, level="device", arch="sm_80")
    assert error.value.kind == "poison"


def without_specialization(program) -> tirx.PrimFunc:
    return configured("simulate", program, {"tl.disable_warp_specialized": True})


def test_proxy_fence_before_cp_async_is_complete():
    """On sm_90a without warp specialization, wgmma reads what ``cp.async`` has written."""
    wait, fence = "tirx.ptx_wait_group", "tl.fence_proxy_async"

    def fenced(kernel: tirx.PrimFunc, after: bool) -> tirx.PrimFunc:
        def change(stmt):
            if op_name(stmt.value) != wait:
                return None
            call = tirx.Evaluate(tirx.call_intrin("handle", tvm.ir.Op.get(fence)))
            return flatten([stmt, call] if after else [call, stmt])

        kernel = dropped(fence)(kernel)
        return kernel.with_body(ir_transform(kernel.body, None, change, ["tirx.Evaluate"]))

    program, inputs = without_specialization(gemm(64, 64, 3, 32, 128)), [matrices(64, 64, 96)]

    def simulate(after: bool) -> None:
        make = partial(DeviceProgram, change=partial(fenced, after=after))
        tw.simulate(Executable(program, 1, make), 1, inputs)

    with pytest.raises(SimulationError) as error:
        simulate(after=False)
    assert error.value.kind == "race"
    assert "no fence.proxy.async is between it and cp.async" in error.value.report
    with pytest.raises(SimulationError, match="TMA store reads"):  # no fence comes before that
        simulate(after=True)


def race_without(program, *barriers: int) -> str:
    """Return the race that a device function reports without these block barriers."""

    def change(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
        for number in sorted(barriers, reverse=True):
            kernel = dropped("tirx.tvm_storage_sync", number)(kernel)
        return kernel

    inputs = [{"A": np.arange(64, dtype=np.int32) % 16}]
    with pytest.raises(SimulationError) as error:
        tw.simulate(Executable(program(), 1, partial(DeviceProgram, change=change)), 1, inputs)
    assert error.value.kind == "race"
    return error.value.report


@factory
def two_tiles(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        t = T.get_thread_binding()
        x = T.alloc_shared((64,), "int32")
        y = T.alloc_shared((64,), "int32")
        x[t] = A[t]  # STORE
        y[t] = A[t]
        B[t] = x[63 - t]  # LOAD
        B[t] += y[t]
        x[t] = 1  # OVERWRITE


@needs_device_lines
def test_a_race_names_the_conflicting_statement_and_no_later_one():
    read, overwritten = race_without(two_tiles, 0), race_without(two_tiles, 1)
    assert f"which has written it --> {place_of(two_tiles, '# STORE')}\n" in read
    assert f" --> {place_of(two_tiles, '# LOAD')}\n" in read
    assert f"which has read it --> {place_of(two_tiles, '# LOAD')}\n" in overwritten
    assert f" --> {place_of(two_tiles, '# OVERWRITE')}\n" in overwritten


@factory
def histogram(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        t = T.get_thread_binding()
        x = T.alloc_shared((64,), "int32")
        T.clear(x)
        T.atomic_add(x[A[t]], 1)
        B[t] = x[t]


def test_atomics_race_with_other_accesses_and_not_with_each_other():
    assert "T.atomic_add of x at byte " in race_without(histogram, 0)
    report = race_without(histogram, 1)
    assert report.startswith("load of x at byte ") and "which has changed it" in report


@pytest.mark.parametrize("level", ["tile", "device"])
@pytest.mark.parametrize(
    ("arrivals", "waited", "text"),
    [
        (1, 1, "at mbarrier bars[1]: phase 0, parity waited for 0, 0 of 32 arrived -->"),
        (2, 0, "64 arrivals at mbarrier bars[0], initialized for 48, in rank 0"),
    ],
)
def test_a_report_of_an_mbarrier_names_its_buffer_and_index(arrivals, waited, text, level):
    @T.prim_func
    def program(A: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            other = T.alloc_barrier(32)
            bars = T.alloc_barrier([48, 32])
            T.mbarrier_arrive(other)
            for _ in T.serial(arrivals):
                T.mbarrier_arrive(bars[0])
            if A[0] == 0:
                T.mbarrier_wait_parity(bars[waited], 0)

    with pytest.raises(SimulationError) as error:
        tw.simulate(program, 1, [{"A": np.zeros(1, np.int32)}], level=level)
    assert text in error.value.report
