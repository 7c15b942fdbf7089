"""Completion of bulk loads and stores."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.simulator.memory.world import kind_of
from tileweave import language as W


@T.prim_func
def stored_tile(S: W.Symmetric((64,), "float32"), flag: W.Symmetric((1,), "uint32"),
                out: T.Tensor((64,), "float32"), meets: T.int32):  # fmt: skip
    """Thread 0 signals; which thread issued the store of the tile is unspecified."""
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((64,), "float32")
        peer = (W.rank() + 1) % W.world_size()
        T.fill(tile, 1.0)
        T.copy(tile, S[peer, :])
        T.tma_store_wait(0, read=False)
        if meets == 1:
            T.sync_threads()
        if T.get_thread_binding() == 0:
            W.fence("sys")
            W.red_add(flag[peer, 0], 1, scope="sys")
        W.wait_reached(flag[W.rank(), 0], 1)
        for i in T.Parallel(64):
            out[i] = S[W.rank(), i]


@pytest.mark.parametrize("meets", [0, 1])
def test_the_thread_that_signals_must_wait_for_the_bulk_store(meets):
    inputs = [{"flag": np.zeros(1, np.uint32), "meets": meets} for _ in range(2)]
    kind = kind_of(lambda: tw.simulate(stored_tile, 2, inputs, epochs=1))
    assert kind == (None if meets else "race")


@T.prim_func
def ends(S: W.Symmetric((64,), "float32"), waits: T.int32):
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((64,), "float32")
        T.fill(tile, 1.0)
        W.bulk_store(S[W.rank(), 0], tile, 64)
        W.bulk_commit()
        if waits == 1:
            W.bulk_wait(0, read=True)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_block_outlives_the_reads_of_its_bulk_stores(waits):
    kind = kind_of(lambda: tw.simulate(ends, 1, [{"waits": waits}]))
    assert kind == (None if waits else "reuse")
