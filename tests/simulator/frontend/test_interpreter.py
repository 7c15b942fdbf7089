"""Kernels of TileLang's own operations in the simulator, against NumPy."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import names_line, needs_local_reductions
from tests.simulator.frontend.launch import normal, rng, run
from tileweave import language as W


@T.prim_func
def copy_tiles(A: T.Tensor((100, 60), "float16"), B: T.Tensor((100, 60), "float16")):
    with T.Kernel(4, 2, threads=128) as (bx, by):
        tile = T.alloc_shared((32, 32), "float16")
        T.copy(A[bx * 32, by * 32], tile)
        T.copy(tile, B[bx * 32, by * 32])


def test_copies_clip_at_the_edges():
    A = normal(100, 60, dtype=np.float16)
    assert (run(copy_tiles, A=A)["B"] == A).all()


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


def gemm_program(transpose_A, transpose_B, dtype):
    M, N, K = 32, 48, 64

    @T.prim_func
    def gemm(
        A: T.Tensor((K, M) if transpose_A else (M, K), dtype),
        B: T.Tensor((N, K) if transpose_B else (K, N), dtype),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((16, M) if transpose_A else (M, 16), dtype)
            b = T.alloc_shared((N, 16) if transpose_B else (16, N), dtype)
            c = T.alloc_fragment((M, N), "float32")
            T.clear(c)
            for k in T.Pipelined(K // 16, num_stages=2):
                if transpose_A:
                    T.copy(A[k * 16, 0], a)
                else:
                    T.copy(A[0, k * 16], a)
                if transpose_B:
                    T.copy(B[0, k * 16], b)
                else:
                    T.copy(B[k * 16, 0], b)
                T.gemm(a, b, c, transpose_A=transpose_A, transpose_B=transpose_B)
            T.copy(c, C)

    return gemm


@pytest.mark.parametrize("transpose_A", [False, True])
@pytest.mark.parametrize("transpose_B", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_gemm(transpose_A, transpose_B, dtype):
    kind = getattr(ml_dtypes, dtype)
    A = normal(*((64, 32) if transpose_A else (32, 64)), dtype=kind)
    B = normal(*((48, 64) if transpose_B else (64, 48)), dtype=kind)
    a, b = A.astype(np.float32), B.astype(np.float32)
    right = (a.T if transpose_A else a) @ (b.T if transpose_B else b)
    C = run(gemm_program(transpose_A, transpose_B, dtype), A=A, B=B)["C"]
    np.testing.assert_allclose(C, right, rtol=1e-4, atol=1e-4)


@T.prim_func
def softmax(A: T.Tensor((32, 64), "float32"), B: T.Tensor((32, 64), "float32")):
    with T.Kernel(2, threads=64) as bx:
        x = T.alloc_fragment((16, 64), "float32")
        most = T.alloc_fragment((16,), "float32")
        total = T.alloc_fragment((16,), "float32")
        T.copy(A[bx * 16, 0], x)
        T.fill(most, -T.infinity("float32"))
        T.reduce_max(x, most, dim=1, clear=False)
        for i, j in T.Parallel(16, 64):
            x[i, j] = T.exp2((x[i, j] - most[i]) * 1.4426950408889634)
        T.reduce_sum(x, total, dim=1)
        for i, j in T.Parallel(16, 64):
            x[i, j] = x[i, j] / total[i]
        T.copy(x, B[bx * 16, 0])


def test_softmax():
    A = normal(32, 64)
    e = np.exp(A - A.max(1, keepdims=True))
    np.testing.assert_allclose(run(softmax, A=A)["B"], e / e.sum(1, keepdims=True), rtol=1e-5)


REDUCTIONS = {
    "sum": lambda x: x.sum(0), "max": lambda x: x.max(0), "min": lambda x: x.min(0),
    "abssum": lambda x: abs(x).sum(0), "absmax": lambda x: abs(x).max(0),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(REDUCTIONS))
def test_reduce(kind):
    @T.prim_func
    def program(A: T.Tensor((8, 16), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_fragment((8, 16), "float32")
            y = T.alloc_fragment((16,), "float32")
            T.copy(A, x)
            getattr(T, f"reduce_{kind}")(x, y, dim=0)
            T.copy(y, B)

    A = normal(8, 16)
    np.testing.assert_allclose(run(program, A=A)["B"], REDUCTIONS[kind](A), rtol=1e-5)


@T.prim_func
def running_sums(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8, 16), "float32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((8, 16), "float32")
        T.copy(A, x)
        T.cumsum(x, dim=1)
        T.copy(x, B)


def test_cumsum():
    A = normal(8, 16)
    np.testing.assert_allclose(run(running_sums, A=A)["B"], A.cumsum(1), rtol=1e-4, atol=1e-5)


@T.prim_func
def threads_of_their_own(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64) as _:
        t = T.get_thread_binding()
        x = T.alloc_var("int32")
        y = T.alloc_local((4,), "int32")
        x = A[t]
        for k in T.unroll(4):
            y[k] = x * k
        if t < 10:
            x = x + 100
        elif t == 20:
            x = 7
        while x % 5 != 0:
            x += 1
            if x == 13:
                T.loop_break()
        B[t] = x + y[2]


def test_threads_have_their_own_registers_and_ways():
    A = np.arange(64, dtype=np.int32)

    def one(t):
        x = t + 100 if t < 10 else 7 if t == 20 else t
        while x % 5 != 0:
            x += 1
            if x == 13:
                break
        return x + 2 * t

    assert run(threads_of_their_own, A=A)["B"].tolist() == [one(t) for t in range(64)]


@T.prim_func
def atomics(A: T.Tensor((32, 32), "float32"), total: T.Tensor((32,), "float32"),
            sums: T.Tensor((32, 32), "float32"), count: T.Tensor((2,), "int32")):  # fmt: skip
    with T.Kernel(4, threads=64) as _:
        x = T.alloc_shared((32, 32), "float32")
        T.copy(A, x)
        T.atomic_add(sums, x)
        for i, j in T.Parallel(32, 32):
            T.atomic_add(total[j], x[i, j])
        T.atomic_add(count[0], 1)
        if T.get_thread_binding() == 0:
            T.atomic_max(count[1], 5)


def test_atomics():
    A = normal(32, 32)
    zeros = dict(total=np.zeros(32, np.float32), sums=np.zeros((32, 32), np.float32),
                 count=np.zeros(2, np.int32))  # fmt: skip
    out = run(atomics, A=A, **zeros)
    np.testing.assert_allclose(out["total"], A.sum(0) * 4, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(out["sums"], A * 4, rtol=1e-5)
    assert out["count"].tolist() == [256, 5]


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
def two_kernels(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"),
                C: T.Tensor((64,), "float32")):  # fmt: skip
    with T.Kernel(2, threads=32) as bx:
        for i in T.Parallel(32):
            B[bx * 32 + i] = A[bx * 32 + i] + 1
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(64):
            C[i] = B[63 - i] * 2


def test_kernels_of_one_program_follow_each_other():
    A = normal(64)
    assert (run(two_kernels, A=A)["C"] == (A + 1)[::-1] * 2).all()


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
def producer_and_consumer(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64) as _:
        tile = T.alloc_shared((64,), "float32")
        full = T.alloc_barrier(32)
        t = T.get_thread_binding()
        if t < 32:
            T.mbarrier_wait_parity(full[0], 0)
            B[t] = tile[t] + tile[t + 32]
            B[t + 32] = 0
        else:
            tile[t] = A[t]
            tile[t - 32] = A[t - 32]
            T.mbarrier_arrive(full[0])


def test_warps_wait_for_each_other():
    A = normal(64)
    B = run(producer_and_consumer, A=A)["B"]
    assert (B[:32] == A[:32] + A[32:]).all()


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
def outside(A: T.Tensor((8,), "int32"), where: T.int32):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            A[where] = 1


def test_a_thread_outside_a_tensor():
    with pytest.raises(tw.SimulationError) as error:
        run(outside, A=np.zeros(8, np.int32), where=8)
    assert error.value.kind == "bounds"
    assert "A[8]" in error.value.report
    assert names_line(error.value.report, "test_interpreter.py")


@T.prim_func
def poisoned(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((8,), "float32")
        for i in T.Parallel(7):
            x[i] = A[i]
        for i in T.Parallel(8):
            B[i] = x[i] * 2.0


def test_uninitialized_memory():
    with pytest.raises(tw.SimulationError) as error:
        run(poisoned, A=np.zeros(8, np.float32))
    assert error.value.kind == "poison"


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


@T.prim_func
def each_rank(S: W.Symmetric((4,), "int32"), epochs: T.Tensor((3,), "int32"), epoch: T.int32):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            S[W.rank(), 1] = W.rank() * 10 + W.world_size()
            epochs[epoch] = epoch + 1


def test_ranks_have_their_parts_and_scalars_may_follow_the_epoch():
    inputs = [dict(S=np.full(4, r, np.int32), epoch=lambda e: e) for r in range(3)]
    out = tw.simulate(each_rank, 3, inputs)
    assert [o["S"].tolist() for o in out] == [[r, r * 10 + 3, r, r] for r in range(3)]
    assert out[0]["epochs"].tolist() == [1, 2, 3]
