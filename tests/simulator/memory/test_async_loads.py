"""Asynchronous copies progress independently: a signal does not order a copy without a wait."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

N = 64


@factory
def load(
    by,
    ahead,
    mail: W.Symmetric((N,), "int32"),
    credit: W.Symmetric((1,), "int32"),
    out: T.Tensor((2, N), "int32"),
):
    """Each rank loads its mail and credits its left neighbor, which then overwrites it.

    Args:
        by: what loads.
        ahead: whether the credit is given before the wait for the load.
    """
    with T.Kernel(1, threads=N) as _:
        me, ranks = W.rank(), W.world_size()
        tile = T.alloc_shared((N,), "int32")
        full = T.alloc_barrier(N)
        if by == "W.bulk_load":
            W.bulk_load(tile, mail[me, 0], N, full[0])
            T.mbarrier_arrive(full[0])
        elif by == "T.tma_copy":
            T.tma_copy(mail[me, 0:N], tile, barrier=full[0])
            T.mbarrier_arrive(full[0])
        else:
            T.async_copy(mail[me, 0:N], tile)
        if ahead:
            W.signal(credit[(me - 1) % ranks, 0])  # AHEAD
        if by == "T.async_copy":
            T.ptx_wait_group(0)
        else:
            T.mbarrier_wait_parity(full[0], 0)
        T.sync_threads()
        if not ahead:
            W.signal(credit[(me - 1) % ranks, 0])
        for i in T.Parallel(N):
            out[0, i] = tile[i]
        W.wait_reached(credit[me, 0], 1)
        for i in T.Parallel(N):
            mail[(me + 1) % ranks, i] = 100 + i
        W.sync_ranks()
        for i in T.Parallel(N):
            out[1, i] = mail[me, i]


def inputs(ranks=2):
    mail = np.arange(N, dtype=np.int32)
    return [{"mail": mail, "credit": np.zeros(1, np.int32)} for _ in range(ranks)]


every_load = pytest.mark.parametrize("by", ["W.bulk_load", "T.tma_copy", "T.async_copy"])


@every_load
def test_a_load_reads_until_it_is_waited_for(by):
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(load(by, True), world_size=2, inputs=inputs(), schedules=20, epochs=1)
    assert error.value.kind in ("race", "reuse")
    assert f"{by} of mail[" in error.value.report, error.value.report
    assert "asynchronous loads" in error.value.report


@every_load
def test_a_credit_after_the_wait_frees_what_was_loaded(by):
    for out in tw.simulate(load(by, False), world_size=2, inputs=inputs(), schedules=20, epochs=1):
        np.testing.assert_array_equal(out["out"], [np.arange(N), 100 + np.arange(N)])


@factory
def prefetch(
    waited,
    mail: W.Symmetric((2, N), "int32"),
    credit: W.Symmetric((1,), "int32"),
    out: T.Tensor((2, N), "int32"),
):
    """Two loads complete on their own mbarriers; the credit follows one wait or both."""
    with T.Kernel(1, threads=N) as _:
        me, ranks = W.rank(), W.world_size()
        tiles = T.alloc_shared((2, N), "int32")
        full = T.alloc_barrier([N, N])
        for k in T.serial(2):
            W.bulk_load(tiles[k, 0], mail[me, k, 0], N, full[k])
            T.mbarrier_arrive(full[k])
        if waited:
            T.mbarrier_wait_parity(full[1], 0)
        if waited > 1:
            T.mbarrier_wait_parity(full[0], 0)
        W.signal(credit[(me - 1) % ranks, 0])
        if not waited:
            T.mbarrier_wait_parity(full[1], 0)
        if waited < 2:
            T.mbarrier_wait_parity(full[0], 0)
        for k, i in T.Parallel(2, N):
            out[k, i] = tiles[k, i]
        W.wait_reached(credit[me, 0], 1)
        for i in T.Parallel(N):
            mail[(me + 1) % ranks, 0, i] = 100
        W.sync_ranks()


def test_an_mbarrier_does_not_cover_loads_of_another():
    start = [{"mail": np.ones((2, N), np.int32), "credit": np.zeros(1, np.int32)}] * 2
    with pytest.raises(tw.SimulationError, match="asynchronous loads"):
        tw.simulate(prefetch(1), world_size=2, inputs=start, schedules=20, epochs=1)
    for out in tw.simulate(prefetch(2), world_size=2, inputs=start, schedules=20, epochs=1):
        assert (out["out"] == 1).all()


@factory
def loads_in_a_loop(
    parts, A: T.Tensor((2, 64, 64), "float16"), C: T.Tensor((2, 64, 64), "float16")
):
    """Each iteration of the producer's loop loads another part of a tile by the TMA."""
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((2, 64, 64), "float16")
        ready = T.alloc_barrier(arrive_count=[128] * 2)
        if T.get_thread_binding() < 128:
            T.barrier_wait(ready[0], 0)
            T.barrier_wait(ready[1], 0)
            T.copy(tile, C)
        else:
            for j in T.unroll(2):
                if parts == "tiles":
                    T.tma_copy(A[j, :, :], tile[j, :, :], barrier=ready[j])
                else:
                    rows = slice(j * 32, j * 32 + 32)
                    T.tma_copy(A[:, rows, :], tile[:, rows, :], barrier=ready[j])
                T.barrier_arrive(ready[j])


@pytest.mark.parametrize("parts", ["tiles", "rows"])
def test_a_load_writes_the_place_that_it_named_when_it_was_issued(parts):
    A = np.random.default_rng(0).random((2, 64, 64)).astype(np.float16)
    out = tw.simulate(loads_in_a_loop(parts), 1, [{"A": A}], epochs=1)[0]
    assert (out["C"] == A).all()


@factory
def stores(by, wait, out: W.Symmetric((N,), "int32")):
    """Two copies store to the same place, with or without a wait between them."""
    with T.Kernel(1, threads=N) as _:
        me, ranks = W.rank(), W.world_size()
        tile = T.alloc_shared((N,), "int32")
        for k in T.serial(2):
            for i in T.Parallel(N):
                tile[i] = 10 * k + i
            if by == "W.bulk_store":
                W.bulk_store(out[(me + 1) % ranks, 0], tile, N)
                W.bulk_commit()
                W.bulk_wait(0, read=wait != "full")
            elif by == "T.tma_copy":
                T.tma_copy(tile, out[(me + 1) % ranks, 0:N])
                T.tma_store_wait(0, read=wait != "full")
                T.sync_threads()
            else:
                T.copy(tile, out[(me + 1) % ranks, 0:N])
                if wait == "full":
                    T.tma_store_wait(0, read=False)
        W.sync_ranks()


every_store = pytest.mark.parametrize("by", ["W.bulk_store", "T.tma_copy", "T.copy"])


@every_store
def test_two_stores_to_one_place_need_a_full_wait(by):
    start = [{"out": np.zeros(N, np.int32)}] * 2
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(stores(by, "read"), world_size=2, inputs=start, schedules=3, epochs=1)
    assert error.value.kind == "race"
    assert error.value.report.count(f"{by} of out") >= 2, error.value.report


@every_store
def test_a_full_wait_orders_two_stores_to_one_place(by):
    start = [{"out": np.zeros(N, np.int32)}] * 2
    for out in tw.simulate(stores(by, "full"), world_size=2, inputs=start, schedules=3, epochs=1):
        np.testing.assert_array_equal(out["out"], 10 + np.arange(N))
