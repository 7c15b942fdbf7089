"""TileLang's atomic operations have the scope and order that they have on the GPU."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N = 64


def handed_over(symmetric, order):
    """A block fills ``data`` and raises a flag by T.atomic_add; another block, of this or the next
    rank, waits for it and reads."""

    @T.prim_func
    def between_ranks(
        data: W.Symmetric((N,), "int32"),
        flag: W.Symmetric((1,), "int32"),
        out: T.Tensor(N, "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me, peer = W.rank(), (W.rank() + 1) % W.world_size()
            for i in T.Parallel(N):
                data[peer, i] = 7 + i
            T.sync_threads()
            if T.get_thread_binding() == 0:
                T.atomic_add(flag[peer, 0], 1, memory_order=order)
            W.wait_ge(flag[me, 0], 1)
            for i in T.Parallel(N):
                out[i] = data[me, i]

    @T.prim_func
    def between_blocks(
        data: T.Tensor(N, "int32"), flag: T.Tensor(1, "int32"), out: T.Tensor(N, "int32")
    ):
        with T.Kernel(2, threads=N) as block:
            if block == 0:
                for i in T.Parallel(N):
                    data[i] = 7 + i
                T.sync_threads()
                if T.get_thread_binding() == 0:
                    T.atomic_add(flag[0], 1, memory_order=order)
            else:
                W.wait_ge(flag[0], 1, scope="gpu")
                for i in T.Parallel(N):
                    out[i] = data[i]

    return between_ranks if symmetric else between_blocks


def run(program, **more):
    start = {"data": np.zeros(N, np.int32), "flag": np.zeros(1, np.int32)}
    return tw.simulate(program, world_size=2, inputs=[start] * 2, epochs=1, schedules=10, **more)


def test_a_symmetric_flag_keeps_the_order_asked_for():
    for out in run(handed_over(True, "release")):
        np.testing.assert_array_equal(out["out"], 7 + np.arange(N))
    with pytest.raises(tw.SimulationError) as error:
        run(handed_over(True, None))
    assert error.value.kind == "race"


def test_a_release_that_tilelang_drops_is_lost_and_named():
    with pytest.raises(tw.SimulationError) as error:
        run(handed_over(False, "release"))
    assert error.value.kind == "race"
    lost = "T.atomic_add (relaxed: TileLang drops memory_order='release')"
    assert lost in error.value.report, error.value.report


def test_each_point_of_a_parallel_loop_adds():
    @T.prim_func
    def program(out: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=64) as _:
            for _ in T.Parallel(64):
                W.red_add(out[0], 1, scope="gpu")
            for i, _ in T.Parallel(2, 32):
                W.red_add(out[1 + i], 1, scope="gpu")

    (outputs,) = tw.simulate(program, 1, [{"out": np.zeros(4, np.int32)}], epochs=1)
    assert outputs["out"].tolist() == [64, 32, 32, 0]
