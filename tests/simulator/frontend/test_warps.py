"""Functions of warps and blocks in the simulator."""

import functools

import numpy as np
import pytest
import tilelang
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.simulator.frontend import launch
from tests.simulator.frontend.launch import N, fault, integers, normal

run = functools.partial(launch.run, schedules=3)


@T.prim_func
def shuffles(A: T.Tensor((N,), "float32"), B: T.Tensor((5, N), "float32")):
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        B[0, t] = T.shfl_xor(A[t], 5)
        B[1, t] = T.shfl_down(A[t], 2)
        B[2, t] = T.shfl_up(A[t], 3)
        B[3, t] = T.shfl_sync(A[t], 7)
        B[4, t] = T.shfl_xor(A[t], 1, width=8)


@pytest.mark.parametrize("level", ["tile", "device"])
def test_shuffles(level):
    A, t = normal(N), np.arange(N)
    lane, first = t % 32, t - t % 32
    right = [
        A[t ^ 5], A[np.where(lane + 2 < 32, t + 2, t)], A[np.where(lane >= 3, t - 3, t)],
        A[first + 7], A[t ^ 1],
    ]  # fmt: skip
    assert (run(shuffles, level=level, A=A)["B"] == right).all()


def test_a_missing_lane_gives_poison():
    @T.prim_func
    def program(A: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            if t < 16:
                A[t] = T.shfl_down(A[t], 8)

    assert fault(program, A=normal(N)).kind == "poison"


@T.prim_func
def warp_reductions(A: T.Tensor((N,), "float32"), B: T.Tensor((3, N), "float32"),
                    K: T.Tensor((N,), "int32"), J: T.Tensor((2, N), "int32")):  # fmt: skip
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        B[0, t] = T.warp_reduce_sum(A[t])
        B[1, t] = T.warp_reduce_max(A[t])
        B[2, t] = T.warp_reduce_min(A[t])
        J[0, t] = T.warp_reduce_bitand(K[t])
        J[1, t] = T.warp_reduce_bitor(K[t])


@pytest.mark.parametrize("level", ["tile", "device"])
def test_warp_reductions(level):
    A, K = normal(N), integers(N)
    out = run(warp_reductions, level=level, A=A, K=K)
    warps = A.reshape(2, 32)
    right = [f(warps, axis=1).repeat(32) for f in (np.sum, np.max, np.min)]
    np.testing.assert_allclose(out["B"], right, rtol=1e-4, atol=1e-5)
    bits = [f.reduce(K.reshape(2, 32), axis=1).repeat(32) for f in (np.bitwise_and, np.bitwise_or)]
    assert (out["J"] == bits).all()


@T.prim_func
def votes(A: T.Tensor((N,), "int32"), B: T.Tensor((7, N), "int32"), C: T.Tensor((2, N), "uint64")):
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        B[0, t] = T.any_sync(A[t] > 10)
        B[1, t] = T.all_sync(A[t] > -10)
        B[2, t] = T.syncthreads_count(A[t] > 0)
        B[3, t] = T.syncthreads_and(A[t] > -30)
        B[4, t] = T.syncthreads_or(A[t] > 30)
        B[5, t] = T.Cast("int32", T.match_any_sync(A[t]) == T.uint32(1) << (t % 32))
        B[6, t] = T.Cast("int32", T.popcount(T.Cast("uint32", T.ballot_sync(A[t] > 0))))
        C[0, t] = T.ballot(A[t] > 0)
        C[1, t] = T.activemask()


@pytest.mark.parametrize("level", ["tile", "device"])
def test_votes(level):
    A = integers(N)
    out = run(votes, level=level, A=A)
    warps = A.reshape(2, 32)
    alone = [(np.equal(w, w[:, None]).sum(1) == 1) for w in warps]
    right = [
        (warps > 10).any(1).repeat(32), (warps > -10).all(1).repeat(32),
        np.full(N, (A > 0).sum()), np.ones(N), np.zeros(N), np.concatenate(alone),
        (warps > 0).sum(1).repeat(32),
    ]  # fmt: skip
    assert (out["B"] == right).all()
    ballot = ((warps > 0) << np.arange(32)).sum(1).repeat(32)
    assert (out["C"] == [ballot, np.full(N, 2**32 - 1)]).all()


@T.prim_func
def specialised(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=256) as _:
        tile = T.alloc_shared((N,), "float32")
        full = T.alloc_barrier(128)
        T.annotate_layout({tile: tilelang.layout.Layout((N,), lambda i: i)})
        T.use_swizzle(10)
        T.disable_warp_group_reg_alloc()
        with T.ws(0):
            T.barrier_wait(full[0], 0)
            for i in T.Parallel(N):
                B[i] = tile[i] * 2
        with T.ws(1):
            for i in T.Parallel(N):
                tile[i] = A[i]
            T.barrier_arrive(full[0])


def test_warp_groups_run_concurrently():
    A = normal(N)
    assert (run(specialised, A=A)["B"] == A * 2).all()


@factory
def between_warp_groups(statement, A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
    with T.Kernel(1, threads=256) as _:
        t = T.get_thread_binding()
        full = T.alloc_barrier(128)
        if t < 128:
            T.barrier_wait(full[0], 0)
        if statement == "element":
            B[t] = A[t]
        if statement == "copy":
            T.copy(A, B)
        if statement == "barrier":
            T.sync_threads()
        if t >= 128:
            T.barrier_arrive(full[0])


def test_warp_groups_execute_their_parts_of_a_statement_between_branches():
    A = normal(256)
    assert (run(between_warp_groups("element"), A=A)["B"] == A).all()


@pytest.mark.parametrize(
    ("statement", "kind", "text"),
    [
        ("copy", "unsupported", "expected it before the branches of these threads"),
        (
            "barrier",
            "deadlock",
            "in launch 0 wait for the others",
        ),
    ],
)
def test_statement_between_branches_for_which_threads_do_not_wait(statement, kind, text):
    error = fault(between_warp_groups(statement), A=normal(256))
    assert error.kind == kind and text in error.report


@T.prim_func
def grid(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
    with T.Kernel(4, threads=32) as block:
        if T.get_thread_binding() == 0:
            A[block] = block
        T.sync_grid()
        if T.get_thread_binding() == 0:
            B[block] = A[3 - block]


def test_a_grid_meets():
    assert run(grid, schedules=10)["B"].tolist() == [3, 2, 1, 0]


def test_a_grid_that_does_not_fit_is_a_deadlock():
    with pytest.raises(tw.SimulationError, match=r"T\.sync_grid") as error:
        tw.simulate(grid, 1, resident_blocks=3)
    assert error.value.kind == "deadlock"


def product_of_warp(rows=16):
    @T.prim_func
    def program(
        A: T.Tensor((16, 16), "float16"), B: T.Tensor((8, 16), "float16"),
        C: T.Tensor((16, 8), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            A_tile = T.alloc_shared((16, 16), "float16")
            B_tile = T.alloc_shared((8, 16), "float16")
            a, b = T.alloc_local((8,), "float16"), T.alloc_local((4,), "float16")
            c = T.alloc_local((4,), "float32")
            for i, j in T.Parallel(rows, 16):
                A_tile[i, j] = A[i, j]
            T.copy(B, B_tile)
            T.clear(c)
            T.ptx_ldmatrix(
                T.bool(False), 4, T.access_ptr(A_tile[t % 16, t // 16 * 8], "r", extent=8),
                T.access_ptr(a[0], "w", extent=8),
            )  # fmt: skip
            T.ptx_ldmatrix(
                T.bool(False), 2, T.access_ptr(B_tile[t % 8, t // 8 % 2 * 8], "r", extent=4),
                T.access_ptr(b[0], "w", extent=4),
            )  # fmt: skip
            T.ptx_mma(
                "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", a.data, 0, b.data, 0,
                c.data, 0, T.bool(False),
            )  # fmt: skip
            for i in range(4):
                C[t // 4 + i // 2 * 8, t % 4 * 2 + i % 2] = c[i]

    return program


@pytest.mark.parametrize("level", ["tile", "device"])
def test_products_of_warps(level):
    A, B = normal(16, 16, dtype="float16"), normal(8, 16, dtype="float16")
    C = run(product_of_warp(), level=level, A=A, B=B)["C"]
    np.testing.assert_allclose(C, A.astype(np.float32) @ B.T, rtol=1e-3, atol=1e-3)
    assert fault(product_of_warp(15), level=level, A=A, B=B).kind == "poison"
