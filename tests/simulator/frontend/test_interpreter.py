"""Kernels of TileLang's own operations in the simulator, against NumPy."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import names_line, needs_local_reductions
from tests.simulator.frontend.launch import normal, rng, run


@T.prim_func
def pad_with_zeros(A: T.Tensor((10, 10), "float32"), B: T.Tensor((16, 16), "float32")):
    with T.Kernel(1, threads=128) as _:
        tile = T.alloc_shared((16, 16), "float32")
        T.copy(A[0, 0], tile)
        for i, j in T.Parallel(16, 16):
            B[i, j] = tile[i, j]


def test_reads_out_of_bounds_are_zero():
    A = normal(10, 10)
    B = run(pad_with_zeros, A=A)["B"]
    assert (B[:10, :10] == A).all()
    assert not B[10:].any()
    assert not B[:, 10:].any()


n = T.dynamic("n")


@T.prim_func
def dynamic(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), scale: T.float32):
    with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
        for i in T.Parallel(32):
            B[bx * 32 + i] = A[bx * 32 + i] * scale


@pytest.mark.parametrize("size", [1, 32, 77])
def test_dynamic_shape_and_scalar(size):
    A = normal(size)
    assert (run(dynamic, A=A, B=np.zeros(size, np.float32), scale=2.0)["B"] == A * 2).all()


@T.prim_func
def registers_of_points(
    A: T.Tensor((8, 4), "float32"), at: T.Tensor((8,), "int32"), B: T.Tensor((6, 8, 4), "float32")
):
    with T.Kernel(1, threads=64) as _:
        x, row = T.alloc_var("float32"), T.alloc_local((4,), "float32")
        for i, j in T.Parallel(8, 4):
            x = A[i, j]
            if x < 0:
                x = -2 * x
            B[0, i, j] = x
            x = 7
        B[1, 0, 0] = x
        for i in T.Parallel(8):
            x = 0
            for k in T.serial(4):
                x += A[i, k]
                row[k] = x
            for k in T.vectorized(4):
                B[2, i, k] = row[k]
            B[3, i, 0] = row[at[i]]
        with T.ws(0):
            for i, j in T.Parallel(8, 4):
                x = A[i, j]
                if i > j:
                    x = 0
                B[4, i, j] = x


def test_each_point_of_a_loop_has_its_own_registers():
    A, at = normal(8, 4), rng.integers(0, 4, 8).astype(np.int32)
    B = run(registers_of_points, A=A, at=at)["B"]
    assert (B[0] == np.where(A < 0, -2 * A, A)).all() and B[1, 0, 0] == 7
    sums = np.add.accumulate(A, axis=1)
    np.testing.assert_allclose(B[2], sums, rtol=1e-5, atol=1e-6)
    assert (B[3, :, 0] == B[2, np.arange(8), at]).all()
    assert (B[4] == np.triu(A)).all()


@T.prim_func
def uniform_vectors(A: T.Tensor((3, 4), "float32"), B: T.Tensor((3, 4), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.serial(2):
            B[i, 0:4] = A[i, 0:4]
        if T.get_thread_binding() < 40:
            B[2, 0:4] = A[0, 0:4]


@pytest.mark.parametrize("level", ["tile", "device"])
def test_all_threads_load_and_store_the_same_vector(level):
    A = normal(3, 4)
    (tensors,) = tw.simulate(uniform_vectors, 1, [{"A": A, "B": 0 * A}], level=level)
    assert (tensors["B"] == A[[0, 1, 0]]).all()


@pytest.mark.parametrize(
    "way", ["behind", "within", pytest.param("tile", marks=needs_local_reductions)]
)
def test_registers_that_differ_are_refused_where_one_value_is_read(way):
    @T.prim_func
    def program(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            x, t = T.alloc_local((2,), "float32"), T.get_thread_binding()
            total = T.alloc_local((1,), "float32")
            x[0] = 0 if way == "behind" else t
            x[1] = 0
            if way == "behind":
                for i in T.Parallel(64):
                    x[0] += A[i]
                B[t] = x[0]
            elif way == "within":
                for i in T.Parallel(64):
                    B[i] = x[0]
            else:
                T.reduce_sum(x, total, dim=0)
                B[t] = total[0]

    with pytest.raises(tw.SimulationError, match="x, which differs between threads or po") as error:
        run(program, A=normal(64))
    assert error.value.kind == "unsupported"


@T.prim_func
def three_axes(B: T.Tensor((2, 3, 4, 8), "int32")):
    with T.Kernel(4, 3, 2, threads=(8, 2)) as (bx, by, bz):
        t, u = T.get_thread_binding(0), T.get_thread_binding(1)
        if u == 1:
            B[bz, by, bx, t] = bz * 1000 + by * 100 + bx * 10 + t


def test_three_axes_of_blocks_and_two_of_threads():
    B = run(three_axes)["B"]
    z, y, x, t = np.indices(B.shape)
    assert (B == z * 1000 + y * 100 + x * 10 + t).all()


@T.prim_func
def warps(A: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64) as _:
        t = T.get_thread_binding()
        if T.get_warp_idx() == 1:
            A[t] = T.get_lane_idx()
        elif T.shuffle_elect(64):
            A[t] = 100


def test_warps_and_lanes():
    A = run(warps, A=np.full(64, -1, np.int32))["A"]
    assert A.tolist() == [-1] * 31 + [100] + list(range(32))


@T.prim_func
def unknown(A: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32) as _:
        A[T.get_thread_binding()] = T.call_extern("float32", "my_function", A[0])


def test_unwritten_memory_that_a_branch_leaves_out():
    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), B: T.Tensor((8, 8), "int32"),
                C: T.Tensor((8,), "int32")):  # fmt: skip
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((8,), "int32")
            for i in T.Parallel(4):
                tile[i] = A[i]
            for i, j in T.Parallel(8, 8):
                x = tile[i]
                if i < 4:
                    if x > 2:
                        B[i, j] = x
                    else:
                        B[i, j] = 0
            for i in T.Parallel(8):
                y = tile[i]
                if i < 4:
                    C[i] = y

    A = np.array([1, 3, 2, 4], np.int32)
    zeros = {"B": np.zeros((8, 8), np.int32), "C": np.zeros(8, np.int32)}
    out = run(program, A=A, **zeros)
    assert (out["B"][:4] == np.where(A > 2, A, 0)[:, None]).all()
    assert (out["C"][:4] == A).all()


def test_an_unknown_operation_is_named_with_its_line():
    with pytest.raises(tw.SimulationError) as error:
        run(unknown, A=np.zeros(32, np.float32))
    assert error.value.kind == "unsupported"
    assert "my_function" in error.value.report
    assert names_line(error.value.report, "test_interpreter.py")
