"""Proxy fences between stores of some threads, and asynchronous reads that other ones issue."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave.passes.device import insert_proxy_fences

STEPS = 3
A, C = T.Tensor((STEPS, 64, 64), "float16"), T.Tensor((STEPS, 64, 64), "float16")


@factory
def stored_after_a_barrier(A: A, C: C):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((64, 64), "float16")
        if T.get_thread_binding() < 128:
            for k in T.serial(STEPS):
                for i, j in T.Parallel(64, 64):
                    tile[i, j] = A[k, i, j] + 1
                T.sync_threads(3, 256)
                T.sync_threads(4, 256)
        else:
            for k in T.serial(STEPS):
                T.sync_threads(3, 256)
                T.copy(tile, C[k, :, :])
                T.sync_threads(4, 256)


@factory
def stored_after_a_wait(fence, A: A, C: C):
    with T.Kernel(1, threads=256):
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        ready, free = T.alloc_barrier(arrive_count=128), T.alloc_barrier(arrive_count=128)
        if tx < 128:
            for k in T.serial(STEPS):
                T.barrier_wait(free, k % 2 ^ 1)
                for i, j in T.Parallel(64, 64):
                    tile[i, j] = A[k, i, j] + 1
                if fence:
                    T.fence_proxy_async()
                T.barrier_arrive(ready)
        if tx >= 128:
            for k in T.serial(STEPS):
                T.barrier_wait(ready, k % 2)
                T.copy(tile, C[k, :, :])
                T.barrier_arrive(free)


@factory
def multiplied(loads, A: A, C: C):
    """Add 1 to tiles, and multiply them by the identity."""
    with T.Kernel(1, threads=256):
        tile, unit = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        ready, free = T.alloc_barrier(arrive_count=128), T.alloc_barrier(arrive_count=128)
        for i, j in T.Parallel(64, 64):
            unit[i, j] = T.if_then_else(i == j, 1, 0)
        if T.get_thread_binding() >= 128:
            for k in T.serial(STEPS):
                T.barrier_wait(free, k % 2 ^ 1)
                if loads:
                    T.tma_copy(A[k, :, :], tile, barrier=ready)
                else:
                    for i, j in T.Parallel(64, 64):
                        tile[i, j] = A[k, i, j] + 1
                T.barrier_arrive(ready)
        else:
            product = T.alloc_fragment((64, 64), "float32")
            for k in T.serial(STEPS):
                T.barrier_wait(ready, k % 2)
                T.gemm(tile, unit, product, clear_accum=True)
                T.barrier_arrive(free)
                T.copy(product, C[k, :, :])


@factory
def overwritten(changes, A: A, C: C):
    """Load tiles, add 1 to them in place or in registers, and store them mirrored."""
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((64, 64), "float16")
        ready, free = T.alloc_barrier(arrive_count=128), T.alloc_barrier(arrive_count=128)
        if T.get_thread_binding() < 128:
            for k in T.serial(STEPS):
                T.barrier_wait(free, k % 2 ^ 1)
                T.tma_copy(A[k, :, :], tile, barrier=ready)
                T.barrier_arrive(ready)
        else:
            for k in T.serial(STEPS):
                T.barrier_wait(ready, k % 2)
                if changes:
                    for i, j in T.Parallel(64, 64):
                        tile[i, j] = tile[i, j] + 1
                    T.sync_threads(3, 128)
                for i, j in T.Parallel(64, 64):
                    C[k, i, j] = tile[i, 63 - j] + (0 if changes else 1)
                T.barrier_arrive(free)


@pytest.mark.parametrize(("changes", "fences"), [(True, 1), (False, 0)])
def test_loads_of_what_other_threads_access(changes, fences):
    """The load that overwrites what threads have stored needs a fence, not that of what they have
    read."""
    assert tw.emit(overwritten(changes), arch="sm_90a").count("fence_proxy_async") == fences
    a = np.random.default_rng(0).integers(0, 9, (STEPS, 64, 64)).astype(np.float16)
    (out,) = tw.validate(overwritten(changes), 1, [{"A": a}], "sm_90a")
    np.testing.assert_array_equal(out["C"], a[:, :, ::-1] + 1)


@factory
def products(A: A, C: C):
    """Multiply tiles by the first one."""
    with T.Kernel(1, threads=32):
        left, right = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
        tile, product = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
        for k in T.serial(STEPS):
            T.clear(product)
            for i in T.Pipelined(2, num_stages=2):
                T.copy(A[k, :, i * 32 : i * 32 + 32], left)
                T.copy(A[0, i * 32 : i * 32 + 32, :], right)
                T.gemm(left, right, product)
            T.copy(product, tile)
            T.copy(tile, C[k, :, :])


def test_loads_of_stages_before_another_tile():
    """Stages that no thread stores to need no fence, although a tile after them does."""
    a = np.random.default_rng(0).integers(0, 3, (STEPS, 64, 64)).astype(np.float16)
    (out,) = tw.validate(products(), 1, [{"A": a}], "sm_90a")
    np.testing.assert_array_equal(out["C"], a @ a[0])
    before, load, _ = tw.emit(products(), arch="sm_90a").partition("tl::tma_load(")
    assert load and "fence_proxy_async" not in before.rpartition(".wait(")[2]


def test_load_without_a_fence_is_simulated(monkeypatch):
    monkeypatch.setattr(insert_proxy_fences, "unfenced_accesses", lambda func: set())
    a = np.zeros((STEPS, 64, 64), np.float16)
    with pytest.raises(tw.SimulationError, match=r"overwrites byte 0 .* no fence\.proxy") as e:
        tw.simulate(overwritten(True), 1, [{"A": a}], level="device")
    assert e.value.kind == "race" and "between it and store to tile" in e.value.report


@pytest.mark.parametrize(
    "program", [stored_after_a_barrier(), stored_after_a_wait(False), multiplied(False)]
)
def test_reads_of_what_other_threads_store(program):
    a = np.random.default_rng(0).integers(0, 9, (STEPS, 64, 64)).astype(np.float16)
    (out,) = tw.validate(program, 1, [{"A": a}], "sm_90a")
    np.testing.assert_array_equal(out["C"], a + 1)


@pytest.mark.parametrize("program", [stored_after_a_wait(True), multiplied(True)])
def test_reads_that_need_no_fence(program):
    loop = tw.emit(program, arch="sm_90a", world_size=1).rpartition("ready[0].wait(")[2]
    assert "fence_proxy_async" not in loop
